//! The heading, figures and tables of the page.

use super::format::{bytes, duration, escaped, rate, share};
use crate::event::{Gauge, Lane};
use crate::snapshot::{Process, Snapshot};
use crate::totals::Totals;
use std::io::{self, Write};

/// Writes the heading and the main figures.
pub(super) fn figures(
    snapshot: &Snapshot,
    process: &Process,
    totals: &Totals,
    out: &mut dyn Write,
) -> io::Result<()> {
    let (begin_ns, end_ns) = snapshot.window_ns();
    let window_ns = end_ns.saturating_sub(begin_ns);
    writeln!(
        out,
        "<header>\n<h1>Memory timeline</h1>\n<p>{} · <span id=\"when\"></span></p>\n</header>",
        escaped(&process.title())
    )?;
    if snapshot.dropped > 0 {
        writeln!(
            out,
            "<p class=\"notice\">{} older events are not shown: the ring holds the newest only.</p>",
            snapshot.dropped
        )?;
    }
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
pub(super) fn tables(snapshot: &Snapshot, totals: &Totals, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"<section class=\"tables\">\n")?;
    let phases = totals.phases.iter().map(|phase| {
        let mut row = vec![
            escaped(&phase.name),
            phase.count.to_string(),
            duration(phase.busy_ns),
            format!("{} ({})", duration(phase.stall_ns), share(phase.stall_ns, phase.busy_ns)),
        ];
        row.extend(phase.peak_bytes.map(bytes));
        row
    });
    let head = ["phase", "runs", "time", "stalled"].into_iter();
    let head = head.chain(Gauge::ALL.map(|gauge| match gauge {
        Gauge::DeviceAwake => "peak awake",
        Gauge::DeviceMapped => "peak mapped",
        Gauge::HostUsed => "peak on host",
        Gauge::NvmeUsed => "peak on NVMe",
    }));
    table("Phases", head, phases, out)?;

    let lanes = Lane::ALL.into_iter().filter(|lane| lane.is_copy());
    let lanes = lanes.chain([Lane::Stall]).map(|lane| (lane, totals.lane(lane)));
    let copies = lanes.filter(|(_, of_lane)| of_lane.count > 0).map(|(lane, of_lane)| {
        vec![
            lane.title().to_owned(),
            of_lane.count.to_string(),
            bytes(of_lane.bytes),
            duration(of_lane.busy_ns),
            rate(of_lane.bytes_per_s()),
        ]
    });
    let head = ["lane", "count", "bytes", "busy", "rate while busy"].into_iter();
    table("Copies and stalls", head, copies, out)?;

    let tiers = Gauge::ALL.into_iter().zip(totals.peak_bytes).zip(snapshot.gauges_now);
    let tiers =
        tiers.map(|((gauge, peak), now)| vec![gauge.title().to_owned(), bytes(peak), bytes(now)]);
    table("Tiers", ["level", "peak", "at the end"].into_iter(), tiers, out)?;
    out.write_all(b"</section>\n")
}

fn peak(totals: &Totals, gauge: Gauge) -> String {
    bytes(totals.peak_bytes[gauge as usize])
}

/// Writes a table of cells that are already HTML; writes nothing without rows.
fn table<'a>(
    caption: &str,
    head: impl Iterator<Item = &'a str>,
    rows: impl Iterator<Item = Vec<String>>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return Ok(());
    }
    write!(out, "<div class=\"scroll\"><table>\n<caption>{caption}</caption>\n<thead><tr>")?;
    head.into_iter().try_for_each(|cell| write!(out, "<th scope=\"col\">{cell}</th>"))?;
    out.write_all(b"</tr></thead>\n<tbody>\n")?;
    for row in rows {
        writeln!(out, "<tr><td>{}</td></tr>", row.join("</td><td>"))?;
    }
    out.write_all(b"</tbody></table></div>\n")
}
