//! Errors.

use std::io;
use std::path::{Path, PathBuf};

use dormouse_storage::NvmeError;

/// Reason that a call did nothing.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// A number is out of its range.
    #[error("{name} is {value}; accepted: {min} to {max}")]
    Range {
        /// Name of the argument.
        name: &'static str,
        /// Its value.
        value: u64,
        /// Smallest accepted value.
        min: u64,
        /// Largest accepted value.
        max: u64,
    },
    /// A token id is not below the vocabulary's size.
    #[error("id {index} of {name} is {id}; accepted: 0 to {max}")]
    Id {
        /// Name of the argument.
        name: &'static str,
        /// Index of the id.
        index: usize,
        /// The id.
        id: i64,
        /// Largest id.
        max: u32,
    },
    /// A reward is not finite.
    #[error("reward is {reward}; accepted: a finite number")]
    Reward {
        /// The reward.
        reward: f32,
    },
    /// A number is not of the accepted ones.
    #[error("{name} is {value}; accepted: {accepted}")]
    Number {
        /// Name of the argument.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What is accepted.
        accepted: &'static str,
    },
    /// An argument has too few or too many parts.
    #[error("{name} has {length} {unit}; accepted: {min} to {max}")]
    Length {
        /// Name of the argument.
        name: &'static str,
        /// What it has.
        length: usize,
        /// Fewest accepted.
        min: usize,
        /// Most accepted.
        max: usize,
        /// Of what.
        unit: &'static str,
    },
    /// A response is of an earlier epoch than those that are kept.
    #[error("epoch is {epoch} of a prompt with responses of epoch {latest}; accepted: {min} to {max}", max = u32::MAX)]
    Epoch {
        /// The epoch.
        epoch: u32,
        /// The latest epoch of the prompt.
        latest: u32,
        /// The earliest that is kept.
        min: u32,
    },
    /// A limit is reached.
    #[error("{what} limit reached ({max})")]
    Limit {
        /// What there are too many of.
        what: &'static str,
        /// How many there may be.
        max: u64,
    },
    /// A file could not be used.
    #[error("{}: {action}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A file is damaged, or of another format. Nothing was read from it, and it is as it was.
    #[error("{}: {reason}; accepted: a history that was saved by this release", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Another process uses the directory.
    #[error("{} is in use by {owner}; accepted: a directory for each trainer", dir.display())]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// Who uses it: its process and host.
        owner: String,
    },
    /// The file of cold prompts could not be made or read.
    #[error(
        "the file of cold prompts: {0}; pass another dir, or cold_bytes 0 to forget cold prompts"
    )]
    Cold(#[from] NvmeError),
}

impl HistoryError {
    /// Returns what makes a [`HistoryError::File`] of the system's reason.
    pub(crate) fn file(path: &Path, action: &'static str) -> impl Fn(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::File { path: path.clone(), action, source }
    }
}
