//! The dump that was written last, for the live figures.

use std::path::Path;

use dormouse_device::sync::Mutex;
use dormouse_timeline::ClockAnchor;
use dormouse_timeline::live::DumpFigures;

use super::reason::Reason;

static LAST: Mutex<Option<DumpFigures>> = Mutex::new(None);

/// Returns the dump of this process that was written last, whatever its reason.
pub(crate) fn last() -> Option<DumpFigures> {
    LAST.lock().clone()
}

/// Notes a dump that is complete at `path`.
pub(crate) fn note_written(path: &Path, reason: Reason) {
    // The working directory of who reads it is another.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let written = DumpFigures {
        written_unix_ns: ClockAnchor::now().realtime_ns,
        reason: reason.name().to_owned(),
        path: path.display().to_string(),
    };
    *LAST.lock() = Some(written);
}
