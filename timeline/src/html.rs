//! Writes a snapshot as one HTML page: nothing to install, nothing fetched, opens from a disk.
//!
//! The page is three parts written one behind the other: the frame and the summary tables, already
//! readable where scripts are off; the events as JSON; and the script that draws them on a canvas
//! over a real time axis. Times in the JSON count from the beginning of the window, so they stay
//! far below the 2^53 up to which JavaScript counts exactly.
//!
//! ```text
//!   head      title, style
//!   figures   the handful of numbers asked for first
//!   picture   phases as bands, bytes per tier as steps, each copy a bar, stalls, notices
//!   tables    phases, copies by direction, tiers
//!   data      <script type="application/json">
//!   script    html/report/*.js
//! ```

mod data;
mod format;
mod summary;

use crate::snapshot::{Process, Snapshot};
use crate::totals::Totals;
use std::io::{self, Write};

const STYLE: &str = include_str!("html/report/style.css");
const SCRIPT: &str = concat!(
    include_str!("html/report/data.js"),
    include_str!("html/report/draw.js"),
    include_str!("html/report/hover.js"),
);
/// The drawing area and its controls; the script finds its parts by id.
const PICTURE: &str = include_str!("html/report/picture.html");
/// Nothing may be fetched, whatever a name in the data tries.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

/// Writes `snapshot` of `process` to `out`.
///
/// Takes memory in proportion to the number of events, once. Flushing `out` is the caller's.
///
/// # Errors
/// What `out` says.
pub fn write(snapshot: &Snapshot, process: &Process, out: &mut dyn Write) -> io::Result<()> {
    let totals = Totals::of(snapshot);
    let title = format::escaped(&process.title());
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>dormouse · {title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
    )?;
    summary::figures(snapshot, process, &totals, out)?;
    out.write_all(PICTURE.as_bytes())?;
    summary::tables(snapshot, &totals, out)?;
    out.write_all(b"</main>\n<script type=\"application/json\" id=\"data\">")?;
    data::write(snapshot, process, &totals, out)?;
    write!(out, "</script>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n")
}
