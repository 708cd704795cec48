//! Progress of work that takes a while, on a terminal.
//!
//! Nothing is drawn in the first two seconds, with `--json`, or unless standard error is a terminal. What is drawn
//! is removed before the result is printed.

use std::io::{self, IsTerminal, Read};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time until progress is drawn.
const DELAY: Duration = Duration::from_secs(2);
/// Time between two drawings.
const TICK: Duration = Duration::from_millis(200);
/// Parts of a bar whose size is known.
const OF_BYTES: &str = "{msg} [{bar:30}] {bytes} of {total_bytes}, {eta} left";
const UNKNOWN: &str = "{msg} {elapsed} {spinner}";
/// Parts of a file that is not read from its beginning to its end, such as a table.
const PARTS: u64 = 1_000;

/// Progress of one command.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Ends the watcher.
    end: Option<Sender<()>>,
    /// Begins to draw after [`DELAY`].
    watcher: Option<JoinHandle<()>>,
}

impl Progress {
    /// Progress that is never drawn.
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), end: None, watcher: None }
    }

    /// Progress of work of unknown size, drawn on standard error unless `is_json`.
    pub(crate) fn new(words: &'static str, is_json: bool) -> Self {
        if is_json || !io::stderr().is_terminal() {
            return Self::hidden();
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let (end, ended) = mpsc::channel();
        let drawn = bar.clone();
        let watch = move || {
            if ended.recv_timeout(DELAY) == Err(RecvTimeoutError::Timeout) {
                drawn.set_draw_target(ProgressDrawTarget::stderr());
                drawn.enable_steady_tick(TICK);
            }
        };
        // Without a thread nothing is drawn.
        let watcher = thread::Builder::new().name("progress".to_owned()).spawn(watch).ok();
        let progress = Self { bar, end: Some(end), watcher };
        progress.begin(words);
        progress
    }

    /// Begins a part of unknown size.
    pub(crate) fn begin(&self, words: &'static str) {
        self.bar.set_style(style(UNKNOWN));
        self.bar.set_message(words);
    }

    /// Begins a part that reads `bytes`, 0 if their number is unknown.
    pub(crate) fn begin_file(&self, words: &'static str, bytes: u64) {
        self.begin(words);
        if bytes > 0 {
            self.bar.set_style(style(OF_BYTES));
        }
        self.bar.set_length(bytes);
        self.bar.set_position(0);
    }

    /// Returns a reader that counts what is read of the file.
    pub(crate) fn counted<R: Read>(&self, input: R) -> Counted<R> {
        Counted { input, bar: self.bar.clone() }
    }

    /// Notes that `done` of `all` parts of the file have been read.
    pub(crate) fn at_part(&self, done: u64, all: u64) {
        let bytes = self.bar.length().unwrap_or(0);
        let parts = done.saturating_mul(PARTS) / all.max(1);
        self.bar.set_position(bytes / PARTS * parts.min(PARTS));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end = None;
        if let Some(watcher) = self.watcher.take() {
            // It ends at once, as its channel has.
            let _ = watcher.join();
        }
        self.bar.finish_and_clear();
    }
}

/// A reader whose bytes are counted.
#[derive(Debug)]
pub(crate) struct Counted<R> {
    input: R,
    bar: ProgressBar,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(into)?;
        self.bar.inc(read as u64);
        Ok(read)
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants, and valid.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_valid() {
        for template in [OF_BYTES, UNKNOWN] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }

    #[test]
    fn what_is_read_is_counted() {
        let progress = Progress::hidden();
        progress.begin_file("reading", 4_000);
        let mut text = Vec::new();
        progress.counted(&b"some text"[..]).read_to_end(&mut text).unwrap();
        assert_eq!((progress.bar.position(), progress.bar.length()), (9, Some(4_000)));
        progress.at_part(1, 4);
        assert_eq!(progress.bar.position(), 1_000);
        progress.at_part(5, 4);
        assert_eq!(progress.bar.position(), 4_000);
        progress.begin_file("reading", 0);
        assert_eq!((progress.bar.position(), progress.bar.length()), (0, Some(0)));
    }
}
