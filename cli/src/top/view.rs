//! The processes as lines of text.

use dormouse_parallel::draw::{bytes, percent};

use crate::live::{DumpState, LinkState, SettingState, State, States, Status, TagState, TierState};
use crate::text::{self, seconds, things};

/// Columns of a bar.
const BAR: usize = 24;
/// Maximum number of tags of a process.
const TAGS_SHOWN: usize = 3;
/// Settings in a line, which then has at most 80 columns.
const SETTINGS_PER_LINE: usize = 3;

/// Formats the processes as lines of at most `width` characters.
pub(super) fn frame(states: &States, width: usize) -> Vec<String> {
    let mut lines = vec![heading(states)];
    for state in &states.processes {
        lines.push(String::new());
        lines.extend(process(state));
    }
    if !states.unreadable.is_empty() {
        lines.push(String::new());
    }
    lines
        .extend(states.unreadable.iter().map(|it| format!("{}: {}", it.page.display(), it.reason)));
    lines.iter().map(|line| text::line(line).chars().take(width).collect()).collect()
}

fn heading(states: &States) -> String {
    let number = states.processes.len() as u64;
    if number == 0 {
        return "no trainer found; next: start one, or name its page (DORMOUSE_STATS_FILE)"
            .to_owned();
    }
    let sorted = format!("sorted by {}", states.order.word());
    format!("{}, {sorted}", things(number, "trainer", "trainers"))
}

fn process(state: &State) -> Vec<String> {
    let age = seconds(state.age_s);
    let status = match state.status {
        Status::Running => "running".to_owned(),
        Status::Silent => format!("silent for {age}: stopped, or starved of processor time"),
        Status::Ended => format!("ended without removing its page, {age} ago: killed, or crashed"),
    };
    let mut lines =
        vec![format!("rank {}  {}  pid {}  {status}", state.rank, state.name, state.pid)];
    lines.extend(state.tiers.iter().map(|(name, tier)| format!("  {name:7} {}", of_tier(tier))));
    let links = state.links.iter().filter(|(_, link)| link.copied_bytes > 0);
    lines.extend(
        links.map(|(name, link)| format!("  {:15} {}", name.replace('_', " "), of_link(link))),
    );
    let share = state.stall_share.map_or("-".to_owned(), percent);
    lines.push(format!("  stalled {share} of the time, {} in all", seconds(state.stall_s)));
    lines.push(format!(
        "  asleep {}, free and mapped {}, {} refused",
        bytes(state.asleep_bytes),
        bytes(state.cached_bytes),
        things(state.alloc_failures, "allocation", "allocations")
    ));
    lines.extend(state.tags.iter().take(TAGS_SHOWN).map(of_tag));
    let hidden = state.tag_count.saturating_sub(state.tags.len().min(TAGS_SHOWN) as u64);
    if hidden > 0 {
        lines.push(format!("  {}", things(hidden, "more tag", "more tags")));
    }
    lines.extend(state.last_dump.as_ref().map(of_dump));
    lines.extend(settings(state, "automatic", true));
    lines.extend(settings(state, "set", false));
    lines
}

/// The settings that the runtime has chosen, or those that are set.
fn settings(state: &State, heading: &str, is_automatic: bool) -> Vec<String> {
    let shown = state.settings.iter().filter(|(_, it)| it.is_automatic == is_automatic);
    let texts: Vec<String> = shown.map(|(name, setting)| of_setting(name, *setting)).collect();
    let mut headings = std::iter::once(heading).chain(std::iter::repeat(""));
    let lines = texts.chunks(SETTINGS_PER_LINE).map(|line| line.join(", "));
    lines.map(|line| format!("  {:9}  {line}", headings.next().unwrap_or_default())).collect()
}

/// A setting in the words of its parameter's name: its tier or purpose, and its unit if that is a count.
fn of_setting(name: &str, setting: SettingState) -> String {
    let name = name.trim_start_matches("DORMOUSE_").trim_start_matches("OFFLOAD_");
    let words = |name: &str| name.to_lowercase().replace('_', " ");
    match name.strip_suffix("_BYTES") {
        Some(name) => format!("{} {}", words(name), bytes(setting.value)),
        None => format!("{} {}", words(name), setting.value),
    }
}

fn of_tag(tag: &TagState) -> String {
    let (resident, asleep) = (bytes(tag.resident_bytes), bytes(tag.asleep_bytes));
    format!("  tag {:20} {resident} on the device, {asleep} asleep", tag.name)
}

fn of_dump(dump: &DumpState) -> String {
    format!("  last dump ({}) {} ago: {}", dump.reason, seconds(dump.age_s), dump.path)
}

fn of_tier(tier: &TierState) -> String {
    if tier.budget_bytes == 0 && tier.peak_bytes == 0 {
        return "closed".to_owned();
    }
    let used = format!("{} of {}", bytes(tier.used_bytes), bytes(tier.budget_bytes));
    format!("{}  {used:24} peak {}", bar(tier), bytes(tier.peak_bytes))
}

/// Used bytes, up to the peak, up to the budget.
fn bar(tier: &TierState) -> String {
    let whole = tier.budget_bytes.max(tier.peak_bytes).max(1) as f64;
    let column = |bytes: u64| (bytes as f64 / whole * BAR as f64).ceil() as usize;
    let (used, peak) = (column(tier.used_bytes), column(tier.peak_bytes));
    let mark = |at: usize| match at {
        at if at < used => '█',
        at if at < peak => '▒',
        _ => '·',
    };
    (0..BAR).map(mark).collect()
}

fn of_link(link: &LinkState) -> String {
    let rate = |rate: f64| format!("{}/s", bytes(rate as u64));
    let now = link.bytes_per_s.map_or("-".to_owned(), rate);
    let measured = match link.measured_bytes_per_s {
        0 => String::new(),
        measured => format!(", {} while copying", rate(measured as f64)),
    };
    format!("{} copied, now {now}{measured}", bytes(link.copied_bytes))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use super::*;
    use crate::live::Unreadable;

    fn state(status: Status) -> State {
        let tier = |used_bytes, peak_bytes, budget_bytes| TierState {
            used_bytes,
            peak_bytes,
            budget_bytes,
        };
        let link = |copied_bytes, bytes_per_s, measured_bytes_per_s| LinkState {
            copied_bytes,
            bytes_per_s,
            measured_bytes_per_s,
        };
        let chosen = |value| SettingState { value, is_automatic: true };
        State {
            page: PathBuf::from("/dev/shm/page"),
            name: "python".to_owned(),
            rank: 3,
            pid: 42,
            status,
            age_s: 12.5,
            tiers: BTreeMap::from([
                ("device", tier(10 << 30, 15 << 30, 20 << 30)),
                ("host", tier(1, 1, 64 << 30)),
                ("nvme", tier(0, 0, 0)),
            ]),
            links: BTreeMap::from([
                ("device_to_host", link(3 << 30, Some(1.5e9), 11_000_000_000)),
                ("nvme_read", link(1 << 20, None, 0)),
                ("nvme_write", link(0, Some(0.0), 0)),
            ]),
            stall_s: 1.25,
            stall_share: Some(0.031),
            asleep_bytes: 7 << 30,
            cached_bytes: 1 << 30,
            alloc_failures: 1,
            tag_count: 5,
            tags: [("weights", 6, 0), ("optimizer", 0, 5), ("kv", 1, 1), ("small", 0, 1)]
                .map(|(name, resident, asleep)| TagState {
                    name: name.to_owned(),
                    resident_bytes: resident << 30,
                    asleep_bytes: asleep << 30,
                })
                .to_vec(),
            last_dump: Some(DumpState {
                path: "/dumps/a-oom.html".to_owned(),
                reason: "oom".to_owned(),
                written_unix_s: 1e9,
                age_s: 90.5,
            }),
            settings: BTreeMap::from([
                ("DORMOUSE_HOST_BUDGET_BYTES", chosen(12 << 30)),
                ("DORMOUSE_NVME_FILE_BYTES", chosen(4 << 30)),
                ("DORMOUSE_NVME_QUEUE_DEPTH", SettingState { is_automatic: false, ..chosen(8) }),
                ("DORMOUSE_OFFLOAD_INFLIGHT_BYTES", chosen(256 << 20)),
                ("DORMOUSE_OFFLOAD_WINDOW_LAYERS", chosen(3)),
            ]),
        }
    }

    #[test]
    fn a_process_is_a_few_lines() {
        let states = States { processes: vec![state(Status::Running)], ..States::default() };
        let wanted = "\
1 trainer, sorted by rank

rank 3  python  pid 42  running
  device  ████████████▒▒▒▒▒▒······  10 GiB of 20 GiB         peak 15 GiB
  host    █·······················  1 B of 64 GiB            peak 1 B
  nvme    closed
  device to host  3 GiB copied, now 1.40 GiB/s, 10.24 GiB/s while copying
  nvme read       1 MiB copied, now -
  stalled 3.1 % of the time, 1.250 s in all
  asleep 7 GiB, free and mapped 1 GiB, 1 allocation refused
  tag weights              6 GiB on the device, 0 B asleep
  tag optimizer            0 B on the device, 5 GiB asleep
  tag kv                   1 GiB on the device, 1 GiB asleep
  2 more tags
  last dump (oom) 90.500 s ago: /dumps/a-oom.html
  automatic  host budget 12 GiB, nvme file 4 GiB, inflight 256 MiB
             window layers 3
  set        nvme queue depth 8";
        assert_eq!(frame(&states, 100).join("\n"), wanted);
    }

    #[test]
    fn what_is_not_running_says_so() {
        let of = |status| process(&state(status)).remove(0);
        assert!(
            of(Status::Ended)
                .ends_with("ended without removing its page, 12.500 s ago: killed, or crashed")
        );
        assert!(of(Status::Silent).contains("silent for 12.500 s"));
        assert!(frame(&States::default(), 200).join("").starts_with("no trainer found; next: "));
    }

    #[test]
    fn lines_fit_the_terminal_and_carry_no_control_characters() {
        let mut hostile = state(Status::Running);
        hostile.name = "\u{1b}[2Jé".repeat(4);
        hostile.tags[0].name = hostile.name.clone();
        hostile.last_dump.as_mut().unwrap().path = hostile.name.clone();
        let unreadable = Unreadable { page: PathBuf::from("a\nb"), reason: "no".to_owned() };
        let states =
            States { processes: vec![hostile], unreadable: vec![unreadable], ..States::default() };
        for width in [1, 20, 80] {
            for line in frame(&states, width) {
                assert!(
                    line.chars().count() <= width && !line.contains(char::is_control),
                    "{line:?}"
                );
            }
        }
    }

    #[test]
    fn a_bar_shows_a_byte_and_never_more_than_all() {
        let of = |used_bytes, peak_bytes, budget_bytes| {
            bar(&TierState { used_bytes, peak_bytes, budget_bytes })
        };
        assert_eq!(of(0, 0, 100), "·".repeat(BAR));
        assert!(of(1, 1, u64::MAX).starts_with("█·"));
        assert_eq!(of(200, 300, 100).chars().filter(|mark| *mark == '█').count(), 16);
        assert_eq!(of(u64::MAX, u64::MAX, u64::MAX), "█".repeat(BAR));
    }
}
