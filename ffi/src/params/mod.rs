//! Parameters. One table defines parsing, validation, help, the configuration dump, the C enumeration
//! and `docs/params.md`.
//!
//! ```text
//!   built-in, automatic  <  file (DORMOUSE_CONFIG)  <  environment  <  options of dormouse_runtime_create
//! ```
//! An automatic value is chosen when a runtime is created and revised by what it measures (`automatic`).
//! Parameters are independent of each other. An invalid value is an error with the name, the value,
//! its source and the accepted values. An unknown name, or an earlier one, is one warning.

mod automatic;
mod cgroup;
mod config_line;
mod docs;
mod load;
mod nearest;
mod table;
mod text;
mod values;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_device::sync::Mutex;

pub(crate) use automatic::{Choices, Machine, ProcessMemory};
pub(crate) use load::{Config, Override, PREFIX};
use load::{Loaded, Note};
pub(crate) use table::{HEAP_MIN_BUILT_IN_BYTES, Key};
pub(crate) use values::{LOG_TARGETS, parse_filter};

use crate::abi::c::dormouse_param_t;
use crate::fault::{Fault, c_text};
use crate::{files, status, stderr};

/// Maximum number of warnings about names.
const NOTES_MAX: usize = 8;

static IN_EFFECT: Mutex<Option<Arc<Config>>> = Mutex::new(None);
/// Returns the automatic values of the runtime created last, as they are now.
type Live = Box<dyn Fn() -> Choices + Send>;
static LIVE: Mutex<Option<Live>> = Mutex::new(None);
static IS_REPORTED: AtomicBool = AtomicBool::new(false);
/// Whether the process started without a variable of this library. The configuration is the built-in one then, until a
/// runtime is created: reading the environment inside `malloc` could race with a `setenv` of the program.
static STARTED_PLAIN: AtomicBool = AtomicBool::new(false);

/// Loads the file, the environment and `overrides` as the configuration in effect. The help and
/// warnings are written once per process.
pub(crate) fn load(overrides: &[Override]) -> Result<Arc<Config>, Fault> {
    let Loaded { config, notes, bad } = Config::from_sources(&load::Process, overrides);
    if !IS_REPORTED.swap(true, Ordering::Relaxed) {
        report(&config, &notes);
    }
    if !bad.is_empty() {
        return Err(Fault::new(status::DORMOUSE_ERR_CONFIG, bad));
    }
    let config = Arc::new(config);
    *IN_EFFECT.lock() = Some(Arc::clone(&config));
    Ok(config)
}

/// Notes that the process started without a variable of this library. Reads the size of memory and its limits: the
/// program may have no right to open files when the heap needs them.
pub(crate) fn start_plain() {
    values::total_memory_bytes();
    STARTED_PLAIN.store(true, Ordering::Relaxed);
}

/// Returns the configuration in effect. Loads it if necessary.
pub(crate) fn in_effect() -> Result<Arc<Config>, Fault> {
    let mut known = IN_EFFECT.lock();
    if let Some(config) = &*known {
        return Ok(Arc::clone(config));
    }
    if STARTED_PLAIN.load(Ordering::Relaxed) {
        return Ok(Arc::clone(known.insert(Arc::new(Config::built_in()))));
    }
    drop(known);
    load(&[])
}

/// Shows the automatic values of a runtime from now on.
pub(crate) fn show_live(live: impl Fn() -> Choices + Send + 'static) {
    *LIVE.lock() = Some(Box::new(live));
}

/// Returns `config` with its automatic values: those of the runtime created last, or else those of a runtime that would
/// be created now.
fn with_automatic(config: &Config) -> Config {
    let live = LIVE.lock().as_ref().map(|live| live());
    live.unwrap_or_else(|| Choices::of(&Machine::read(config))).apply(config)
}

/// Writes the help if requested, and warnings about names.
fn report(config: &Config, notes: &[Note]) {
    if config.switch(Key::Help) {
        stderr::write(text::help(config).as_bytes());
    }
    for note in notes.iter().take(NOTES_MAX) {
        match note {
            Note::Renamed(earlier, key) => {
                stderr::print(&format!("{earlier} is now called {}", key.name()));
            }
            Note::Unknown(name, line) if config.switch(Key::WarnUnknown) => {
                let guess = nearest::suggestion(name)
                    .map_or_else(String::new, |known| format!("; did you mean {known}?"));
                stderr::print(&format!(
                    "unknown parameter {name}{line}{guess} (DORMOUSE_WARN_UNKNOWN=0 silences this)"
                ));
            }
            Note::Unknown(..) => {}
        }
    }
}

/// Returns parameter `index` as C sees it, `None` past the end of the table.
pub(crate) fn describe(index: u32) -> Result<Option<dormouse_param_t>, Fault> {
    let Some(param) = table::TABLE.get(index as usize) else { return Ok(None) };
    let config = in_effect()?;
    let automatic = config.is_automatic(param.key).then(|| with_automatic(&config));
    let setting = automatic.as_ref().unwrap_or(&config).setting(param.key);
    Ok(Some(dormouse_param_t {
        name: param.name.as_ptr(),
        kind: param.kind.name().as_ptr(),
        built_in: param.built_in.as_ptr(),
        accepts: param.accepts.as_ptr(),
        help: param.help.as_ptr(),
        provenance: setting.provenance as i32,
        value: c_text(&setting.to_text()),
        reason: c_text(&setting.reason),
        ..dormouse_param_t::default()
    }))
}

/// Returns the message for an `index` past the end of the table.
pub(crate) fn end_text(index: u32) -> String {
    format!("index is {index}; accepted: 0 to {}", table::TABLE.len() - 1)
}

/// Writes the current configuration to the file at `path`.
pub(crate) fn dump_to(path: &Path) -> Result<(), Fault> {
    let text = text::dump(&with_automatic(&*in_effect()?));
    files::dump(path, |file| file.write_all(text.as_bytes()))
}
