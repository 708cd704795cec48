//! Loading: file, environment and options into one configuration, with the source of each value.

use std::ffi::OsString;
use std::path::PathBuf;

use super::config_line;
use super::table::{AUTOMATIC, Key, Param, RENAMED, TABLE};
use super::values::{self, Value};
use crate::abi::c;
use crate::files;

/// Maximum size of a configuration file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Names of all variables begin with this.
pub(crate) const PREFIX: &str = "DORMOUSE_";

/// Source of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Provenance {
    BuiltIn = c::DORMOUSE_FROM_BUILT_IN,
    File = c::DORMOUSE_FROM_FILE,
    Environment = c::DORMOUSE_FROM_ENVIRONMENT,
    Options = c::DORMOUSE_FROM_OPTIONS,
    Automatic = c::DORMOUSE_FROM_AUTOMATIC,
}

impl Provenance {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::BuiltIn => "built in",
            Self::File => "file",
            Self::Environment => "environment",
            Self::Options => "options",
            Self::Automatic => "automatic",
        }
    }
}

/// A value from the options of `dormouse_runtime_create`, as text, which is checked like the others.
#[derive(Clone, Debug)]
pub(crate) struct Override {
    pub(crate) key: Key,
    pub(crate) text: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) value: Value,
    pub(crate) provenance: Provenance,
    /// Why an automatic value is what it is; empty for others.
    pub(crate) reason: String,
}

impl Setting {
    fn new(value: Value, provenance: Provenance) -> Self {
        let provenance = if value == Value::Automatic { Provenance::Automatic } else { provenance };
        Self { value, provenance, reason: String::new() }
    }

    /// Returns the source, with the reason of an automatic value.
    pub(crate) fn source(&self) -> String {
        match self.reason.as_str() {
            "" => self.provenance.name().to_owned(),
            reason => format!("{}: {reason}", self.provenance.name()),
        }
    }

    /// Formats the value in the syntax of a configuration file.
    pub(crate) fn to_text(&self) -> String {
        match &self.value {
            Value::Number(number) => number.to_string(),
            Value::Switch(on) => if *on { "on" } else { "off" }.to_owned(),
            Value::Text(text) => text.clone(),
            Value::Automatic => AUTOMATIC.to_owned(),
            Value::Path(path) => {
                path.as_ref().map_or_else(String::new, |path| path.display().to_string())
            }
        }
    }
}

/// Sources of texts: the process, or a test's.
pub(crate) trait Sources {
    /// Returns the `DORMOUSE_*` variables.
    fn environment(&self) -> Vec<(String, OsString)>;
    /// Reads a configuration file.
    fn file(&self, path: &str) -> Result<String, String>;
    /// Returns the size of physical memory.
    fn memory_bytes(&self) -> u64;
}

/// The value of every parameter.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    settings: Vec<Setting>,
}

/// What the sources contain.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The configuration. A value that is not accepted leaves that of the next source.
    pub(crate) config: Config,
    /// Warnings about names.
    pub(crate) notes: Vec<Note>,
    /// Every invalid value with what is accepted, separated by "; "; empty: none.
    pub(crate) bad: String,
}

/// A warning about a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// No parameter has this name. The second text is the line of the file that has it, ` in FILE:LINE`, or empty.
    Unknown(String, String),
    /// An earlier name of a parameter.
    Renamed(&'static str, Key),
}

impl Config {
    /// Loads `sources`.
    pub(crate) fn from_sources(sources: &dyn Sources, overrides: &[Override]) -> Loaded {
        let mut loader = Loader::new(sources.memory_bytes());
        let mut environment = sources.environment();
        // An empty variable is not set. An earlier name comes after the present one.
        environment.retain(|(_, value)| !value.to_string_lossy().trim().is_empty());
        environment.sort_by_key(|(name, _)| renamed(name).is_some());
        let config = environment.iter().find(|(name, _)| name == Key::Config.name());
        if let Some((_, path)) = config {
            let path = path.to_string_lossy();
            match sources.file(&path) {
                Ok(text) => loader.file(&path, &text),
                Err(error) => loader.bad.push(format!(
                    "DORMOUSE_CONFIG is {path:?} from the environment ({error}); accepted: {}",
                    TABLE[Key::Config as usize].accepts()
                )),
            }
        }
        for (name, value) in &environment {
            match value.to_str() {
                Some(value) => {
                    loader.named(name, value, Provenance::Environment, "the environment");
                }
                None => loader
                    .bad
                    .push(format!("{name} is {value:?} from the environment; accepted: UTF-8")),
            }
        }
        for Override { key, text } in overrides {
            loader.set(&TABLE[*key as usize], key.name(), text, Provenance::Options, "the options");
        }
        let Loader { settings, notes, bad, .. } = loader;
        Loaded { config: Self { settings }, notes, bad: bad.join("; ") }
    }

    /// Returns the configuration of a process without variables.
    pub(crate) fn built_in() -> Self {
        Self { settings: Loader::new(Process.memory_bytes()).settings }
    }

    pub(crate) fn setting(&self, key: Key) -> &Setting {
        &self.settings[key as usize]
    }

    /// Returns whether a user has chosen the value.
    pub(crate) fn is_chosen(&self, key: Key) -> bool {
        !matches!(self.setting(key).provenance, Provenance::BuiltIn | Provenance::Automatic)
    }

    /// Returns the configuration with `choices` in place of automatic values: for each key the number, if there is one,
    /// and the reason.
    pub(crate) fn with<'a>(
        &self,
        choices: impl IntoIterator<Item = (Key, Option<u64>, &'a str)>,
    ) -> Self {
        let mut chosen = self.clone();
        for (key, number, reason) in choices {
            let setting = &mut chosen.settings[key as usize];
            if setting.provenance == Provenance::Automatic {
                setting.value = number.map_or(Value::Automatic, Value::Number);
                // One line of a file.
                setting.reason = reason.replace(['\n', '\r'], " ");
            }
        }
        chosen
    }

    /// Returns whether the runtime chooses the value.
    pub(crate) fn is_automatic(&self, key: Key) -> bool {
        self.setting(key).provenance == Provenance::Automatic
    }

    /// Lists the automatic values, as `NAME=value (reason)`.
    pub(crate) fn list_automatic(&self) -> String {
        let automatic = TABLE.iter().filter(|param| self.is_automatic(param.key));
        let texts = automatic.map(|param| {
            let setting = self.setting(param.key);
            format!("{}={} ({})", param.name(), setting.to_text(), setting.reason)
        });
        texts.collect::<Vec<_>>().join(", ")
    }

    /// Lists the values that a user has set, as `NAME=value (source)`.
    pub(crate) fn list_changed(&self) -> String {
        let chosen = TABLE.iter().filter(|param| self.is_chosen(param.key));
        let texts = chosen.map(|param| {
            let setting = self.setting(param.key);
            format!("{}={} ({})", param.name(), setting.to_text(), setting.provenance.name())
        });
        texts.collect::<Vec<_>>().join(", ")
    }

    /// Returns a size in bytes or a count; 0 for a key of another kind, and for one that the runtime chooses and has
    /// not.
    pub(crate) fn number(&self, key: Key) -> u64 {
        match self.setting(key).value {
            Value::Number(number) => number,
            _ => 0,
        }
    }

    pub(crate) fn switch(&self, key: Key) -> bool {
        matches!(self.setting(key).value, Value::Switch(true))
    }

    /// Returns a word of a choice, or a filter; empty for a key of another kind.
    pub(crate) fn text(&self, key: Key) -> &str {
        match &self.setting(key).value {
            Value::Text(text) => text,
            _ => "",
        }
    }

    /// Returns a path; `None`: not set.
    pub(crate) fn path(&self, key: Key) -> Option<&PathBuf> {
        match &self.setting(key).value {
            Value::Path(path) => path.as_ref(),
            _ => None,
        }
    }
}

/// Returns the parameter that had `name` before.
fn renamed(name: &str) -> Option<(&'static str, Key)> {
    RENAMED.iter().find(|(earlier, _)| *earlier == name).copied()
}

struct Loader {
    memory_bytes: u64,
    settings: Vec<Setting>,
    notes: Vec<Note>,
    bad: Vec<String>,
}

impl Loader {
    fn new(memory_bytes: u64) -> Self {
        let built_in = |param: &Param| {
            // Built-in values are accepted (tested).
            let value = values::parse(param, param.built_in(), memory_bytes);
            let value = value.unwrap_or_else(|| Value::Text(param.built_in().to_owned()));
            Setting::new(value, Provenance::BuiltIn)
        };
        Self {
            memory_bytes,
            settings: TABLE.iter().map(built_in).collect(),
            notes: Vec::new(),
            bad: Vec::new(),
        }
    }

    fn file(&mut self, path: &str, text: &str) {
        // Some editors begin a file with a byte-order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (at, line) in text.lines().enumerate() {
            let place = format!("{path}:{}", at + 1);
            match config_line::parse(line) {
                Ok(None) => {}
                Ok(Some((name, value))) => self.named(name, &value, Provenance::File, &place),
                Err(accepted) => {
                    let seen = line.trim();
                    self.bad.push(format!("{place} is {seen:?}; accepted: {accepted}"));
                }
            }
        }
    }

    fn named(&mut self, name: &str, value: &str, provenance: Provenance, place: &str) {
        let earlier = renamed(name);
        let param = match earlier {
            Some((_, key)) => Some(&TABLE[key as usize]),
            None => TABLE.iter().find(|param| param.name() == name),
        };
        let Some(param) = param else {
            let is_file = provenance == Provenance::File;
            let line = if is_file { format!(" in {place}") } else { String::new() };
            self.notes.push(Note::Unknown(name.to_owned(), line));
            return;
        };
        if provenance == Provenance::File && !param.in_file {
            self.bad.push(format!("{place} sets {name}; it is accepted in the environment only"));
            return;
        }
        if let Some((earlier, key)) = earlier {
            let note = Note::Renamed(earlier, key);
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
            // The present name in the same source counts.
            if self.settings[key as usize].provenance == provenance {
                return;
            }
        }
        if !value.is_empty() {
            self.set(param, name, value, provenance, place);
        }
    }

    /// Sets `param`, which the source calls `name`.
    fn set(&mut self, param: &Param, name: &str, text: &str, provenance: Provenance, place: &str) {
        match values::parse(param, text, self.memory_bytes) {
            Some(value) => {
                self.settings[param.key as usize] = Setting::new(value, provenance);
            }
            None => self
                .bad
                .push(format!("{name} is {text:?} from {place}; accepted: {}", param.accepts())),
        }
    }
}

/// The environment and files of this process.
pub(super) struct Process;

impl Sources for Process {
    fn environment(&self) -> Vec<(String, OsString)> {
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| name.starts_with(PREFIX))
            .collect()
    }

    fn file(&self, path: &str) -> Result<String, String> {
        files::read_file(path.as_ref(), FILE_BYTES_MAX).map_err(|error| error.to_string())
    }

    fn memory_bytes(&self) -> u64 {
        values::total_memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::HEAP_MIN_BUILT_IN_BYTES;

    struct Fake {
        environment: Vec<(&'static str, &'static str)>,
        file: &'static str,
    }

    impl Sources for Fake {
        fn environment(&self) -> Vec<(String, OsString)> {
            self.environment.iter().map(|(n, v)| ((*n).to_owned(), OsString::from(v))).collect()
        }
        fn file(&self, path: &str) -> Result<String, String> {
            if path == "here.conf" { Ok(self.file.to_owned()) } else { Err("not found".to_owned()) }
        }
        fn memory_bytes(&self) -> u64 {
            8 << 30
        }
    }

    fn load(
        environment: &[(&'static str, &'static str)],
        file: &'static str,
        overrides: &[Override],
    ) -> Result<(Config, Vec<Note>), String> {
        let fake = Fake { environment: environment.to_vec(), file };
        let Loaded { config, notes, bad } = Config::from_sources(&fake, overrides);
        if bad.is_empty() { Ok((config, notes)) } else { Err(bad) }
    }

    #[test]
    fn built_in_values_are_accepted() {
        for param in TABLE {
            let text = param.built_in.to_str().unwrap();
            assert!(values::parse(param, text, 8 << 30).is_some(), "{:?}", param.name);
        }
        let (config, notes) = load(&[], "", &[]).unwrap();
        assert_eq!(config.number(Key::CpuBudget), (8 << 30) * 9 / 10);
        assert_eq!(config.number(Key::HeapMin), HEAP_MIN_BUILT_IN_BYTES);
        assert!(notes.is_empty());
    }

    #[test]
    fn each_key_has_the_value_of_its_highest_source() {
        let file = "# comment\nDORMOUSE_OFFLOAD_WINDOW_LAYERS = 7 # why\nDORMOUSE_HEAP_MIN_BYTES=8K\n\
                    DORMOUSE_NVME_FILE_BYTES = 2G\n";
        let environment = [
            ("DORMOUSE_CONFIG", "here.conf"),
            ("DORMOUSE_HEAP_MIN_BYTES", "16K"),
            ("DORMOUSE_NVME_FILE_BYTES", "3G"),
        ];
        let options = [Override { key: Key::NvmeFile, text: "4294967296".to_owned() }];
        let (config, _) = load(&environment, file, &options).unwrap();
        let seen = |key| (config.number(key), config.setting(key).provenance);
        assert_eq!(seen(Key::IoThreads), (0, Provenance::Automatic));
        assert_eq!(seen(Key::TraceEvents), (65536, Provenance::BuiltIn));
        assert_eq!(seen(Key::Window), (7, Provenance::File));
        assert_eq!(seen(Key::HeapMin), (16 << 10, Provenance::Environment));
        assert_eq!(seen(Key::NvmeFile), (4 << 30, Provenance::Options));
        assert_eq!(
            config.list_changed(),
            "DORMOUSE_HEAP_MIN_BYTES=16384 (environment), DORMOUSE_NVME_FILE_BYTES=4294967296 \
             (options), DORMOUSE_OFFLOAD_WINDOW_LAYERS=7 (file), DORMOUSE_CONFIG=here.conf \
             (environment)"
        );
    }

    #[test]
    fn a_byte_order_mark_is_no_part_of_a_name() {
        let here = [("DORMOUSE_CONFIG", "here.conf")];
        let (config, notes) =
            load(&here, "\u{feff}DORMOUSE_OFFLOAD_WINDOW_LAYERS = 7\n", &[]).unwrap();
        assert_eq!((config.number(Key::Window), notes.len()), (7, 0));
        let inside = load(&here, "\n\u{feff}DORMOUSE_OFFLOAD_WINDOW_LAYERS = 7\n", &[]).unwrap();
        assert_eq!(inside.1.len(), 1, "a mark elsewhere is a part of the name");
    }

    #[test]
    fn invalid_values_are_named_with_their_source_and_accepted_values() {
        let environment = [
            ("DORMOUSE_CONFIG", "here.conf"),
            ("DORMOUSE_CPU_BUDGET_BYTES", "0"),
            ("DORMOUSE_OFFLOAD_CHECKSUM", "maybe"),
            ("DORMOUSE_LOG", "info,teapot=debug"),
        ];
        let message =
            load(&environment, "\nDORMOUSE_OFFLOAD_IO_THREADS = many\n", &[]).unwrap_err();
        for part in [
            "DORMOUSE_CPU_BUDGET_BYTES is \"0\" from the environment; accepted: 1MiB to 64TiB",
            "DORMOUSE_OFFLOAD_CHECKSUM is \"maybe\"",
            "DORMOUSE_LOG is \"info,teapot=debug\" from the environment; accepted: off, error, warn",
            "DORMOUSE_OFFLOAD_IO_THREADS is \"many\" from here.conf:2; accepted: auto, or 1 to 64",
        ] {
            assert!(message.contains(part), "{part} not in {message}");
        }
    }

    #[test]
    fn an_unreadable_or_malformed_file_is_an_error() {
        assert!(
            load(&[("DORMOUSE_CONFIG", "there.conf")], "", &[]).unwrap_err().contains("not found")
        );
        let here = [("DORMOUSE_CONFIG", "here.conf")];
        assert!(load(&here, "nonsense", &[]).unwrap_err().contains("NAME = VALUE"));
        assert!(load(&here, "DORMOUSE_CONFIG = x", &[]).unwrap_err().contains("environment only"));
    }

    #[test]
    fn unknown_names_are_collected_with_their_line_and_without_an_error() {
        let environment =
            [("DORMOUSE_TEAPOT", "1"), ("DORMOUSE_LIB", "/x"), ("DORMOUSE_CONFIG", "here.conf")];
        let (_, notes) = load(&environment, "\n# why\nDORMOUSE_KETTLE = 2\n", &[]).unwrap();
        let unknown = |name: &str, line: &str| Note::Unknown(name.to_owned(), line.to_owned());
        assert_eq!(
            notes,
            [unknown("DORMOUSE_KETTLE", " in here.conf:3"), unknown("DORMOUSE_TEAPOT", "")]
        );
    }

    #[test]
    fn an_empty_value_is_not_set() {
        let environment = [
            ("DORMOUSE_CONFIG", "here.conf"),
            ("DORMOUSE_OFFLOAD_WINDOW_LAYERS", ""),
            ("DORMOUSE_OFFLOAD_CHECKSUM", "  "),
            ("DORMOUSE_TEAPOT", ""),
        ];
        let file =
            "DORMOUSE_OFFLOAD_WINDOW_LAYERS = 7\nDORMOUSE_LOG =\nDORMOUSE_LOG_FILE = # why\n";
        let (config, notes) = load(&environment, file, &[]).unwrap();
        assert_eq!(notes, []);
        let setting = config.setting(Key::Window);
        assert_eq!((&setting.value, setting.provenance), (&Value::Number(7), Provenance::File));
        for key in [Key::Checksum, Key::Log, Key::LogFile] {
            assert_eq!(config.setting(key).provenance, Provenance::BuiltIn, "{key:?}");
        }
        assert!(load(&[("DORMOUSE_CONFIG", "")], "", &[]).is_ok());
    }

    #[test]
    fn the_other_values_are_loaded_beside_an_invalid_one() {
        let environment = [("DORMOUSE_HELP", "1"), ("DORMOUSE_OFFLOAD_CHECKSUM", "maybe")];
        let fake = Fake { environment: environment.to_vec(), file: "" };
        let loaded = Config::from_sources(&fake, &[]);
        assert!(loaded.bad.contains("DORMOUSE_OFFLOAD_CHECKSUM is \"maybe\""), "{}", loaded.bad);
        assert!(loaded.config.switch(Key::Help));
        assert!(loaded.config.switch(Key::Checksum), "built in");
    }

    #[test]
    fn a_value_that_is_no_text_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        struct Bytes;
        impl Sources for Bytes {
            fn environment(&self) -> Vec<(String, OsString)> {
                vec![("DORMOUSE_NVME_DIR".to_owned(), OsString::from_vec(b"/t\xff".to_vec()))]
            }
            fn file(&self, _: &str) -> Result<String, String> {
                Err("none".to_owned())
            }
            fn memory_bytes(&self) -> u64 {
                8 << 30
            }
        }
        let bad = Config::from_sources(&Bytes, &[]).bad;
        assert!(bad.contains("DORMOUSE_NVME_DIR") && bad.ends_with("accepted: UTF-8"), "{bad}");
    }

    #[test]
    fn an_earlier_name_sets_the_parameter_unless_the_present_one_does() {
        let (old, new) = ("DORMOUSE_ALLOC_BUDGET_BYTES", "DORMOUSE_CPU_BUDGET_BYTES");
        let note = Note::Renamed(old, Key::CpuBudget);
        let seen = |environment: &[(&'static str, &'static str)], file| {
            let (config, notes) = load(environment, file, &[]).unwrap();
            let setting = config.setting(Key::CpuBudget);
            (config.number(Key::CpuBudget) >> 20, setting.provenance, notes)
        };
        let here = ("DORMOUSE_CONFIG", "here.conf");
        let environment = Provenance::Environment;
        assert_eq!(seen(&[(old, "2M")], ""), (2, environment, vec![note.clone()]));
        for both in [[(old, "2M"), (new, "3M")], [(new, "3M"), (old, "2M")]] {
            assert_eq!(seen(&both, ""), (3, environment, vec![note.clone()]));
        }
        for file in [
            "DORMOUSE_ALLOC_BUDGET_BYTES = 2M\nDORMOUSE_CPU_BUDGET_BYTES = 3M",
            "DORMOUSE_CPU_BUDGET_BYTES = 3M\nDORMOUSE_ALLOC_BUDGET_BYTES = 2M",
        ] {
            assert_eq!(seen(&[here], file), (3, Provenance::File, vec![note.clone()]));
            let over = [here, (old, "4M")];
            assert_eq!(seen(&over, file), (4, environment, vec![note.clone()]));
        }
        let bad = load(&[(old, "none")], "", &[]).unwrap_err();
        assert!(bad.starts_with("DORMOUSE_ALLOC_BUDGET_BYTES is \"none\""), "{bad}");
    }
}
