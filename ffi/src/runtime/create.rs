//! Creation of a runtime: the configuration, then the heap, then the tiers.

use std::sync::Arc;

use dormouse_device::DeviceKind;
use dormouse_device::host::guard;
use dormouse_offload::tune::Chosen;
use dormouse_offload::{
    Automatic, Engine, EngineConfig, OffloadError, Rescuer, ResidencyPolicy, Revised, Tier,
};
use dormouse_storage::{IoEngine, NvmeConfig};

use super::report::figures_of;
use super::{Makers, RUNTIMES, Runtime};
use crate::abi::c;
use crate::boundary::{In, check_reserved};
use crate::fault::Fault;
use crate::heap::{Heap, HeapEngine, symbols};
use crate::live::{self, Publisher};
use crate::params::{self, Choices, Config, Key, Machine, Override, ProcessMemory};
use crate::{allocation_log, dumps, log, status};

/// `dormouse_options_t`, read and checked.
#[derive(Debug)]
pub(crate) struct Options {
    kind: DeviceKind,
    ordinal: u32,
    overrides: Vec<Override>,
}

impl Options {
    /// Reads the struct; NULL sets nothing.
    ///
    /// # Safety
    /// `pointer` is NULL or a struct with its size set, whose strings are NUL-terminated.
    pub(crate) unsafe fn read(pointer: *const c::dormouse_options_t) -> Result<Self, Fault> {
        let mut read = Self { kind: DeviceKind::Host, ordinal: 0, overrides: Vec::new() };
        if pointer.is_null() {
            return Ok(read);
        }
        // SAFETY: the caller's contract.
        let options = unsafe { In::structure(pointer, "options") }?;
        check_reserved(options.reserved, "options.reserved")?;
        (read.kind, read.ordinal) = device(options.device_kind, options.device_ordinal)?;
        let budget = match read.kind {
            DeviceKind::Host => Key::CpuBudget,
            DeviceKind::Cuda => Key::CudaBudget,
        };
        for (key, number) in [
            (budget, options.alloc_budget_bytes),
            (Key::HostBudget, options.host_budget_bytes),
            (Key::NvmeFile, options.nvme_file_bytes),
            (Key::Inflight, options.inflight_bytes),
            (Key::IoThreads, u64::from(options.io_threads)),
            (Key::Window, u64::from(options.window_layers)),
        ] {
            if number != 0 {
                read.overrides.push(Override { key, text: number.to_string() });
            }
        }
        if !options.nvme_dir.is_null() {
            // SAFETY: the caller's contract; not NULL.
            let text = unsafe { In::text(options.nvme_dir, "options.nvme_dir") }?;
            read.overrides.push(Override { key: Key::NvmeDir, text });
        }
        let checksum = match options.checksum {
            0 => None,
            1 => Some("on"),
            -1 => Some("off"),
            seen => {
                return Err(Fault::argument(format!(
                    "options.checksum is {seen}; accepted: 0 (not set), 1 (on), -1 (off)"
                )));
            }
        };
        if let Some(text) = checksum {
            read.overrides.push(Override { key: Key::Checksum, text: text.to_owned() });
        }
        Ok(read)
    }
}

fn device(kind: i32, ordinal: i32) -> Result<(DeviceKind, u32), Fault> {
    match (kind, u32::try_from(ordinal)) {
        (0 | c::DORMOUSE_DEVICE_HOST, Ok(0)) => Ok((DeviceKind::Host, 0)),
        (0 | c::DORMOUSE_DEVICE_HOST, _) => Err(Fault::argument(format!(
            "options.device_ordinal is {ordinal}; accepted: 0, the only host device"
        ))),
        (c::DORMOUSE_DEVICE_CUDA, Ok(ordinal)) => Ok((DeviceKind::Cuda, ordinal)),
        (c::DORMOUSE_DEVICE_CUDA, Err(_)) => Err(Fault::argument(format!(
            "options.device_ordinal is {ordinal}; accepted: 0 and above"
        ))),
        _ => Err(Fault::argument(format!(
            "options.device_kind is {kind}; accepted: 1 (DORMOUSE_DEVICE_HOST), \
             2 (DORMOUSE_DEVICE_CUDA)"
        ))),
    }
}

impl Runtime {
    /// Creates the runtime and returns its handle.
    pub(crate) fn create(options: Options) -> Result<*mut c::dormouse_runtime_t, Fault> {
        let _one_at_a_time = Self::one_at_a_time();
        let device = (options.kind, options.ordinal);
        let others = RUNTIMES.live();
        if others.iter().any(|other| other.heap.device() == device) {
            return Err(Fault::new(
                status::DORMOUSE_ERR_BUSY,
                format!(
                    "{:?} device {} has a live runtime; accepted: one per device, destroy it first",
                    options.kind, options.ordinal
                ),
            ));
        }
        let loaded = params::load(&options.overrides)?;
        log::install(&loaded)?;
        let choices = Choices::of(&Machine::read(&loaded));
        let config = Arc::new(choices.apply(&loaded));
        let heap = match options.kind {
            DeviceKind::Host => Heap::get_or_create(&config)?,
            DeviceKind::Cuda => Heap::get_or_create_gpu(options.ordinal, &config)?,
        };
        heap.check_config(&config)?;
        warn_of_other_budget(options.kind, &config);
        let has_page = others.iter().any(|other| other.live.lock().is_some());
        if has_page && !live::is_built_in(&config) {
            tracing::warn!(target: "ffi", "DORMOUSE_STATS_FILE shows the first runtime only");
        }
        let page = if has_page { None } else { live::create(&config, &figures_of(heap, &config))? };
        if options.kind == DeviceKind::Host {
            // Not when the heap is created, since nothing sleeps without a runtime: the handlers that the program has
            // installed by now, such as Python's `faulthandler`, come behind ours.
            guard::install()?;
        }
        let (tiers, unavailable_reason) = tiers(&config, &choices);
        let file_bytes = tiers.nvme.as_ref().map_or(0, |nvme| nvme.file_bytes);
        let timeline = Arc::clone(heap.timeline());
        let engine = Engine::new(Arc::clone(heap.allocator()), tiers, timeline)
            .map_err(|error| explain(error, &config, file_bytes))?;
        heap.set_budget(&config)?;
        heap.set_engine(Some(Arc::clone(&engine)));
        let revised = Arc::downgrade(&engine);
        let current = move || {
            let mut choices = choices.clone();
            let revised = revised.upgrade().map(|engine| engine.revised()).unwrap_or_default();
            choices.revise(by_key(revised));
            choices
        };
        params::show_live(current.clone());
        let figures = move || figures_of(heap, &current().apply(&loaded));
        let live = page.and_then(|page| Publisher::start(page, figures)).into();
        let rescuer = rescuer(&engine, options.kind, &config).into();
        dumps::watch(&config, heap.dumped());
        allocation_log::watch(&config, &heap.dumped(), heap.allocator());
        let makers = Makers::default();
        let runtime = Self { heap, engine, config, live, rescuer, makers, unavailable_reason };
        if log::rank().unwrap_or(0) == 0 {
            runtime.banner();
        }
        RUNTIMES.insert(Arc::new(runtime))
    }

    /// Emits one event with the settings of this runtime.
    fn banner(&self) {
        if !tracing::enabled!(target: "ffi", tracing::Level::INFO) {
            return;
        }
        let (kind, ordinal) = self.heap.device();
        let stats = self.engine.stats();
        let budget = |tier: Tier| stats.tiers.get(tier.index()).map_or(0, |tier| tier.budget_bytes);
        tracing::info!(
            target: "ffi",
            version = env!("CARGO_PKG_VERSION"),
            device = %format_args!("{kind:?} {ordinal}"),
            device_budget_bytes = budget(Tier::Device),
            host_budget_bytes = budget(Tier::Host),
            nvme_budget_bytes = budget(Tier::Nvme),
            unavailable = self.unavailable_reason,
            settings = self.config.list_changed(),
            automatic = self.config.list_automatic(),
            "runtime created"
        );
    }
}

/// Warns about a budget of a device that the process does not use, if that of this device is not set.
fn warn_of_other_budget(kind: DeviceKind, config: &Config) {
    let (own, other, is_in_use) = match kind {
        DeviceKind::Host => (Key::CpuBudget, Key::CudaBudget, Heap::gpus().next().is_some()),
        DeviceKind::Cuda => {
            (Key::CudaBudget, Key::CpuBudget, Heap::get().is_some() || symbols::is_preloaded())
        }
    };
    if config.is_chosen(other) && !config.is_chosen(own) && !is_in_use {
        let (set, device, limit) = (other.name(), format!("{kind:?}"), own.name());
        tracing::warn!(target: "ffi", set, device, limit, "the budget that is set is of another kind of device");
    }
}

/// Starts the thread that serves stray accesses, unless the process is to stop at them. Without it, with a
/// warning, the process stops as well.
fn rescuer(engine: &Arc<HeapEngine>, kind: DeviceKind, config: &Config) -> Option<Rescuer> {
    if kind != DeviceKind::Host || config.text(Key::Stray) != "wake" {
        return None;
    }
    let started = engine.rescue();
    if let Err(error) = &started {
        tracing::warn!(target: "ffi", %error, "no thread for stray accesses");
    }
    started.ok()
}

/// Returns the values that an engine has revised, by their parameters.
fn by_key(revised: Revised) -> impl Iterator<Item = (Key, Chosen)> {
    let Revised { window_layers, inflight_bytes, host_bytes, queue_depth } = revised;
    let values = [
        (Key::Window, window_layers),
        (Key::Inflight, inflight_bytes),
        (Key::HostBudget, host_bytes),
        (Key::NvmeDepth, queue_depth),
    ];
    values.into_iter().filter_map(|(key, chosen)| Some((key, chosen?)))
}

/// Returns the engine's settings, and the reasons why tiers are closed.
fn tiers(config: &Config, choices: &Choices) -> (EngineConfig, String) {
    let mut closed = Vec::new();
    let file_bytes_max = config.number(Key::NvmeFile);
    let file_bytes = match config.is_automatic(Key::NvmeFile) {
        true => choices.file_start_bytes,
        false => file_bytes_max,
    };
    let nvme = config.path(Key::NvmeDir).map(|dir| NvmeConfig {
        dir: dir.clone(),
        file_bytes,
        file_bytes_max,
        io_threads: config.number(Key::IoThreads) as usize,
        io_engine: IoEngine::named(config.text(Key::NvmeEngine)).unwrap_or_default(),
        queue_depth: config.number(Key::NvmeDepth) as usize,
        write_budget_bytes: config.number(Key::NvmeWriteBudget),
    });
    if nvme.is_none() {
        closed.push("nvme: DORMOUSE_NVME_DIR is not set");
    }
    if config.number(Key::HostBudget) == 0 && !config.is_automatic(Key::HostBudget) {
        closed.push("host: DORMOUSE_HOST_BUDGET_BYTES is 0");
    }
    let automatic = Automatic {
        inflight_bytes: config.is_automatic(Key::Inflight),
        window_layers: config.is_automatic(Key::Window),
        host_bytes: config.is_automatic(Key::HostBudget),
        queue_depth: config.is_automatic(Key::NvmeDepth),
        file_bytes: config.is_automatic(Key::NvmeFile),
        memory: Some(Arc::new(ProcessMemory)),
    };
    let settings = EngineConfig {
        automatic,
        nvme,
        host_bytes_max: config.number(Key::HostBudget),
        inflight_bytes_max: config.number(Key::Inflight),
        residency: ResidencyPolicy::named(config.text(Key::Residency)).unwrap_or_default(),
        wake_window_layers: config.number(Key::Window) as u32,
        checksums: config.switch(Key::Checksum),
        ..EngineConfig::default()
    };
    (settings, closed.join("; "))
}

/// Adds what is accepted to the error of an engine that could not be made.
fn explain(error: OffloadError, config: &Config, file_bytes: u64) -> Fault {
    let is_thread = matches!(error, OffloadError::Thread(_));
    let is_tier = matches!(error, OffloadError::Nvme(_));
    let mut fault = Fault::from(error);
    if is_thread {
        fault.message = format!(
            "{} (accepted: limits with room for the threads: ulimit -u, pids.max of the control group, \
             kernel.threads-max)",
            fault.message
        )
        .into();
    }
    if !is_tier {
        return fault;
    }
    let setting = config.setting(Key::NvmeDir);
    fault.message = format!(
        "{} (DORMOUSE_NVME_DIR is {:?} from the {}; accepted: an existing, writable directory on \
         a disk with room for DORMOUSE_NVME_FILE_BYTES = {file_bytes})",
        fault.message,
        setting.to_text(),
        setting.provenance.name(),
    )
    .into();
    fault
}
