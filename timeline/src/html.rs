//! Writes a snapshot as one self-contained HTML page that fetches nothing.
//!
//! The page answers in words and tables (readable without scripts) what set the peak, whose bytes it was and what
//! compute waited for. It holds the events as JSON (`<script type="application/json">`), and the script
//! `html/report/*.js`, which draws device bytes by owner, phases, tiers, copies, stalls and notices on a time axis.
//! Times in the JSON count from the start of the window, so they stay below 2^53, the limit of exact integers in
//! JavaScript.
//!
//! [`write_compared`] makes one page of two, which shows both.

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
const OTHER_BEGIN: &str = "<script type=\"application/json\" id=\"other\">";
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

/// Reason that two pages cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// A text is not a page that [`write()`] made: its place in the call, from 1.
    #[error("page {0} has no data of dormouse; accepted: pages written by a dump")]
    NotAPage(usize),
    /// A page has data of another version.
    #[error("page {0} has data of version {1}; accepted: {accepted}", accepted = data::VERSION)]
    Version(usize, String),
    /// The output failed.
    #[error("could not write the page: {0}")]
    Io(#[from] io::Error),
}

/// Writes the page `first` so that it opens with `second` beside it. Both are whole pages.
///
/// # Errors
/// [`CompareError`].
pub fn write_compared(first: &str, second: &str, out: &mut dyn Write) -> Result<(), CompareError> {
    for (at, page) in [(1, first), (2, second)] {
        let version = between(page, "<meta name=\"dormouse-data\" content=\"", "\"");
        match version {
            Some(version) if version == data::VERSION.to_string() => {}
            Some(version) => return Err(CompareError::Version(at, version.to_owned())),
            None => return Err(CompareError::NotAPage(at)),
        }
    }
    let other = between(second, DATA_BEGIN, DATA_END).ok_or(CompareError::NotAPage(2))?;
    let (head, tail) = first.split_once(DATA_BEGIN).ok_or(CompareError::NotAPage(1))?;
    write!(out, "{head}{OTHER_BEGIN}{other}{DATA_END}\n{DATA_BEGIN}{tail}")?;
    Ok(())
}

/// Returns the text between the first `begin` and the next `end`.
fn between<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(begin)?;
    Some(rest.split_once(end)?.0)
}
