//! Readable scenarios: what stands above the rule gives what stands below.
//!
//! `UPDATE=1 cargo test -p dormouse-schedule` rewrites the expectations; read the diff.

use std::fs;
use std::path::Path;

const RULE: &str = "----\n";

/// Runs every scenario in `tests/testdata/ROOM`, of which there are `least` or more.
pub(crate) fn scenarios(room: &str, least: usize, run: impl Fn(&str) -> String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata").join(room);
    let mut seen = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let (input, expected) = text.split_once(RULE).unwrap();
        let got = run(input);
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, format!("{input}{RULE}{got}")).unwrap();
        } else {
            assert_eq!(got, expected, "{}", path.display());
        }
        seen += 1;
    }
    assert!(seen >= least, "only {seen} scenarios found");
}
