//! Loading: file, environment and options into one configuration, provenance kept per key.

use std::ffi::OsString;
use std::path::PathBuf;

use super::table::{Key, Kind, Param, TABLE};
use super::values::{self, Value};
use crate::abi::v1::structs as c;

/// Most bytes of a configuration file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Who set a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Provenance {
    BuiltIn = c::DORMOUSE_FROM_BUILT_IN,
    File = c::DORMOUSE_FROM_FILE,
    Environment = c::DORMOUSE_FROM_ENVIRONMENT,
    Options = c::DORMOUSE_FROM_OPTIONS,
}

impl Provenance {
    /// As messages say it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::BuiltIn => "built in",
            Self::File => "file",
            Self::Environment => "environment",
            Self::Options => "options",
        }
    }
}

/// A value from the options of `dormouse_runtime_create`, as text so that it meets the same
/// checks.
#[derive(Clone, Debug)]
pub(crate) struct Override {
    pub(crate) key: Key,
    pub(crate) text: String,
}

/// One value in effect.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) value: Value,
    pub(crate) provenance: Provenance,
}

impl Setting {
    /// The value as a file would say it.
    pub(crate) fn shown(&self) -> String {
        match &self.value {
            Value::Number(number) => number.to_string(),
            Value::Switch(on) => if *on { "on" } else { "off" }.to_owned(),
            Value::Choice(word) => (*word).to_owned(),
            Value::Text(text) => text.clone(),
            Value::Path(path) => {
                path.as_ref().map_or_else(String::new, |path| path.display().to_string())
            }
        }
    }
}

/// Where texts come from, so tests need no process.
pub(crate) trait Sources {
    /// `DORMOUSE_*` names and values.
    fn environment(&self) -> Vec<(String, OsString)>;
    /// The text of a configuration file.
    fn file(&self, path: &str) -> Result<String, String>;
    /// Physical memory.
    fn memory_bytes(&self) -> u64;
}

/// Every value in effect.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    settings: Vec<Setting>,
}

impl Config {
    /// Reads this process' file and environment. Also gives the unknown names found.
    pub(crate) fn from_process(overrides: &[Override]) -> Result<(Self, Vec<String>), String> {
        Self::from_sources(&Process, overrides)
    }

    /// Reads `sources`. `Err` is one sentence with every value that is not accepted.
    pub(crate) fn from_sources(
        sources: &dyn Sources,
        overrides: &[Override],
    ) -> Result<(Self, Vec<String>), String> {
        let mut loader = Loader::new(sources.memory_bytes());
        let environment = sources.environment();
        let own = |name: &str| environment.iter().find(|(known, _)| known == name);
        if let Some((_, path)) = own(TABLE[Key::Config as usize].name()) {
            let path = path.to_string_lossy().into_owned();
            if !path.is_empty() {
                match sources.file(&path) {
                    Ok(text) => loader.file(&path, &text),
                    Err(error) => loader.bad.push(format!(
                        "DORMOUSE_CONFIG is {path:?} from the environment ({error}); accepted: {}",
                        TABLE[Key::Config as usize].accepts.to_string_lossy()
                    )),
                }
            }
        }
        for (name, value) in &environment {
            loader.named(name, &value.to_string_lossy(), Provenance::Environment, "environment");
        }
        for Override { key, text } in overrides {
            loader.set(&TABLE[*key as usize], text, Provenance::Options, "options");
        }
        if loader.bad.is_empty() {
            return Ok((Self { settings: loader.settings }, loader.unknown));
        }
        Err(loader.bad.join("; "))
    }

    /// A value with its provenance.
    pub(crate) fn setting(&self, key: Key) -> &Setting {
        &self.settings[key as usize]
    }

    /// The values that something other than the library set, as `NAME=value (source)`.
    pub(crate) fn differing(&self) -> String {
        let set = TABLE.iter().map(|param| (param, self.setting(param.key)));
        let set = set.filter(|(_, setting)| setting.provenance != Provenance::BuiltIn);
        let texts = set.map(|(param, setting)| {
            format!("{}={} ({})", param.name(), setting.shown(), setting.provenance.name())
        });
        texts.collect::<Vec<_>>().join(", ")
    }

    /// A size in bytes or a count; 0 for a key of another kind, which a test rules out.
    pub(crate) fn number(&self, key: Key) -> u64 {
        match self.setting(key).value {
            Value::Number(number) => number,
            _ => 0,
        }
    }

    /// A switch.
    pub(crate) fn switch(&self, key: Key) -> bool {
        matches!(self.setting(key).value, Value::Switch(true))
    }

    /// A word of a choice; empty for a key of another kind, which a test rules out.
    pub(crate) fn choice(&self, key: Key) -> &'static str {
        match self.setting(key).value {
            Value::Choice(word) => word,
            _ => "",
        }
    }

    /// A text; empty for a key of another kind, which a test rules out.
    pub(crate) fn text(&self, key: Key) -> &str {
        match &self.setting(key).value {
            Value::Text(text) => text,
            _ => "",
        }
    }

    /// A path, where it is set.
    pub(crate) fn path(&self, key: Key) -> Option<&PathBuf> {
        match &self.setting(key).value {
            Value::Path(path) => path.as_ref(),
            _ => None,
        }
    }
}

struct Loader {
    memory_bytes: u64,
    settings: Vec<Setting>,
    unknown: Vec<String>,
    bad: Vec<String>,
}

impl Loader {
    fn new(memory_bytes: u64) -> Self {
        let built_in = |param: &Param| {
            let text = param.built_in.to_string_lossy();
            // A built-in value is accepted by its own rule (test below); a machine whose memory
            // is below a rule's least still gets a value.
            let fallback = match param.kind {
                Kind::Size { least, .. } | Kind::Count { least, .. } => Value::Number(least),
                Kind::Switch => Value::Switch(false),
                Kind::Choice(words) => Value::Choice(words.first().copied().unwrap_or("")),
                Kind::Path => Value::Path(None),
                Kind::Filter => Value::Text(String::new()),
            };
            let value = values::parse(param, &text, memory_bytes).unwrap_or(fallback);
            Setting { value, provenance: Provenance::BuiltIn }
        };
        Self {
            memory_bytes,
            settings: TABLE.iter().map(built_in).collect(),
            unknown: Vec::new(),
            bad: Vec::new(),
        }
    }

    fn file(&mut self, path: &str, text: &str) {
        for (at, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or("").trim();
            if line.is_empty() {
                continue;
            }
            let place = format!("{path}:{}", at + 1);
            match line.split_once('=') {
                Some((name, value)) => {
                    self.named(name.trim(), value.trim(), Provenance::File, &place);
                }
                None => {
                    self.bad.push(format!("{place} is {line:?}; accepted: NAME = VALUE"));
                }
            }
        }
    }

    fn named(&mut self, name: &str, value: &str, provenance: Provenance, place: &str) {
        let Some(param) = TABLE.iter().find(|param| param.name() == name) else {
            self.unknown.push(name.to_owned());
            return;
        };
        if provenance == Provenance::File && !param.in_file {
            self.bad.push(format!("{place} sets {name}; it is accepted in the environment only"));
            return;
        }
        self.set(param, value, provenance, place);
    }

    fn set(&mut self, param: &Param, text: &str, provenance: Provenance, place: &str) {
        match values::parse(param, text, self.memory_bytes) {
            Some(value) => {
                self.settings[param.key as usize] = Setting { value, provenance };
            }
            None => self.bad.push(format!(
                "{} is {text:?} from the {place}; accepted: {}",
                param.name(),
                param.accepts.to_string_lossy()
            )),
        }
    }
}

/// This process.
struct Process;

impl Sources for Process {
    fn environment(&self) -> Vec<(String, OsString)> {
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| name.starts_with("DORMOUSE_"))
            .collect()
    }

    fn file(&self, path: &str) -> Result<String, String> {
        let length = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
        if length > FILE_BYTES_MAX {
            return Err(format!("{length} bytes, at most {FILE_BYTES_MAX} are read"));
        }
        std::fs::read_to_string(path).map_err(|error| error.to_string())
    }

    fn memory_bytes(&self) -> u64 {
        values::total_memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    ) -> Result<(Config, Vec<String>), String> {
        Config::from_sources(&Fake { environment: environment.to_vec(), file }, overrides)
    }

    #[test]
    fn built_in_values_pass_their_own_rules() {
        for param in TABLE {
            let text = param.built_in.to_str().unwrap();
            assert!(values::parse(param, text, 8 << 30).is_some(), "{:?}", param.name);
        }
        let (config, unknown) = load(&[], "", &[]).unwrap();
        assert_eq!(config.number(Key::AllocBudget), 8 << 30);
        assert!(unknown.is_empty());
    }

    #[test]
    fn later_sources_beat_earlier_ones_key_by_key() {
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
        assert_eq!(seen(Key::IoThreads), (2, Provenance::BuiltIn));
        assert_eq!(seen(Key::Window), (7, Provenance::File));
        assert_eq!(seen(Key::HeapMin), (16 << 10, Provenance::Environment));
        assert_eq!(seen(Key::NvmeFile), (4 << 30, Provenance::Options));
        assert_eq!(
            config.differing(),
            "DORMOUSE_HEAP_MIN_BYTES=16384 (environment), DORMOUSE_NVME_FILE_BYTES=4294967296 \
             (options), DORMOUSE_OFFLOAD_WINDOW_LAYERS=7 (file), DORMOUSE_CONFIG=here.conf \
             (environment)"
        );
    }

    #[test]
    fn every_bad_value_is_named_with_its_place_and_what_is_accepted() {
        let environment = [
            ("DORMOUSE_CONFIG", "here.conf"),
            ("DORMOUSE_ALLOC_BUDGET_BYTES", "0"),
            ("DORMOUSE_OFFLOAD_CHECKSUM", "maybe"),
            ("DORMOUSE_LOG", "info,teapot=debug"),
        ];
        let sentence =
            load(&environment, "\nDORMOUSE_OFFLOAD_IO_THREADS = many\n", &[]).unwrap_err();
        for part in [
            "DORMOUSE_ALLOC_BUDGET_BYTES is \"0\" from the environment; accepted: 1MiB to 64TiB",
            "DORMOUSE_OFFLOAD_CHECKSUM is \"maybe\"",
            "DORMOUSE_LOG is \"info,teapot=debug\" from the environment; accepted: off, error, warn",
            "DORMOUSE_OFFLOAD_IO_THREADS is \"many\" from the here.conf:2; accepted: 1 to 64",
        ] {
            assert!(sentence.contains(part), "{part} not in {sentence}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_or_understood_is_an_error() {
        assert!(
            load(&[("DORMOUSE_CONFIG", "there.conf")], "", &[]).unwrap_err().contains("not found")
        );
        let here = [("DORMOUSE_CONFIG", "here.conf")];
        assert!(load(&here, "nonsense", &[]).unwrap_err().contains("NAME = VALUE"));
        assert!(load(&here, "DORMOUSE_CONFIG = x", &[]).unwrap_err().contains("environment only"));
    }

    #[test]
    fn unknown_names_are_collected_and_never_an_error() {
        let (_, unknown) =
            load(&[("DORMOUSE_TEAPOT", "1"), ("DORMOUSE_LIB", "/x")], "", &[]).unwrap();
        assert_eq!(unknown, ["DORMOUSE_TEAPOT"]);
    }
}
