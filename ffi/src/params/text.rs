//! The table as text: the help, and a configuration file.

use std::fmt::Write;

use super::config_line::format_value;
use super::load::Config;
use super::table::{Kind, TABLE};
use super::values::{Value, format_bytes};

/// Returns the text of `DORMOUSE_HELP=1`.
pub(crate) fn help(config: &Config) -> String {
    let mut text = String::from("dormouse parameters, with the current value and its source:\n");
    for param in TABLE {
        let setting = config.setting(param.key);
        let shown = match (&setting.value, param.kind) {
            (Value::Number(bytes), Kind::Size { .. } | Kind::PowerOfTwo { .. }) => {
                format_bytes(*bytes)
            }
            _ => setting.to_text(),
        };
        // Writing to a String never fails.
        let _ = writeln!(
            text,
            "\n{} = {}  [{}]\n  {}. {}\n  built in: {}; accepted: {}",
            param.name(),
            or_not_set(&shown),
            setting.source(),
            param.help(),
            param.detail,
            or_not_set(param.built_in()),
            param.accepts(),
        );
    }
    text
}

fn or_not_set(text: &str) -> &str {
    if text.is_empty() { "(not set)" } else { text }
}

/// Returns the current configuration as a file that can be loaded.
pub(crate) fn dump(config: &Config) -> String {
    let mut text =
        String::from("# Current configuration of dormouse. Load it with DORMOUSE_CONFIG.\n");
    for param in TABLE {
        let setting = config.setting(param.key);
        let text_of = setting.to_text();
        let shown = format_value(&text_of);
        // A parameter that has its built-in value is written as a comment: a value in a file counts as set by the user, and
        // the built-in value may differ on another machine.
        let is_line = config.is_chosen(param.key) && param.in_file && !shown.is_empty();
        let mark = if is_line { "" } else { "# " };
        let _ = writeln!(
            text,
            "\n# {}\n# [{}] built in {}; accepted: {}\n{mark}{} = {shown}",
            param.help(),
            setting.source(),
            or_not_set(param.built_in()),
            param.accepts(),
            param.name(),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::automatic::{Choices, Machine};
    use super::super::load::{Loaded, Override, Provenance, Sources};
    use super::super::table::{Key, Param};
    use super::*;
    use dormouse_offload::tune::Chosen;
    use proptest::prelude::*;
    use std::ffi::OsString;

    struct File(String);

    impl Sources for File {
        fn environment(&self) -> Vec<(String, OsString)> {
            vec![("DORMOUSE_CONFIG".to_owned(), "it".into())]
        }
        fn file(&self, _path: &str) -> Result<String, String> {
            Ok(self.0.clone())
        }
        fn memory_bytes(&self) -> u64 {
            4 << 30
        }
    }

    #[test]
    fn a_dump_loads_to_the_same_values() {
        let options = [
            Override { key: Key::NvmeDir, text: "/var/tmp".to_owned() },
            Override { key: Key::CpuBudget, text: "123456789".to_owned() },
            Override { key: Key::Checksum, text: "off".to_owned() },
        ];
        let config = Config::from_sources(&File(String::new()), &options).config;
        let Loaded { config: again, notes, bad } = Config::from_sources(&File(dump(&config)), &[]);
        assert_eq!((notes.len(), bad.as_str()), (0, ""));
        for param in TABLE.iter().filter(|param| param.in_file) {
            assert_eq!(
                again.setting(param.key).value,
                config.setting(param.key).value,
                "{:?}",
                param.key
            );
        }
        let chosen = TABLE.iter().map(|param| param.key).filter(|key| again.is_chosen(*key));
        assert_eq!(
            chosen.collect::<Vec<_>>(),
            TABLE
                .iter()
                .map(|param| param.key)
                .filter(|key| config.is_chosen(*key))
                .collect::<Vec<_>>()
        );
        assert_eq!(again.setting(Key::Checksum).provenance, Provenance::File);
    }

    /// A built-in budget does not limit `malloc`, and a built-in live page may fail to open; neither may change when the dump
    /// is loaded.
    #[test]
    fn a_dump_of_built_in_values_chooses_none() {
        let text = dump(&Config::from_sources(&File(String::new()), &[]).config);
        let Loaded { config, bad, .. } = Config::from_sources(&File(text), &[]);
        // What names the file.
        assert_eq!(
            (config.list_changed().as_str(), bad.as_str()),
            ("DORMOUSE_CONFIG=it (environment)", "")
        );
    }

    /// Texts that a parameter of each kind may get; not all are accepted.
    fn any_text(kind: Kind) -> BoxedStrategy<String> {
        let path = "[ -~é\n\r\t]{0,16}|/a #b|/100%|/a b/\"c\"|\"|\\\\|.*";
        match kind {
            Kind::Size { .. } | Kind::Count { .. } => {
                (0_u64..1 << 44).prop_map(|n| n.to_string()).boxed()
            }
            Kind::PowerOfTwo { .. } => (0_u32..31).prop_map(|n| (1_u64 << n).to_string()).boxed(),
            Kind::Switch => prop::sample::select(vec!["on", "off"]).prop_map(str::to_owned).boxed(),
            Kind::Choice(words) => prop::sample::select(words).prop_map(str::to_owned).boxed(),
            Kind::Set(words) => prop::sample::subsequence(words, 1..=words.len())
                .prop_map(|words| words.join(","))
                .boxed(),
            Kind::Filter => "(info|off|debug)(,(offload|alloc)=(debug|warn))?".boxed(),
            Kind::Path => path.boxed(),
        }
    }

    proptest! {
        #[test]
        fn a_dump_of_any_values_loads_to_the_same(
            texts in TABLE.iter().map(|param| any_text(param.kind)).collect::<Vec<_>>()
        ) {
            let accepted = |(param, text): (&Param, String)| {
                // An empty value is not set.
                if text.trim().is_empty() {
                    return None;
                }
                let given = Override { key: param.key, text };
                let loaded = Config::from_sources(&File(String::new()), std::slice::from_ref(&given));
                loaded.bad.is_empty().then_some(given)
            };
            let in_file = TABLE.iter().zip(texts).filter(|(param, _)| param.in_file);
            let options: Vec<Override> = in_file.filter_map(accepted).collect();
            let config = Config::from_sources(&File(String::new()), &options).config;
            let text = dump(&config);
            let Loaded { config: again, notes, bad } = Config::from_sources(&File(text), &[]);
            prop_assert_eq!((notes.len(), bad.as_str()), (0, ""));
            for param in TABLE.iter().filter(|param| param.in_file) {
                let (seen, meant) = (again.setting(param.key), config.setting(param.key));
                prop_assert_eq!(&seen.value, &meant.value, "{}", param.name());
            }
        }
    }

    #[test]
    fn automatic_values_are_comments_of_a_dump() {
        let mut choices = Choices::of(&Machine::read(&Config::built_in()));
        let reason = "three layers #\nwere enough".to_owned();
        choices.revise([(Key::Window, Chosen { value: 9, reason })]);
        let text = dump(&choices.apply(&Config::built_in()));
        let wanted = "# [automatic: three layers # were enough] built in auto; accepted: auto, or 1 to 1024\n\
                      # DORMOUSE_OFFLOAD_WINDOW_LAYERS = 9\n";
        assert!(text.contains(wanted), "{text}");
        let Loaded { config, notes, bad } = Config::from_sources(&File(text), &[]);
        assert_eq!((notes.len(), bad.as_str()), (0, ""));
        for param in TABLE.iter().filter(|param| param.is_automatic()) {
            assert_eq!(config.setting(param.key).value, Value::Automatic, "{}", param.name());
        }
    }

    #[test]
    fn help_names_every_parameter_and_its_provenance() {
        let options = [Override { key: Key::Window, text: "9".to_owned() }];
        let config = Config::from_sources(&File(String::new()), &options).config;
        let text = help(&config);
        for param in TABLE {
            assert!(text.contains(param.name()));
        }
        assert!(text.contains("DORMOUSE_OFFLOAD_WINDOW_LAYERS = 9  [options]"), "{text}");
    }
}
