//! Writes a snapshot as one self-contained HTML page that fetches nothing.
//!
//! The page holds figures and tables (readable without scripts), the events as JSON
//! (`<script type="application/json">`), and the script `html/report/*.js`, which draws phases, bytes per
//! tier, copies, stalls and notices on a time axis. Times in the JSON count from the start of the
//! window, so they stay below 2^53, the limit of exact integers in JavaScript.

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
/// The drawing area and its controls.
const PICTURE: &str = include_str!("html/report/picture.html");
/// Forbids fetching, even if a name in the data contains markup.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

/// Writes `snapshot` of `process` to `out` without flushing it. Uses memory proportional to the number of
/// events.
///
/// # Errors
/// Errors of `out`.
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
    let data = data::json(snapshot, process, &totals)?;
    write!(
        out,
        "</main>\n<script type=\"application/json\" id=\"data\">{data}</script>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )
}
