//! The file that requests a dump by its existence.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::log;

/// A path that is polled.
#[derive(Debug)]
pub(super) struct Trigger(PathBuf);

impl Trigger {
    /// Expands the `%` names of `path`, which is below `directory` unless it is absolute.
    pub(super) fn new(directory: &Path, path: &Path) -> Result<Self, String> {
        Ok(Self(directory.join(log::expand_path(path)?)))
    }

    /// Removes the file, and returns whether it was there. Of several processes that poll it, one gets it.
    pub(super) fn take(&self) -> Result<bool, String> {
        // A look first: on a network file system it is cheaper than a removal.
        if std::fs::symlink_metadata(&self.0).is_err() {
            return Ok(false);
        }
        match std::fs::remove_file(&self.0) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(format!("could not remove {}: {error}", self.0.display())),
        }
    }
}
