//! The heading, the answer in words, the main figures, and the tables of phases, copies and tiers.

use super::format::{bytes, duration, escaped, rate, share};
use super::story::Story;
use crate::event::{Gauge, Lane};
use crate::snapshot::Process;
use crate::totals::{LaneTotals, Totals};
use std::io::{self, Write};

/// Owners named in the answer.
const OWNERS_NAMED: usize = 3;

/// Writes the heading, the answer in words and the main figures.
pub(super) fn head(story: &Story, process: &Process, out: &mut dyn Write) -> io::Result<()> {
    let snapshot = &*story.snapshot;
    writeln!(
        out,
        "<header>\n<h1>Memory timeline</h1>\n<p>{} · <span id=\"when\"></span></p>\n</header>",
        escaped(&process.title())
    )?;
    if !snapshot.facts.reason.is_empty() {
        writeln!(out, "<p class=\"notice reason\">{}</p>", escaped(&snapshot.facts.reason))?;
    }
    if snapshot.dropped > 0 {
        writeln!(
            out,
            "<p class=\"notice\">{} older events are not shown: the ring holds the newest only.</p>",
            snapshot.dropped
        )?;
    }
    if let Some(sentence) = unrecorded_sentence(story) {
        writeln!(out, "<p class=\"notice\">{sentence}</p>")?;
    }
    out.write_all(b"<ul class=\"answer\">\n")?;
    for sentence in [peak_sentence(story), wait_sentence(story)].into_iter().flatten() {
        writeln!(out, "<li>{sentence}</li>")?;
    }
    out.write_all(b"</ul>\n")?;
    figures(story, out)
}

/// Says from when on levels are recorded, if that is not the whole window.
fn unrecorded_sentence(story: &Story) -> Option<String> {
    let snapshot = &*story.snapshot;
    let (begin_ns, _) = snapshot.window_ns();
    let from_ns = snapshot.levels_begin_ns().checked_sub(begin_ns).filter(|ns| *ns > 0)?;
    let seen_bytes = story.peak.as_ref().map_or(0, |peak| peak.bytes);
    let earlier = match snapshot.facts.peak_bytes {
        most if most > seen_bytes => format!(" The most so far, {}, was before that.", bytes(most)),
        _ => String::new(),
    };
    Some(format!(
        "Levels of memory are recorded from {} after the first event on: earlier ones are lost, and peaks are those of the \
         recorded time.{earlier}",
        duration(from_ns)
    ))
}

/// Says what set the peak and whose bytes it was.
fn peak_sentence(story: &Story) -> Option<String> {
    let (snapshot, peak) = (&*story.snapshot, story.peak.as_ref()?);
    let (begin_ns, _) = snapshot.window_ns();
    let place = match peak.moment.place(snapshot).as_str() {
        "" => String::new(),
        place => format!(" in {}", escaped(place)),
    };
    let at = duration(peak.moment.at_ns.saturating_sub(begin_ns));
    let mut owners = peak.owners.clone();
    owners.sort_by_key(|(_, held)| std::cmp::Reverse(*held));
    let largest = owners.iter().take(OWNERS_NAMED).map(|(owner, held)| {
        let title = escaped(&owner.title(snapshot));
        format!("{title} {} ({})", bytes(*held), share(*held, peak.bytes))
    });
    let largest: Vec<String> = largest.collect();
    Some(format!(
        "<b>Peak {}</b>{place}, {at} after the first event: {}.",
        bytes(peak.bytes),
        largest.join(", ")
    ))
}

/// Says how long compute waited, and what for.
fn wait_sentence(story: &Story) -> Option<String> {
    let snapshot = &*story.snapshot;
    let longest = story.stalls.iter().max_by_key(|stall| stall.wait.duration_ns())?;
    let waited_ns = story.totals.lane(Lane::Stall).busy_ns;
    let of_phases = match story.totals.lane(Lane::Phase).busy_ns {
        0 => String::new(),
        phases_ns => format!(" ({} of the phases)", share(waited_ns, phases_ns)),
    };
    let layer = match longest.wait.layer {
        Some(layer) => format!("layer {layer}"),
        None => escaped(snapshot.names.get(longest.wait.name)),
    };
    let bound = match longest.bound_ns {
        Some(bound_ns) => format!("; the link alone would have taken {} of it", duration(bound_ns)),
        None => String::new(),
    };
    Some(format!(
        "<b>Compute waited {}</b>{of_phases}, longest {} for {layer}: {} ({}){bound}.",
        duration(waited_ns),
        duration(longest.wait.duration_ns()),
        longest.cause.title(),
        longest.cause.meaning(),
    ))
}

fn figures(story: &Story, out: &mut dyn Write) -> io::Result<()> {
    let totals = &story.totals;
    let (begin_ns, end_ns) = story.snapshot.window_ns();
    let window_ns = end_ns.saturating_sub(begin_ns);
    let moved = |outbound: bool| {
        let lanes = Lane::ALL.into_iter().filter(|l| l.is_copy() && l.is_outbound() == outbound);
        bytes(lanes.map(|lane| totals.lane(lane).bytes).fold(0, u64::saturating_add))
    };
    let phases_ns = totals.lane(Lane::Phase).busy_ns;
    let stall_ns = totals.lane(Lane::Stall).busy_ns;
    let stalled = match phases_ns {
        0 => format!("{} of the time shown", share(stall_ns, window_ns)),
        _ => format!("{} of the phases", share(stall_ns, phases_ns)),
    };
    let figures = [
        ("time shown", duration(window_ns), "first event to last"),
        ("peak awake", peak(totals, Gauge::DeviceAwake), "device bytes handed out"),
        ("peak mapped", peak(totals, Gauge::DeviceMapped), "with cached and staged"),
        ("peak on NVMe", peak(totals, Gauge::NvmeUsed), "asleep in the file"),
        ("put to sleep", moved(true), "copied out of the device"),
        ("woken", moved(false), "copied back"),
        ("stalled", duration(stall_ns), &stalled),
    ];
    out.write_all(b"<dl class=\"figures\">\n")?;
    for (label, value, note) in figures {
        writeln!(out, "<div><dt>{label}</dt><dd>{value}</dd><dd class=\"note\">{note}</dd></div>")?;
    }
    out.write_all(b"</dl>\n")
}

/// Writes the tables of phases, copies by direction, and tiers.
pub(super) fn tables(story: &Story, out: &mut dyn Write) -> io::Result<()> {
    let totals = &story.totals;
    let phases = totals.phases.iter().map(|phase| {
        let mut row = vec![
            escaped(&phase.name),
            phase.count.to_string(),
            duration(phase.busy_ns),
            format!("{} ({})", duration(phase.stall_ns), share(phase.stall_ns, phase.busy_ns)),
        ];
        row.extend(Gauge::TIERS.map(|gauge| {
            phase.peak_bytes[gauge as usize].map_or("not recorded".to_owned(), bytes)
        }));
        row
    });
    let head = ["phase", "runs", "time", "stalled"].into_iter();
    let head = head.chain(["peak awake", "peak mapped", "peak on host", "peak on NVMe"]);
    table("Phases", "", head, phases, out)?;

    let lanes = Lane::ALL.into_iter().filter(|lane| lane.is_copy());
    let lanes = lanes.chain([Lane::Stall]).map(|lane| (lane, totals.lane(lane)));
    let copies = lanes.filter(|(_, of_lane)| of_lane.count > 0).map(|(lane, of_lane)| {
        let best = story.snapshot.facts.bytes_per_s[lane as usize];
        let each = |total_ns: u64| duration(total_ns / of_lane.count.max(1));
        let LaneTotals { count, busy_ns, queue_ns, total_ns, room_ns, .. } = of_lane;
        vec![
            lane.title().to_owned(),
            count.to_string(),
            bytes(of_lane.bytes),
            duration(busy_ns),
            rate(of_lane.bytes_per_s()),
            rate(best),
            each(room_ns),
            each(queue_ns),
            each(total_ns),
        ]
    });
    let head = ["lane", "count", "bytes", "busy", "rate while busy", "best measured"].into_iter();
    let head = head.chain(["for room, each", "in queue, each", "service, each"]);
    table("Copies and stalls", "", head, copies, out)?;

    let tiers = Gauge::TIERS.into_iter().map(|gauge| {
        let (peak, now) =
            (totals.peak_bytes[gauge as usize], story.snapshot.gauges_now[gauge as usize]);
        vec![gauge.title().to_owned(), bytes(peak), bytes(now)]
    });
    table("Tiers", "", ["level", "peak", "at the end"].into_iter(), tiers, out)
}

fn peak(totals: &Totals, gauge: Gauge) -> String {
    bytes(totals.peak_bytes[gauge as usize])
}

/// Writes a table of cells that are already HTML; writes nothing without rows.
fn table<'a>(
    caption: &str,
    note: &str,
    head: impl Iterator<Item = &'a str>,
    rows: impl Iterator<Item = Vec<String>>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let rows = rows.map(|cells| (String::new(), cells));
    table_of(caption, note, head, rows, out)
}

/// As [`table`], each row with attributes of its own.
pub(super) fn table_of<'a>(
    caption: &str,
    note: &str,
    head: impl Iterator<Item = &'a str>,
    rows: impl Iterator<Item = (String, Vec<String>)>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return Ok(());
    }
    out.write_all(b"<div class=\"scroll\">")?;
    if !note.is_empty() {
        write!(out, "<p>{note}</p>")?;
    }
    write!(out, "<table>\n<caption>{caption}</caption>\n<thead><tr>")?;
    head.into_iter().try_for_each(|cell| write!(out, "<th scope=\"col\">{cell}</th>"))?;
    out.write_all(b"</tr></thead>\n<tbody>\n")?;
    for (attributes, row) in rows {
        writeln!(out, "<tr{attributes}><td>{}</td></tr>", row.join("</td><td>"))?;
    }
    out.write_all(b"</tbody></table></div>\n")
}
