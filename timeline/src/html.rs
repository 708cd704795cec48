//! Writes a snapshot as one self-contained HTML page that fetches nothing.
//!
//! The page answers in words and tables (readable without scripts) what set the peak, whose bytes it was and what
//! compute waited for. It holds the events as JSON (`<script type="application/json">`), and the script
//! `html/report/*.js`, which draws device bytes by owner, phases, tiers, copies, stalls and notices on a time axis.
//! Times in the JSON count from the start of the window, so they stay below 2^53, the limit of exact integers in
//! JavaScript.

mod data;
mod format;
mod holders;
mod story;
mod summary;

use crate::snapshot::{Process, Snapshot};
use std::io::{self, Write};
use story::Story;

const STYLE: &str = include_str!("html/report/style.css");
const SCRIPT: &str = concat!(
    include_str!("html/report/data.js"),
    include_str!("html/report/steps.js"),
    include_str!("html/report/stack.js"),
    include_str!("html/report/draw.js"),
    include_str!("html/report/hover.js"),
    include_str!("html/report/compare.js"),
);
/// The drawing area and its controls.
const PICTURE: &str = include_str!("html/report/picture.html");
/// Another dump beside this one.
const COMPARE: &str = include_str!("html/report/compare.html");
const DATA_BEGIN: &str = "<script type=\"application/json\" id=\"data\">";
const DATA_END: &str = "</script>";
/// Forbids fetching, even if a name in the data contains markup.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

/// Writes `snapshot` of `process` to `out` without flushing it. Uses memory proportional to the number of
/// events.
///
/// # Errors
/// Errors of `out`.
pub fn write(snapshot: &Snapshot, process: &Process, out: &mut dyn Write) -> io::Result<()> {
    let story = Story::of(snapshot);
    let title = format::escaped(&process.title());
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta name=\"dormouse-data\" content=\"{}\">\n\
         <title>dormouse · {title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
        data::VERSION,
    )?;
    summary::head(&story, process, out)?;
    out.write_all(PICTURE.as_bytes())?;
    out.write_all(COMPARE.as_bytes())?;
    out.write_all(b"<section class=\"tables\">\n")?;
    holders::waits(&story, out)?;
    holders::peak(&story, out)?;
    summary::tables(&story, out)?;
    out.write_all(b"</section>\n")?;
    let data = data::json(&story, process)?;
    write!(
        out,
        "</main>\n{DATA_BEGIN}{data}{DATA_END}\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )
}
