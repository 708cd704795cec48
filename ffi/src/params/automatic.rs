//! Values of the parameters that nobody has set: the facts of this machine, and what follows from them
//! (`residency::tune`).

use std::path::Path;

use dormouse_offload::AvailableMemory;
use dormouse_offload::tune::{self, Chosen, Disk, DiskIo};
use dormouse_storage::{IoEngine, probe};

use super::load::Config;
use super::table::Key;
use super::values;

/// The facts of a machine that values are chosen from.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    cpus: u64,
    memory_bytes: u64,
    available_bytes: Option<u64>,
    /// The disk of the NVMe tier, or why there is none.
    disk: Result<Disk, String>,
}

impl Machine {
    /// Reads the facts that `config` needs.
    pub(crate) fn read(config: &Config) -> Self {
        let disk = match config.path(Key::NvmeDir) {
            None => Err(format!("{} is not set", Key::NvmeDir.name())),
            Some(dir) => disk(dir, config.text(Key::NvmeEngine)),
        };
        Self {
            cpus: std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64),
            memory_bytes: values::total_memory_bytes(),
            available_bytes: values::available_memory_bytes(),
            disk,
        }
    }
}

fn disk(dir: &Path, engine: &str) -> Result<Disk, String> {
    let found = probe(dir).map_err(|error| error.to_string())?;
    let io = match found.no_uring {
        _ if engine == IoEngine::Threads.name() => {
            DiskIo::Threads(format!("{} is threads", Key::NvmeEngine.name()))
        }
        Some(why) => DiskIo::Threads(why),
        None => DiskIo::Uring,
    };
    Ok(Disk {
        free_bytes: found.free_bytes,
        total_bytes: found.total_bytes,
        file_bytes_max: found.file_bytes_max,
        io,
    })
}

/// A value that the runtime chose, or why it has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) value: Option<u64>,
    pub(crate) reason: String,
}

impl From<Chosen> for Choice {
    fn from(chosen: Chosen) -> Self {
        Self { value: Some(chosen.value), reason: chosen.reason }
    }
}

/// The values of the automatic parameters.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    list: Vec<(Key, Choice)>,
    /// The size at which an automatic file begins; also if its disk could not be looked at, so that the creation of the
    /// file says why.
    pub(crate) file_start_bytes: u64,
}

impl Choices {
    /// Returns the values that follow from the facts, before anything is measured.
    pub(crate) fn of(machine: &Machine) -> Self {
        let Machine { cpus, memory_bytes, available_bytes, disk } = machine;
        let first = |value: u64, what: &str| Choice {
            value: Some(value),
            reason: format!("no {what} was measured yet"),
        };
        let (file, depth) = match disk {
            Ok(disk) => (Ok(tune::file_bytes(disk)), first(tune::QUEUE_DEPTH_MIN, "disk")),
            Err(why) => {
                (Err(why), Choice { value: Some(tune::QUEUE_DEPTH_MIN), reason: why.clone() })
            }
        };
        let file_start_bytes = file.as_ref().map_or(tune::FILE_BYTES_START, |it| it.start_bytes);
        let file = match file {
            Ok(file) => file.limit.into(),
            Err(why) => Choice { value: None, reason: why.clone() },
        };
        let io = disk.as_ref().ok().map(|disk| &disk.io);
        let list = vec![
            (Key::HostBudget, tune::host_bytes(*memory_bytes, *available_bytes, 0).into()),
            (Key::NvmeFile, file),
            (Key::NvmeDepth, depth),
            (Key::IoThreads, tune::io_threads(*cpus, io).into()),
            (Key::Inflight, tune::inflight_bytes(0, 0, *available_bytes).into()),
            (Key::Window, first(tune::WINDOW_LAYERS_START, "step")),
        ];
        Self { list, file_start_bytes }
    }

    /// Returns `config` with these values in place of automatic ones.
    pub(crate) fn apply(&self, config: &Config) -> Config {
        let choices = self.list.iter();
        config.with(choices.map(|(key, choice)| (*key, choice.value, choice.reason.as_str())))
    }

    #[cfg(test)]
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.list.iter().map(|(key, _)| *key).collect()
    }

    /// Replaces values by what was measured since.
    pub(crate) fn revise(&mut self, revised: impl IntoIterator<Item = (Key, Chosen)>) {
        for (key, chosen) in revised {
            let place = self.list.iter_mut().find(|(known, _)| *known == key);
            if let Some((_, choice)) = place {
                *choice = chosen.into();
            }
        }
    }
}

/// The memory that this process can still take.
#[derive(Debug)]
pub(crate) struct ProcessMemory;

impl AvailableMemory for ProcessMemory {
    fn available_bytes(&self) -> Option<u64> {
        values::available_memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::{Override, Provenance, Sources};
    use super::super::table::TABLE;
    use super::*;
    use std::ffi::OsString;

    const GIB: u64 = 1 << 30;

    fn machine() -> Machine {
        let io = DiskIo::Threads("io_uring refused".to_owned());
        let disk =
            Disk { free_bytes: 90 * GIB, total_bytes: 96 * GIB, file_bytes_max: u64::MAX, io };
        Machine {
            cpus: 16,
            memory_bytes: 64 * GIB,
            available_bytes: Some(40 * GIB),
            disk: Ok(disk),
        }
    }

    /// A file and variables.
    struct Given(&'static str, Vec<(&'static str, &'static str)>);

    impl Sources for Given {
        fn environment(&self) -> Vec<(String, OsString)> {
            let given = self.1.iter().chain([&("DORMOUSE_CONFIG", "it")]);
            given.map(|(name, value)| ((*name).to_owned(), value.into())).collect()
        }
        fn file(&self, _: &str) -> Result<String, String> {
            Ok(self.0.to_owned())
        }
        fn memory_bytes(&self) -> u64 {
            64 * GIB
        }
    }

    fn config(
        file: &'static str,
        variables: &[(&'static str, &'static str)],
        options: &[Override],
    ) -> Config {
        let loaded = Config::from_sources(&Given(file, variables.to_vec()), options);
        assert_eq!(loaded.bad, "");
        Choices::of(&machine()).apply(&loaded.config)
    }

    #[test]
    fn every_automatic_parameter_has_a_value_and_a_reason() {
        let chosen = config("", &[], &[]);
        let automatic: Vec<_> = TABLE.iter().filter(|param| param.is_automatic()).collect();
        assert_eq!(automatic.len(), Choices::of(&machine()).list.len());
        for param in automatic {
            let setting = chosen.setting(param.key);
            assert_eq!(setting.provenance, Provenance::Automatic, "{:?}", param.key);
            let accepted = values::parse(param, &setting.to_text(), 0);
            assert_eq!(accepted.as_ref(), Some(&setting.value), "{:?}", param.key);
            assert!(!setting.reason.is_empty(), "{:?}", param.key);
        }
        let threads = chosen.setting(Key::IoThreads);
        assert_eq!(chosen.number(Key::IoThreads), 8);
        assert_eq!(
            threads.source(),
            "automatic: CPUs: 16; one request per thread: io_uring refused"
        );
        assert_eq!(chosen.number(Key::HostBudget), 20 * GIB);
        assert_eq!(chosen.number(Key::NvmeFile), 84 * GIB);
    }

    #[test]
    fn a_value_of_any_source_wins_and_auto_gives_it_back() {
        let file = "DORMOUSE_OFFLOAD_IO_THREADS = 3\nDORMOUSE_OFFLOAD_WINDOW_LAYERS = 5\n";
        let variables =
            [("DORMOUSE_OFFLOAD_WINDOW_LAYERS", "auto"), ("DORMOUSE_HOST_BUDGET_BYTES", "1GiB")];
        let options = [Override { key: Key::NvmeFile, text: GIB.to_string() }];
        let chosen = config(file, &variables, &options);
        let seen = |key| (chosen.number(key), chosen.setting(key).provenance);
        assert_eq!(seen(Key::IoThreads), (3, Provenance::File));
        assert_eq!(seen(Key::HostBudget), (GIB, Provenance::Environment));
        assert_eq!(seen(Key::NvmeFile), (GIB, Provenance::Options));
        assert_eq!(seen(Key::Window), (3, Provenance::Automatic));
        assert_eq!(chosen.setting(Key::IoThreads).reason, "");
    }

    #[test]
    fn a_file_without_a_disk_has_no_size() {
        let machine = Machine { disk: Err("none".to_owned()), ..machine() };
        let config = Choices::of(&machine).apply(&Config::built_in());
        for (key, value) in [(Key::NvmeFile, "auto"), (Key::NvmeDepth, "4")] {
            let setting = config.setting(key);
            assert_eq!(setting.to_text(), value);
            assert_eq!(setting.source(), "automatic: none");
        }
        assert_eq!(config.number(Key::IoThreads), 2);
        assert_eq!(Choices::of(&machine).file_start_bytes, 4 * GIB);
    }

    #[test]
    fn what_was_measured_replaces_what_was_chosen() {
        let mut choices = Choices::of(&machine());
        let measured = Chosen { value: 7, reason: "as measured".to_owned() };
        choices.revise([(Key::Window, measured)]);
        let config = choices.apply(&Config::built_in());
        assert_eq!(config.number(Key::Window), 7);
        assert_eq!(config.setting(Key::Window).source(), "automatic: as measured");
    }
}
