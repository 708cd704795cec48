//! Tests of histories: drafts beside a naive model, memory and the file of cold prompts, saved files.

mod cold;
mod drafts;
mod records;
mod saved;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{History, Options};

/// Vocabulary of tests.
const VOCAB: u32 = 1000;

fn history() -> History {
    History::new(Options::of_vocab(VOCAB)).unwrap()
}

/// A directory that is removed in the end.
pub(crate) struct Dir(pub(crate) PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("history-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = dormouse_storage::testing::disk_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}
