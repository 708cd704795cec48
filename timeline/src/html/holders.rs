//! The tables of the peak: who held it, the largest live blocks, and what compute waited for.

use super::format::{bytes, duration, escaped, share};
use super::story::Story;
use super::summary::table_of;
use crate::event::Slice;
use crate::stalls::{Cause, Stall};
use std::io::{self, Write};

/// Limit of the waits in the table: the longest.
const WAITS_MAX: usize = 20;

/// Writes the owners of the peak, and the largest live blocks.
pub(super) fn peak(story: &Story, out: &mut dyn Write) -> io::Result<()> {
    let snapshot = &*story.snapshot;
    if let Some(peak) = &story.peak {
        let beside = ("cached or staged, beside it".to_owned(), peak.beside_bytes);
        let owners = peak.owners.iter().map(|(owner, held)| (owner.title(snapshot), *held));
        let rows = owners.chain([beside]).map(|(title, held)| {
            let part = (100.0 * held as f64 / peak.bytes as f64).min(100.0);
            let bar = format!("<span class=\"share\"><i style=\"width:{part:.1}%\"></i></span>");
            (String::new(), vec![escaped(&title), bytes(held), share(held, peak.bytes), bar])
        });
        let head = ["owner", "bytes", "of the peak", ""].into_iter();
        table_of("Who held the peak", "", head, rows, out)?;
    }
    blocks(story, out)
}

fn blocks(story: &Story, out: &mut dyn Write) -> io::Result<()> {
    let facts = &story.snapshot.facts;
    let (begin_ns, _) = story.snapshot.window_ns();
    let (count, total_bytes) = facts.blocks_total;
    let at = duration(facts.blocks_at_ns.saturating_sub(begin_ns));
    let of_peak = story
        .peak
        .as_ref()
        .map_or(String::new(), |peak| format!(", {} of the peak", share(total_bytes, peak.bytes)));
    let note = format!(
        "The {} largest of {count} blocks that were alive {at} after the first event, together {}{of_peak}.",
        facts.blocks.len(),
        bytes(total_bytes),
    );
    let rows = facts.blocks.iter().map(|block| {
        let layer = block.layer.map_or("–".to_owned(), |layer| layer.to_string());
        let tag = if block.tag.is_empty() { "–".to_owned() } else { escaped(&block.tag) };
        let cells = vec![
            escaped(&block.role),
            tag,
            layer,
            format!("{:#x}", block.stream),
            bytes(block.bytes),
            format!("{:#x}", block.address),
        ];
        (String::new(), cells)
    });
    let head = ["role", "tag", "layer", "stream", "bytes", "address"].into_iter();
    table_of("Largest live blocks", &note, head, rows, out)
}

/// Writes the longest waits, each with its cause, its bound and the copy that it waited for.
pub(super) fn waits(story: &Story, out: &mut dyn Write) -> io::Result<()> {
    let mut longest: Vec<&Stall> = story.stalls.iter().collect();
    longest.sort_by_key(|stall| std::cmp::Reverse(stall.wait.duration_ns()));
    longest.truncate(WAITS_MAX);
    let rows = longest.into_iter().map(|stall| (link(story, stall), cells(story, stall)));
    let note = format!("{}. A row leads to its copy in the picture.", by_cause(&story.stalls));
    let head =
        ["layer", "wait", "cause", "at least", "copy", "for room", "in queue", "service", "rate"];
    table_of("What compute waited for", &note, head.into_iter(), rows, out)
}

/// Returns the waits by cause: "late read 1.20 s in 3 waits, room …".
fn by_cause(stalls: &[Stall]) -> String {
    let causes =
        [Cause::LateRead, Cause::Link, Cause::Queue, Cause::Room, Cause::AskedLate, Cause::Unknown];
    let sums = causes.into_iter().filter_map(|cause| {
        let of_cause = stalls.iter().filter(|stall| stall.cause == cause);
        let (count, sum_ns) =
            of_cause.fold((0u64, 0u64), |(n, ns), stall| (n + 1, ns + stall.wait.duration_ns()));
        let waits = if count == 1 { "wait" } else { "waits" };
        (count > 0).then(|| format!("{} {} in {count} {waits}", cause.title(), duration(sum_ns)))
    });
    let sums: Vec<String> = sums.collect();
    sums.join(", ")
}

/// Returns where a click on the row leads: the stretch from the copy's asking to the end of the wait, and the
/// copy, or without one the wait.
fn link(story: &Story, stall: &Stall) -> String {
    let (begin_ns, _) = story.snapshot.window_ns();
    let wait = stall.wait;
    let shown = stall.copy.unwrap_or(wait);
    let from_ns = wait.start_ns.min(shown.start_ns).saturating_sub(begin_ns);
    let to_ns = wait.end_ns.max(shown.end_ns).saturating_sub(begin_ns);
    format!(
        " data-from=\"{from_ns}\" data-to=\"{to_ns}\" data-lane=\"{}\" data-start=\"{}\" data-title=\"{}\"",
        shown.lane as u8,
        shown.start_ns.saturating_sub(begin_ns),
        escaped(&shown.title(&story.snapshot.names)),
    )
}

fn cells(story: &Story, stall: &Stall) -> Vec<String> {
    let names = &story.snapshot.names;
    let Stall { wait, cause, copy, bound_ns } = stall;
    let layer = match wait.layer {
        Some(layer) => format!("layer {layer}"),
        None => escaped(names.get(wait.name)),
    };
    let none = || "–".to_owned();
    let of_copy = |tell: &dyn Fn(&Slice) -> String| copy.as_ref().map_or_else(none, tell);
    vec![
        layer,
        duration(wait.duration_ns()),
        format!("<span title=\"{}\">{}</span>", cause.meaning(), cause.title()),
        bound_ns.map_or_else(none, duration),
        of_copy(&|copy| format!("{} ({})", escaped(&copy.title(names)), bytes(copy.bytes))),
        of_copy(&|copy| duration(copy.queued_ns.saturating_sub(copy.asked_ns))),
        of_copy(&|copy| duration(copy.start_ns.saturating_sub(copy.queued_ns))),
        of_copy(&|copy| duration(copy.duration_ns())),
        of_copy(&|copy| rate_of(story, copy)),
    ]
}

/// Returns the rate of a copy, beside the best of its lane if that is known.
fn rate_of(story: &Story, copy: &Slice) -> String {
    let own = super::format::rate(crate::rate_bytes_per_s(copy.bytes, copy.duration_ns()));
    match story.snapshot.facts.rate(copy.lane) {
        Some(best) => format!("{own} of {}", super::format::rate(best)),
        None => own,
    }
}
