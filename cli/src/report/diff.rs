//! The figures of two reports side by side.

use dormouse_parallel::draw::bytes;
use serde::Serialize;

use super::Report;
use crate::text::seconds;

/// Unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Unit {
    Bytes,
    Seconds,
}

/// A figure of two reports. `None`: the report lacks it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Change {
    what: String,
    unit: Unit,
    before: Option<f64>,
    after: Option<f64>,
}

/// Returns all figures of either report.
pub(super) fn changes(before: &Report, after: &Report) -> Vec<Change> {
    let mut changes: Vec<Change> = Vec::new();
    for (what, unit, value) in figures(before) {
        changes.push(Change { what, unit, before: Some(value), after: None });
    }
    for (what, unit, value) in figures(after) {
        match changes.iter_mut().find(|change| change.what == what) {
            Some(change) => change.after = Some(value),
            None => changes.push(Change { what, unit, before: None, after: Some(value) }),
        }
    }
    changes
}

fn figures(report: &Report) -> Vec<(String, Unit, f64)> {
    let mut figures = vec![
        ("time shown".to_owned(), Unit::Seconds, report.window_s),
        ("peak awake".to_owned(), Unit::Bytes, report.peak_bytes as f64),
    ];
    for owner in report.peak.iter().flat_map(|peak| &peak.owners) {
        figures.push((format!("peak: {}", owner.title), Unit::Bytes, owner.bytes as f64));
    }
    for phase in &report.phases {
        figures.push((format!("phase {}", phase.name), Unit::Seconds, phase.busy_s));
        figures.push((format!("phase {}: stalled", phase.name), Unit::Seconds, phase.stall_s));
    }
    for copy in &report.copies {
        figures.push((copy.title.clone(), Unit::Bytes, copy.bytes as f64));
    }
    figures.push(("stalled".to_owned(), Unit::Seconds, report.stall_s));
    for cause in &report.causes {
        figures.push((format!("stalled: {}", cause.title), Unit::Seconds, cause.stall_s));
    }
    figures
}

pub(super) fn table(changes: &[Change]) -> String {
    let width = changes.iter().map(|change| change.what.chars().count()).max().unwrap_or(0);
    let text = |unit: Unit, value: Option<f64>| match (unit, value) {
        (_, None) => "-".to_owned(),
        (Unit::Bytes, Some(value)) => bytes(value as u64),
        (Unit::Seconds, Some(value)) => seconds(value),
    };
    let line = |it: &Change| {
        let [before, after] = [it.before, it.after].map(|value| text(it.unit, value));
        format!(
            "{:width$}  {before:>12}  {after:>12}  {:>8}\n",
            it.what,
            share(it.before, it.after)
        )
    };
    let head = format!("{:width$}  {:>12}  {:>12}  {:>8}\n", "", "before", "after", "change");
    std::iter::once(head).chain(changes.iter().map(line)).collect()
}

/// The change as a share of what was before.
fn share(before: Option<f64>, after: Option<f64>) -> String {
    match (before, after) {
        (Some(before), Some(after)) if before == after => "=".to_owned(),
        (Some(before), Some(after)) if before > 0.0 => {
            format!("{:+.1} %", 100.0 * (after / before - 1.0))
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_shares_of_what_was_before() {
        assert_eq!(share(Some(2.0), Some(3.0)), "+50.0 %");
        assert_eq!(share(Some(2.0), Some(2.0)), "=");
        assert_eq!(share(Some(0.0), Some(2.0)), "");
        assert_eq!(share(None, Some(2.0)), "");
    }
}
