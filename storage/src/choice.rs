//! The choice of the I/O engine, once, when the tier is created, with the reason for a fallback.

use std::path::Path;
use std::sync::Arc;

use super::error::NvmeError;
use super::fallback::Fallback;
use super::queue::{Blocking, Queue};
use super::storage::{DirectFile, Storage};
use super::uring::{self, Buffers, Refusal, Ring};

/// The I/O engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring if the system allows it, else threads.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Each I/O thread makes one blocking call at a time.
    Threads,
}

impl IoEngine {
    /// Returns the engine of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Auto, Self::Uring, Self::Threads].into_iter().find(|engine| engine.name() == name)
    }

    /// Returns its name, as in parameters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Threads => "threads",
        }
    }
}

/// The chosen engine.
#[derive(Debug)]
pub(super) struct Choice {
    /// `Uring` or `Threads`.
    pub(super) engine: IoEngine,
    /// One per thread.
    pub(super) queues: Vec<Box<dyn Queue>>,
    pub(super) buffers: Option<Arc<Buffers>>,
    /// The reason for a fallback.
    pub(super) note: Arc<Fallback>,
}

/// Creates queues to `file` for `threads` threads.
pub(super) fn choose(
    dir: &Path,
    file: &Arc<DirectFile>,
    asked: IoEngine,
    threads: usize,
    depth: usize,
) -> Result<Choice, NvmeError> {
    if asked == IoEngine::Threads {
        return Ok(with_threads(file, threads, None));
    }
    let refusal = if file.is_buffered() {
        let error = std::io::Error::from_raw_os_error(libc::EINVAL);
        Refusal { what: "I/O with O_DIRECT", error }
    } else {
        match with_rings(file, threads, depth) {
            Ok(choice) => return Ok(choice),
            Err(refusal) => refusal,
        }
    };
    if asked == IoEngine::Uring {
        return Err(NvmeError::setup(dir, refusal.what, &refusal.error));
    }
    let note = format!("threads do the file I/O, one request each, without io_uring: {refusal}");
    Ok(with_threads(file, threads, Some(note)))
}

fn with_threads(file: &Arc<DirectFile>, threads: usize, note: Option<String>) -> Choice {
    let queue = || Box::new(Blocking::new(Arc::clone(file) as Arc<dyn Storage>)) as Box<dyn Queue>;
    let queues = std::iter::repeat_with(queue).take(threads).collect();
    let note = Arc::new(Fallback::of(note));
    Choice { engine: IoEngine::Threads, queues, buffers: None, note }
}

fn with_rings(file: &Arc<DirectFile>, threads: usize, depth: usize) -> Result<Choice, Refusal> {
    let rings = std::iter::repeat_with(|| uring::set_up(file, depth).map(Arc::new))
        .take(threads)
        .collect::<Result<Vec<_>, _>>()?;
    let (buffers, refused) = Buffers::new(&rings);
    let buffers = Arc::new(buffers);
    let reason = refused.map(|error| format!("memory is not registered with io_uring: {error}"));
    let note = Arc::new(Fallback::of(reason));
    let queue = |ring| {
        let (file, buffers, note) = (Arc::clone(file), Arc::clone(&buffers), Arc::clone(&note));
        Box::new(Ring::new(ring, file, buffers, depth, note)) as Box<dyn Queue>
    };
    let queues = rings.into_iter().map(queue).collect();
    Ok(Choice { engine: IoEngine::Uring, queues, buffers: Some(buffers), note })
}
