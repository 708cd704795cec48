//! The table as text: the help, and a configuration file.

use std::fmt::Write;

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
            setting.provenance.name(),
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
        let shown = setting.to_text();
        // Parameters that are not set or not accepted in a file become comments.
        let mark = if shown.is_empty() || !param.in_file { "# " } else { "" };
        let _ = writeln!(
            text,
            "\n# {}\n# [{}] built in {}; accepted: {}\n{mark}{} = {shown}",
            param.help(),
            setting.provenance.name(),
            or_not_set(param.built_in()),
            param.accepts(),
            param.name(),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::load::{Override, Provenance, Sources};
    use super::super::table::Key;
    use super::*;
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
            Override { key: Key::AllocBudget, text: "123456789".to_owned() },
            Override { key: Key::Checksum, text: "off".to_owned() },
        ];
        let (config, _) = Config::from_sources(&File(String::new()), &options).unwrap();
        let (again, unknown) = Config::from_sources(&File(dump(&config)), &[]).unwrap();
        assert!(unknown.is_empty());
        for param in TABLE.iter().filter(|param| param.in_file) {
            assert_eq!(
                again.setting(param.key).value,
                config.setting(param.key).value,
                "{:?}",
                param.key
            );
        }
        assert_eq!(again.setting(Key::Checksum).provenance, Provenance::File);
    }

    #[test]
    fn help_names_every_parameter_and_its_provenance() {
        let options = [Override { key: Key::Window, text: "9".to_owned() }];
        let (config, _) = Config::from_sources(&File(String::new()), &options).unwrap();
        let text = help(&config);
        for param in TABLE {
            assert!(text.contains(param.name()));
        }
        assert!(text.contains("DORMOUSE_OFFLOAD_WINDOW_LAYERS = 9  [options]"), "{text}");
    }
}
