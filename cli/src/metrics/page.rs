//! The OpenMetrics page of running trainers (OpenMetrics 1.0).
//!
//! A family has one type, unit and help; its samples differ by labels. Labels are bounded: process, tier,
//! link, setting, and at most eight tags of a process at a time.

use std::collections::HashMap;
use std::fmt::Write;

use crate::live::{LinkState, SettingState, State, States, Status, TagState, TierState};

/// Media type of the page.
pub(super) const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gauge,
    Counter,
}

/// One family: its samples of a process, as the labels beside those of the process and a value.
struct Family {
    name: &'static str,
    kind: Kind,
    unit: &'static str,
    help: &'static str,
    samples: fn(&State) -> Vec<(String, f64)>,
}

const FAMILIES: &[Family] = &[
    Family {
        name: "dormouse_up",
        kind: Kind::Gauge,
        unit: "",
        help: "1 if the process updates its figures, 0 if it is stopped or has been killed.",
        samples: |state| one(f64::from(u8::from(state.status == Status::Running))),
    },
    Family {
        name: "dormouse_tier_used_bytes",
        kind: Kind::Gauge,
        unit: "bytes",
        help: "Bytes in use of a tier.",
        samples: |state| per_tier(state, |tier| tier.used_bytes),
    },
    Family {
        name: "dormouse_tier_peak_bytes",
        kind: Kind::Gauge,
        unit: "bytes",
        help: "The most bytes in use of a tier so far.",
        samples: |state| per_tier(state, |tier| tier.peak_bytes),
    },
    Family {
        name: "dormouse_tier_budget_bytes",
        kind: Kind::Gauge,
        unit: "bytes",
        help: "Limit of a tier.",
        samples: |state| per_tier(state, |tier| tier.budget_bytes),
    },
    Family {
        name: "dormouse_asleep_bytes",
        kind: Kind::Gauge,
        unit: "bytes",
        help: "Bytes asleep.",
        samples: |state| one(state.asleep_bytes as f64),
    },
    Family {
        name: "dormouse_cached_bytes",
        kind: Kind::Gauge,
        unit: "bytes",
        help: "Mapped device bytes that no allocation uses.",
        samples: |state| one(state.cached_bytes as f64),
    },
    Family {
        name: "dormouse_link_copied_bytes",
        kind: Kind::Counter,
        unit: "bytes",
        help: "Bytes copied over a link.",
        samples: |state| per_link(state, |link| link.copied_bytes),
    },
    Family {
        name: "dormouse_link_rate_bytes_per_second",
        kind: Kind::Gauge,
        unit: "",
        help: "Rate of a link while copies run, as measured; 0 if it is not known.",
        samples: |state| per_link(state, |link| link.measured_bytes_per_s),
    },
    Family {
        name: "dormouse_stall_seconds",
        kind: Kind::Counter,
        unit: "seconds",
        help: "Time in which the trainer waited for copies.",
        samples: |state| one(state.stall_s),
    },
    Family {
        name: "dormouse_alloc_failures",
        kind: Kind::Counter,
        unit: "",
        help: "Requests for memory that failed.",
        samples: |state| one(state.alloc_failures as f64),
    },
    Family {
        name: "dormouse_tags",
        kind: Kind::Gauge,
        unit: "",
        help: "Number of tags. The largest have samples of their own.",
        samples: |state| one(state.tag_count as f64),
    },
    Family {
        name: "dormouse_tag_resident_bytes",
        kind: Kind::Gauge,
        unit: "bytes",
        help: "Bytes of a tag on the device.",
        samples: |state| per_tag(state, |tag| tag.resident_bytes),
    },
    Family {
        name: "dormouse_tag_asleep_bytes",
        kind: Kind::Gauge,
        unit: "bytes",
        help: "Bytes of a tag asleep.",
        samples: |state| per_tag(state, |tag| tag.asleep_bytes),
    },
    Family {
        name: "dormouse_last_dump_timestamp_seconds",
        kind: Kind::Gauge,
        unit: "seconds",
        help: "Unix time of the last dump, by its reason.",
        samples: last_dump,
    },
    Family {
        name: "dormouse_setting",
        kind: Kind::Gauge,
        unit: "",
        help: "Current value of a setting that the runtime may choose, in the unit of its name.",
        samples: settings,
    },
];

/// Returns the page of these processes.
pub(super) fn page(states: &States) -> String {
    let labels = process_labels(&states.processes);
    let mut text = String::new();
    for family in FAMILIES {
        family.write(&states.processes, &labels, &mut text);
    }
    text + "# EOF\n"
}

impl Family {
    /// `labels`: of each process.
    fn write(&self, processes: &[State], labels: &[String], text: &mut String) {
        let (name, kind) =
            (self.name, if self.kind == Kind::Counter { "counter" } else { "gauge" });
        let suffix = if self.kind == Kind::Counter { "_total" } else { "" };
        let _infallible = writeln!(text, "# TYPE {name} {kind}");
        if !self.unit.is_empty() {
            let _infallible = writeln!(text, "# UNIT {name} {}", self.unit);
        }
        let _infallible = writeln!(text, "# HELP {name} {}", self.help);
        for (state, process) in processes.iter().zip(labels) {
            for (labels, value) in (self.samples)(state) {
                let _infallible = writeln!(text, "{name}{suffix}{{{process}{labels}}} {value}");
            }
        }
    }
}

/// Returns the labels of each process. Its page is one of them where another process has the same name, rank and pid, as
/// in two containers.
fn process_labels(processes: &[State]) -> Vec<String> {
    let of_process = |state: &State| {
        let (process, rank, pid) = (escaped(&state.name), state.rank, state.pid);
        format!("process=\"{process}\",rank=\"{rank}\",pid=\"{pid}\"")
    };
    let mut alike = HashMap::<String, usize>::new();
    for state in processes {
        *alike.entry(of_process(state)).or_default() += 1;
    }
    let distinct = |state: &State| {
        let labels = of_process(state);
        if alike.get(&labels).is_none_or(|count| *count < 2) {
            return labels;
        }
        format!("{labels},page=\"{}\"", escaped(&state.page.to_string_lossy()))
    };
    processes.iter().map(distinct).collect()
}

fn one(value: f64) -> Vec<(String, f64)> {
    vec![(String::new(), value)]
}

fn per_tier(state: &State, value: fn(&TierState) -> u64) -> Vec<(String, f64)> {
    let tiers = state.tiers.iter();
    tiers.map(|(name, tier)| (format!(",tier=\"{name}\""), value(tier) as f64)).collect()
}

fn per_link(state: &State, value: fn(&LinkState) -> u64) -> Vec<(String, f64)> {
    let links = state.links.iter();
    links.map(|(name, link)| (format!(",link=\"{name}\""), value(link) as f64)).collect()
}

fn per_tag(state: &State, value: fn(&TagState) -> u64) -> Vec<(String, f64)> {
    let tags = state.tags.iter();
    tags.map(|tag| (format!(",tag=\"{}\"", escaped(&tag.name)), value(tag) as f64)).collect()
}

fn last_dump(state: &State) -> Vec<(String, f64)> {
    let dump = state.last_dump.iter();
    dump.map(|it| (format!(",reason=\"{}\"", escaped(&it.reason)), it.written_unix_s)).collect()
}

fn settings(state: &State) -> Vec<(String, f64)> {
    let settings = state.settings.iter();
    let sample = |(name, it): (&&str, &SettingState)| {
        let source = if it.is_automatic { "automatic" } else { "set" };
        (format!(",setting=\"{name}\",source=\"{source}\""), it.value as f64)
    };
    settings.map(sample).collect()
}

/// Escapes the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
