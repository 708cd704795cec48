//! `dormouse doctor`: checks of a machine, each ok or with what to do.

mod disk;
mod gpu;
mod library;
mod limits;
mod python;

use std::fmt::Write as _;

use serde::Serialize;

use crate::args::DoctorArgs;
use crate::text::as_json;
use crate::{Error, Output};

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// It works, and could work better.
    Advice,
    /// It does not work.
    Broken,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    what: &'static str,
    verdict: Verdict,
    seen: String,
    /// What to do; empty if nothing.
    advice: String,
}

impl Check {
    fn ok(what: &'static str, seen: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Ok, seen: seen.into(), advice: String::new() }
    }

    fn advice(what: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Advice, seen: seen.into(), advice: advice.into() }
    }

    fn broken(what: &'static str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Broken, seen: seen.into(), advice: advice.into() }
    }
}

/// Runs all checks.
pub(crate) fn run(args: &DoctorArgs) -> Result<Output, Error> {
    let (mut checks, settings) = library::checks(args.lib.as_deref());
    checks.extend(python::checks(args.python.as_deref()));
    checks.extend(gpu::checks());
    checks.push(disk::check(&settings));
    checks.extend(limits::checks(&settings));
    let is_good = checks.iter().all(|check| check.verdict != Verdict::Broken);
    let text = if args.json { as_json(&checks)? } else { table(&checks) };
    Ok(Output { text, is_good })
}

fn table(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.what.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { what, verdict, seen, advice } in checks {
        let word = match verdict {
            Verdict::Ok => "ok",
            Verdict::Advice => "advice",
            Verdict::Broken => "broken",
        };
        // Writing to a String never fails.
        let _ = writeln!(text, "{word:6}  {what:width$}  {}", crate::text::line(seen));
        if !advice.is_empty() {
            let _ = writeln!(text, "{:6}  {:width$}  → {}", "", "", crate::text::line(advice));
        }
    }
    let number = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    let (advice, broken) = (number(Verdict::Advice), number(Verdict::Broken));
    let _ = writeln!(text, "\n{} checks, {broken} broken, {advice} with advice", checks.len());
    text
}
