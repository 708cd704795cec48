//! The I/O threads: reads before writes, one chunk at a time.
//!
//! A piece of work is asked again and again until it is done, so a read that arrives waits for at
//! most one chunk of a write per thread. The pool bounds nothing itself: the engine bounds writes
//! by its in-flight window and reads by the device budget.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use crate::sync::{Condvar, Mutex, lock, wait};

/// Whether a piece of work wants to be called again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There is more to do.
    More,
    /// Finished, completion included.
    Done,
}

/// What goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Somebody waits for it.
    Read,
    /// Nobody waits for it.
    Write,
}

/// Work in chunks. It must not panic and must not wait for other work of the pool.
pub(crate) type Work = Box<dyn FnMut() -> Progress + Send>;

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is one of a pool's: it must never wait for a pool.
pub(crate) fn is_worker() -> bool {
    IS_WORKER.with(Cell::get)
}

#[derive(Default)]
struct Queues {
    reads: VecDeque<Work>,
    writes: VecDeque<Work>,
    closed: bool,
}

pub(crate) struct Shared {
    queues: Mutex<Queues>,
    changed: Condvar,
}

impl Shared {
    pub(crate) fn new() -> Self {
        Self { queues: Mutex::new(Queues::default()), changed: Condvar::new() }
    }

    /// Queues work; gives it back where the pool is closed.
    pub(crate) fn submit(&self, priority: Priority, work: Work) -> Result<(), Work> {
        let mut queues = lock(&self.queues);
        if queues.closed {
            return Err(work);
        }
        match priority {
            Priority::Read => queues.reads.push_back(work),
            Priority::Write => queues.writes.push_back(work),
        }
        drop(queues);
        self.changed.notify_one();
        Ok(())
    }

    /// Takes nothing more; what is queued still runs.
    pub(crate) fn close(&self) {
        lock(&self.queues).closed = true;
        self.changed.notify_all();
    }

    /// Runs work until the pool is closed and empty.
    pub(crate) fn run(&self) {
        IS_WORKER.with(|w| w.set(true));
        let mut queues = lock(&self.queues);
        loop {
            let next = match queues.reads.pop_front() {
                Some(work) => Some((Priority::Read, work)),
                None => queues.writes.pop_front().map(|work| (Priority::Write, work)),
            };
            let Some((priority, mut work)) = next else {
                if queues.closed {
                    return;
                }
                queues = wait(&self.changed, queues);
                continue;
            };
            drop(queues);
            let progress = work();
            queues = lock(&self.queues);
            match (progress, priority) {
                (Progress::Done, _) => {
                    // Dropped outside the lock: it may own the last handle of the engine.
                    drop(queues);
                    drop(work);
                    queues = lock(&self.queues);
                }
                (Progress::More, Priority::Read) => queues.reads.push_front(work),
                (Progress::More, Priority::Write) => queues.writes.push_front(work),
            }
        }
    }
}

/// The threads and what they share.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    #[cfg(not(loom))]
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

#[cfg(not(loom))]
impl Pool {
    /// Starts `threads` threads.
    pub(crate) fn start(threads: usize) -> Result<Self, crate::OffloadError> {
        let shared = Arc::new(Shared::new());
        let mut handles = Vec::new();
        for i in 0..threads {
            let name = format!("dormouse-io-{i}");
            let worker = Arc::clone(&shared);
            match std::thread::Builder::new().name(name.clone()).spawn(move || worker.run()) {
                Ok(handle) => handles.push(handle),
                Err(e) => {
                    shared.close();
                    return Err(crate::OffloadError::Thread { name, reason: e.to_string() });
                }
            }
        }
        Ok(Self { shared, threads: Mutex::new(handles) })
    }

    /// Runs what is queued, then ends the threads. A worker that calls this is not waited for.
    pub(crate) fn stop(&self) {
        self.shared.close();
        let handles = std::mem::take(&mut *lock(&self.threads));
        for handle in handles {
            if handle.thread().id() != std::thread::current().id() {
                // A worker that panicked has nothing more to say.
                let _ = handle.join();
            }
        }
    }
}

#[cfg(loom)]
impl Pool {
    pub(crate) fn start(_threads: usize) -> Result<Self, crate::OffloadError> {
        Ok(Self { shared: Arc::new(Shared::new()) })
    }

    pub(crate) fn stop(&self) {
        self.shared.close();
    }
}

impl Pool {
    pub(crate) fn submit(&self, priority: Priority, work: Work) -> Result<(), Work> {
        self.shared.submit(priority, work)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
#[cfg(loom)]
mod model {
    use loom::thread;

    use super::*;

    /// What is queued before the close runs, reads first, each to its end; later work comes back.
    #[test]
    fn loom_a_closing_pool_runs_what_it_took() {
        loom::model(|| {
            let shared = Arc::new(Shared::new());
            let worker = Arc::clone(&shared);
            let log = Arc::new(Mutex::new(Vec::new()));
            let note = |name: &'static str, mut turns: u32| -> Work {
                let log = Arc::clone(&log);
                Box::new(move || {
                    turns -= 1;
                    lock(&log).push(name);
                    if turns == 0 { Progress::Done } else { Progress::More }
                })
            };
            let worker = thread::spawn(move || worker.run());
            assert!(shared.submit(Priority::Write, note("write", 2)).is_ok());
            assert!(shared.submit(Priority::Read, note("read", 1)).is_ok());
            shared.close();
            assert!(shared.submit(Priority::Read, note("late", 1)).is_err());
            worker.join().unwrap();
            let log = lock(&log);
            assert_eq!(log.iter().filter(|&&n| n == "write").count(), 2);
            assert_eq!(log.iter().filter(|&&n| n == "read").count(), 1);
            assert_ne!(log.last(), Some(&"late"));
        });
    }
}
