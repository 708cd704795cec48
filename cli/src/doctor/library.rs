//! The library, its settings, and the preload library.

use std::path::{Path, PathBuf};

use super::Check;
use crate::library::{self, AUTOMATIC, Param};

const PRELOAD: &str = "libdormouse_preload.so";

/// Values of parameters by name.
#[derive(Debug, Default)]
pub(super) struct Settings(Vec<Param>);

impl Settings {
    /// Returns the value of a parameter, without the library that of its variable; empty if not set.
    pub(super) fn text(&self, name: &str) -> String {
        match self.0.iter().find(|param| param.name == name) {
            Some(param) => param.value.clone(),
            None => std::env::var(name).unwrap_or_default(),
        }
    }

    /// Returns a size or count that somebody has set; `None` for one that the library chooses.
    pub(super) fn set_number(&self, name: &str) -> Option<u64> {
        let is_automatic =
            self.0.iter().any(|param| param.name == name && param.source == AUTOMATIC);
        if is_automatic { None } else { self.number(name) }
    }

    /// Returns a size or count; `None` if not known.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.text(name).parse().ok()
    }
}

/// Checks the library, and returns its settings.
pub(super) fn checks(named: Option<&Path>) -> (Vec<Check>, Settings) {
    let file = match library::find(named) {
        Ok(file) => file,
        Err(error) => {
            let advice = "in a checkout: pip install ., or make lib";
            return (
                vec![Check::broken("library", error.to_string(), advice)],
                Settings::default(),
            );
        }
    };
    let preload = preload(&file, &std::env::var("LD_PRELOAD").unwrap_or_default());
    match library::params(&file) {
        Ok(params) => {
            let set = params
                .iter()
                .filter(|param| !["built in", AUTOMATIC].contains(&param.source.as_str()))
                .count();
            let seen = format!("{}, {set} of {} parameters set", file.display(), params.len());
            (vec![Check::ok("library", seen), preload], Settings(params))
        }
        Err(library::LibraryError::Refused { reason }) => {
            let advice = "correct the value; dormouse params NAME explains it";
            (vec![Check::broken("settings", reason, advice), preload], Settings::default())
        }
        Err(error) => {
            let advice = "install the library and this program from the same release";
            (
                vec![Check::broken("library", error.to_string(), advice), preload],
                Settings::default(),
            )
        }
    }
}

/// Checks the preload library beside `library`, and that what is preloaded exists.
fn preload(library: &Path, preloaded: &str) -> Check {
    const WHAT: &str = "preload library";
    let beside = library.with_file_name(PRELOAD);
    let of_us = |path: &&str| Path::new(path).file_name().is_some_and(|name| name == PRELOAD);
    let loaded = preloaded.split([':', ' ']).find(of_us).map(PathBuf::from);
    match loaded {
        Some(path) if !path.is_file() => {
            let seen = format!("LD_PRELOAD names {}, which does not exist", path.display());
            Check::broken(WHAT, seen, "python -m dormouse --preload prints its path")
        }
        Some(path) => Check::ok(WHAT, format!("loaded in this shell: {}", path.display())),
        None if beside.is_file() => Check::ok(
            WHAT,
            format!("{}; CPU trainers start with python -m dormouse run SCRIPT", beside.display()),
        ),
        None => {
            let seen = format!("{} does not exist", beside.display());
            Check::advice(
                WHAT,
                seen,
                "CPU trainers need it: put it beside the library; GPU trainers do not",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn a_preloaded_file_must_exist() {
        let dir = std::env::temp_dir().join(format!("dormouse-preload-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (library, ours) = (dir.join("libdormouse.so"), dir.join(PRELOAD));
        let verdict = |preloaded: &str| preload(&library, preloaded).verdict;
        assert_eq!(verdict(""), Verdict::Advice);
        std::fs::write(&ours, "").unwrap();
        assert_eq!(verdict(""), Verdict::Ok);
        assert_eq!(verdict("/lib/other.so"), Verdict::Ok);
        assert_eq!(verdict(&format!("/lib/other.so:{}", ours.display())), Verdict::Ok);
        assert_eq!(verdict(&format!("/nowhere/{PRELOAD}")), Verdict::Broken);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
