//! A file that is replaced as a whole or not at all.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use crate::error::HistoryError;

/// A file in the place of another.
#[derive(Debug)]
pub(crate) struct Replaced {
    pub(crate) file: File,
    /// Whether the new name is on the disk. With an error the death of the machine may bring the old file back.
    pub(crate) synced: io::Result<()>,
}

/// Has `write` fill a file with another name, and renames it to `path`. `options` need access to write. On an error
/// the file at `path` stays as it is. One caller at a time for each path.
///
/// # Errors
/// Those of `write`; `File` with `action`.
pub(crate) fn replace(
    path: &Path,
    action: &'static str,
    options: &mut OpenOptions,
    write: impl FnOnce(&File) -> Result<(), HistoryError>,
) -> Result<Replaced, HistoryError> {
    let failed = HistoryError::file(path, action);
    // Opened first: once the file is renamed nothing may fail but the disk.
    let dir = File::open(parent(path)).map_err(&failed)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = parent(path).join(format!(".{name}.new"));
    // What a crash left there is not in the way.
    let _ = std::fs::remove_file(&aside);
    let fill = || -> Result<File, HistoryError> {
        let file = options.create_new(true).open(&aside).map_err(&failed)?;
        write(&file)?;
        file.sync_all().map_err(&failed)?;
        std::fs::rename(&aside, path).map_err(&failed)?;
        Ok(file)
    };
    let file = fill().inspect_err(|_| {
        // What remains of a full disk, if anything.
        let _ = std::fs::remove_file(&aside);
    })?;
    Ok(Replaced { file, synced: dir.sync_all() })
}

/// Returns whether nothing has this name. A link that leads nowhere is something: what it names may come back.
pub(crate) fn is_absent(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

/// Returns the directory of a path, the current one if it names none.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
