//! Where dumps go: the directory, their names, and how one is written.

use std::ffi::CString;
use std::hint::black_box;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_device::DeviceKind;
use dormouse_timeline::{DUMP_BYTES_PER_EVENT_MAX, Process, Snapshot, Timeline, html};

use super::last::note_written;
use super::reason::Reason;
use crate::fault::Fault;
use crate::{files, log, status};

/// Checks that there is memory for a dump of `timeline`: Rust ends a process that has none for a value.
pub(crate) fn check_room(timeline: &Timeline) -> Result<(), Fault> {
    let room_bytes = timeline.capacity_events() * DUMP_BYTES_PER_EVENT_MAX;
    let mut room = Vec::<u8>::new();
    room.try_reserve_exact(room_bytes).map_err(|_| {
        let message = format!("there are no {room_bytes} bytes of memory to write it");
        Fault::new(status::DORMOUSE_ERR_OUT_OF_MEMORY, message)
    })?;
    // An optimiser may remove an allocation that nothing uses, and with it the check.
    black_box(room);
    Ok(())
}

/// A device, by kind and ordinal.
pub(crate) type DeviceId = (DeviceKind, u32);

/// A device whose timeline is dumped.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// `host`, or `cuda` and an ordinal.
    pub(crate) device: String,
    pub(crate) id: DeviceId,
    pub(crate) timeline: Arc<Timeline>,
    /// Returns the timeline's contents with the facts of the device, and why they are dumped; `None` before the device's
    /// heap is published.
    pub(crate) snapshot_of: fn(DeviceId, &str) -> Option<Snapshot>,
}

impl Source {
    fn snapshot(&self, why: &str) -> Snapshot {
        (self.snapshot_of)(self.id, why).unwrap_or_else(|| self.timeline.snapshot())
    }
}

/// The directory of dumps, and the part of their names that a process has in common.
#[derive(Debug)]
pub(super) struct Target {
    directory: PathBuf,
    stem: String,
}

impl Target {
    /// Expands the `%` names of `directory`. A later change of the working directory does not matter.
    pub(super) fn new(directory: &Path) -> Result<Self, String> {
        let directory = PathBuf::from(log::expand_path(directory)?);
        let directory = std::path::absolute(directory).map_err(|error| error.to_string())?;
        let stem = log::expand_path(Path::new("dormouse-%h-rank%r-pid%p"))?;
        Ok(Self { directory, stem })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns why no file can be created now, if that is known.
    pub(super) fn obstacle(&self) -> Option<String> {
        let shown = self.directory.display();
        match std::fs::metadata(&self.directory) {
            Err(error) => return Some(format!("{shown}: {error}")),
            Ok(found) if !found.is_dir() => return Some(format!("{shown} is no directory")),
            Ok(_) => {}
        }
        let path = CString::new(self.directory.as_os_str().as_bytes()).ok()?;
        // SAFETY: a NUL-terminated path.
        let is_writable = unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) } == 0;
        (!is_writable).then(|| format!("{shown} is not writable"))
    }

    /// Writes the timeline of `source` as dump `number`, or with the next number that is free, and returns its path. `why`:
    /// the text of an error, or empty.
    pub(super) fn write(
        &self,
        source: &Source,
        number: u64,
        reason: Reason,
        why: &str,
    ) -> Result<PathBuf, Fault> {
        check_room(&source.timeline)?;
        let Self { directory, stem } = self;
        let end = format!("{}-{}.html", reason.name(), source.device);
        let paths = (number..).map(|number| directory.join(format!("{stem}-{number}-{end}")));
        let process = process();
        let snapshot = source.snapshot(why);
        let path = files::dump_new(paths, |file| html::write(&snapshot, &process, file))?;
        note_written(&path, reason);
        Ok(path)
    }
}

/// Returns this process as the titles of dumps name it.
pub(crate) fn process() -> Process {
    let rank = log::rank().and_then(|rank| rank.try_into().ok()).unwrap_or(0);
    Process::current(program_name(), rank)
}

fn program_name() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "process".to_owned() } else { name.to_owned() }
}

/// Returns the commands that show the page at `path`, for a shell: with a display, and without.
pub(super) fn show_commands(path: &Path) -> String {
    let path = shell_word(&path.display().to_string());
    format!("xdg-open {path}, or as text: dormouse report {path}")
}

fn shell_word(text: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-+:@%,=".contains(letter);
    if text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_for_a_shell() {
        let wanted = "xdg-open '/a b.html', or as text: dormouse report '/a b.html'";
        assert_eq!(show_commands(Path::new("/a b.html")), wanted);
        assert_eq!(
            [shell_word("/a/b-1.html"), shell_word("/it's")],
            ["/a/b-1.html", r"'/it'\''s'"]
        );
        for path in ["/a b/$HOME", "/it's `x`", "/plain"] {
            let command = format!("printf %s {}", shell_word(path));
            let told = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&told.stdout), path);
        }
    }
}
