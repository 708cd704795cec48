//! The I/O threads: each keeps its own queue to the file full, reads before writes.
//!
//! A read that arrives waits for at most one answer of a thread. A cancelled transfer overtakes queued
//! writes and reads. The pool bounds nothing itself: the engine bounds writes by its in-flight window and
//! the host memory budget, and reads by the device budget and the load queue.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use dormouse_device::with_signals_blocked;

use crate::Queue;
use crate::error::ThreadError;
use crate::io_scheduler::{IoScheduler, Priority, SchedulerStep, TransferJob};
use crate::sync::{Condvar, Mutex, lock, wait};

/// Work that may block an I/O thread. It must not panic and must not wait for other work of the pool.
pub type BlockingTask = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queues {
    reads: VecDeque<Box<dyn TransferJob>>,
    writes: VecDeque<Box<dyn TransferJob>>,
    blocking_tasks: VecDeque<BlockingTask>,
    closed: bool,
}

impl Queues {
    const fn of(&mut self, priority: Priority) -> &mut VecDeque<Box<dyn TransferJob>> {
        match priority {
            Priority::Read => &mut self.reads,
            Priority::Write => &mut self.writes,
        }
    }

    fn take_called_off(&mut self) -> Option<Box<dyn TransferJob>> {
        let mut take = |priority| {
            let queue = self.of(priority);
            let at = queue.iter().position(|job| job.is_called_off())?;
            queue.remove(at)
        };
        take(Priority::Read).or_else(|| take(Priority::Write))
    }
}

struct PoolShared {
    queues: Mutex<Queues>,
    changed: Condvar,
    /// A transfer that may still be queued was cancelled.
    called_off: Arc<AtomicBool>,
    /// Called by a thread that panics.
    on_panic: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Calls `on_panic` if its thread panics.
struct PanicWatch<'a>(&'a PoolShared);

impl Drop for PanicWatch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(on_panic) = self.0.on_panic.get()
        {
            on_panic();
        }
    }
}

/// The next work of an idle thread.
enum IdleWork {
    Transfers,
    BlockingTask(BlockingTask),
    End,
}

impl PoolShared {
    /// Runs work until the pool is closed and empty.
    fn run(&self, queue: Box<dyn Queue>) {
        dormouse_device::register_runtime_thread();
        let _own = dormouse_device::host::guard::own_thread();
        // First, so that it is dropped last: the kernel has then finished all requests.
        let _watch = PanicWatch(self);
        let mut scheduler = IoScheduler::new(queue.depth());
        // Dropped before the scheduler if a transfer panics: it waits for the kernel, and the transfers
        // own the memory that the kernel fills.
        let mut queue = queue;
        loop {
            match scheduler.next_step(|priority| self.take(priority)) {
                SchedulerStep::Submit(token, request) => queue.push(token, request),
                SchedulerStep::Finished(job) => job.finish(),
                SchedulerStep::Idle if scheduler.unanswered() > 0 => {
                    let over = queue.wait().and_then(|a| scheduler.answer(a.token, a.result));
                    if let Some(job) = over {
                        job.finish();
                    }
                }
                SchedulerStep::Idle => match self.find() {
                    IdleWork::Transfers => {}
                    IdleWork::BlockingTask(task) => task(),
                    IdleWork::End => return,
                },
            }
        }
    }

    /// Takes the next transfer: cancelled ones first, since they are over at once; no writes while a
    /// blocking task waits for an idle thread.
    fn take(&self, priority: Priority) -> Option<Box<dyn TransferJob>> {
        let mut queues = lock(&self.queues);
        if self.called_off.swap(false, Ordering::Acquire)
            && let Some(job) = queues.take_called_off()
        {
            // There may be more of them.
            self.called_off.store(true, Ordering::Relaxed);
            return Some(job);
        }
        let is_held_up = priority == Priority::Write && !queues.blocking_tasks.is_empty();
        if is_held_up { None } else { queues.of(priority).pop_front() }
    }

    /// Waits for work for an idle thread.
    fn find(&self) -> IdleWork {
        let mut queues = lock(&self.queues);
        loop {
            if let Some(task) = queues.blocking_tasks.pop_front() {
                return IdleWork::BlockingTask(task);
            }
            if !queues.reads.is_empty() || !queues.writes.is_empty() {
                return IdleWork::Transfers;
            }
            if queues.closed {
                return IdleWork::End;
            }
            queues = wait(&self.changed, queues);
        }
    }
}

/// The I/O threads. Dropping the pool stops them.
pub struct IoPool {
    shared: Arc<PoolShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl fmt::Debug for IoPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoPool").finish_non_exhaustive()
    }
}

impl IoPool {
    /// Starts one thread per queue. The caller sets `called_off` after it cancelled a queued transfer.
    ///
    /// # Errors
    /// [`ThreadError`]: the system has no more threads.
    pub fn start(
        queues: Vec<Box<dyn Queue>>,
        called_off: Arc<AtomicBool>,
    ) -> Result<Self, ThreadError> {
        let (queued, changed) = (Mutex::new(Queues::default()), Condvar::new());
        let shared = PoolShared { queues: queued, changed, called_off, on_panic: OnceLock::new() };
        // Dropped on an error: the threads started so far end.
        let pool = Self { shared: Arc::new(shared), threads: Mutex::default() };
        for (i, queue) in queues.into_iter().enumerate() {
            let name = format!("dormouse-io-{i}");
            let worker = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(name.clone());
            let spawned = with_signals_blocked(|| builder.spawn(move || worker.run(queue)));
            let handle = spawned.map_err(|e| ThreadError { name, reason: e.to_string() })?;
            lock(&pool.threads).push(handle);
        }
        Ok(pool)
    }

    /// Runs what is queued, then joins the threads, except a calling I/O thread. Idempotent.
    pub fn stop(&self) {
        lock(&self.shared.queues).closed = true;
        self.shared.changed.notify_all();
        let handles = std::mem::take(&mut *lock(&self.threads));
        for handle in handles {
            if handle.thread().id() != std::thread::current().id() {
                // A panic was reported by the thread.
                let _ = handle.join();
            }
        }
    }

    /// Sets the function that an I/O thread calls when it panics. Only the first call has an effect.
    pub fn on_panic(&self, listener: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.on_panic.set(Box::new(listener));
    }

    /// Queues a transfer.
    ///
    /// # Errors
    /// Returns the transfer if the pool is stopped.
    pub fn submit(
        &self,
        priority: Priority,
        job: Box<dyn TransferJob>,
    ) -> Result<(), Box<dyn TransferJob>> {
        self.enqueue(job, |queues, job| {
            if job.is_called_off() {
                self.shared.called_off.store(true, Ordering::Relaxed);
            }
            queues.of(priority).push_back(job);
        })
    }

    /// Queues a blocking task.
    ///
    /// # Errors
    /// Returns the task if the pool is stopped.
    pub fn run_blocking(&self, task: BlockingTask) -> Result<(), BlockingTask> {
        self.enqueue(task, |queues, task| queues.blocking_tasks.push_back(task))
    }

    fn enqueue<W>(&self, work: W, push: impl FnOnce(&mut Queues, W)) -> Result<(), W> {
        let mut queues = lock(&self.shared.queues);
        if queues.closed {
            return Err(work);
        }
        push(&mut queues, work);
        drop(queues);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Takes the transfer that an idle thread would begin with.
    #[cfg(all(any(test, feature = "faults"), not(loom)))]
    pub fn take(&self, priority: Priority) -> Option<Box<dyn TransferJob>> {
        self.shared.take(priority)
    }
}

impl Drop for IoPool {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
#[cfg(loom)]
mod model {
    use std::io;

    use loom::thread;

    use super::*;
    use crate::{Answer, IoMemory, IoOperation, Request};

    /// Answers in the order of asking.
    #[derive(Debug, Default)]
    struct Echo(VecDeque<u64>);

    impl Queue for Echo {
        fn depth(&self) -> usize {
            1
        }

        fn push(&mut self, token: u64, _: Request) {
            self.0.push_back(token);
        }

        fn wait(&mut self) -> Option<Answer> {
            self.0.pop_front().map(|token| Answer { token, result: Ok(0) })
        }
    }

    struct Noted {
        name: &'static str,
        turns: u32,
        log: Arc<Mutex<Vec<&'static str>>>,
    }

    impl TransferJob for Noted {
        fn next_request(&mut self) -> Option<(u32, Request)> {
            (self.turns > 0).then_some((
                self.turns,
                Request { operation: IoOperation::Read, offset: 0, memory: IoMemory::none() },
            ))
        }

        fn answer(&mut self, name: u32, _: io::Result<usize>) {
            assert_eq!(name, self.turns);
            self.turns -= 1;
            lock(&self.log).push(self.name);
        }

        fn is_over(&self) -> bool {
            self.turns == 0
        }

        fn finish(self: Box<Self>) {
            lock(&self.log).push("over");
        }
    }

    /// What is queued before the close runs, reads first, each to its end; later work comes back.
    #[test]
    fn loom_a_closing_pool_runs_what_it_took() {
        loom::model(|| {
            // Without threads of its own: the model's run it.
            let pool = IoPool::start(Vec::new(), Arc::default()).unwrap();
            let worker = Arc::clone(&pool.shared);
            let log = Arc::new(Mutex::new(Vec::new()));
            let note = |name: &'static str, turns: u32| {
                Box::new(Noted { name, turns, log: Arc::clone(&log) })
            };
            let worker = thread::spawn(move || worker.run(Box::<Echo>::default()));
            assert!(pool.submit(Priority::Write, note("write", 2)).is_ok());
            assert!(pool.submit(Priority::Read, note("read", 1)).is_ok());
            let task_log = Arc::clone(&log);
            let task: BlockingTask = Box::new(move || lock(&task_log).push("task"));
            assert!(pool.run_blocking(task).is_ok());
            pool.stop();
            assert!(pool.submit(Priority::Read, note("late", 1)).is_err());
            assert!(pool.run_blocking(Box::new(|| {})).is_err());
            worker.join().unwrap();
            let log = lock(&log);
            let count = |name| log.iter().filter(|&&n| n == name).count();
            assert_eq!((count("write"), count("read"), count("task")), (2, 1, 1));
            assert_eq!((count("over"), count("late")), (2, 0));
        });
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::io;

    use super::*;
    use crate::{Answer, IoMemory, IoOperation, Request};

    /// A pool without threads.
    fn pool(called_off: &Arc<AtomicBool>) -> IoPool {
        IoPool::start(Vec::new(), Arc::clone(called_off)).unwrap()
    }

    /// A transfer of one request, which may panic at its end.
    struct Job {
        is_asked: bool,
        is_answered: bool,
        panics: bool,
        /// Set when it is dropped.
        gone: Arc<AtomicBool>,
        called_off: Arc<AtomicBool>,
    }

    impl Job {
        fn new(panics: bool) -> Box<Self> {
            let (gone, called_off) = (Arc::default(), Arc::default());
            Box::new(Self { is_asked: false, is_answered: false, panics, gone, called_off })
        }
    }

    impl TransferJob for Job {
        fn next_request(&mut self) -> Option<(u32, Request)> {
            let is_first = !std::mem::replace(&mut self.is_asked, true);
            let memory = IoMemory::none();
            is_first.then_some((0, Request { operation: IoOperation::Read, offset: 0, memory }))
        }

        fn answer(&mut self, _: u32, _: io::Result<usize>) {
            self.is_answered = true;
        }

        fn is_over(&self) -> bool {
            self.is_answered
        }

        fn is_called_off(&self) -> bool {
            self.called_off.load(Ordering::SeqCst)
        }

        fn finish(self: Box<Self>) {
            assert!(!self.panics, "the panic of the test");
        }
    }

    impl Drop for Job {
        fn drop(&mut self) {
            self.gone.store(true, Ordering::SeqCst);
        }
    }

    /// Records, when dropped, whether the other transfer was dropped before.
    #[derive(Debug)]
    struct Watching {
        asked: VecDeque<u64>,
        other: Arc<AtomicBool>,
        was_gone: Arc<AtomicBool>,
    }

    impl Queue for Watching {
        fn depth(&self) -> usize {
            2
        }

        fn push(&mut self, token: u64, _: Request) {
            self.asked.push_back(token);
        }

        fn wait(&mut self) -> Option<Answer> {
            self.asked.pop_front().map(|token| Answer { token, result: Ok(0) })
        }
    }

    impl Drop for Watching {
        fn drop(&mut self) {
            self.was_gone.store(self.other.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    }

    /// The memory of a transfer outlives the queue that fills it, also when a thread panics.
    #[test]
    fn a_thread_that_panics_drops_its_queue_before_its_transfers() {
        let pool = pool(&Arc::default());
        let (first, second) = (Job::new(true), Job::new(false));
        let was_gone = Arc::new(AtomicBool::new(false));
        let queue = Watching {
            asked: VecDeque::new(),
            other: Arc::clone(&second.gone),
            was_gone: Arc::clone(&was_gone),
        };
        let gone = Arc::clone(&second.gone);
        assert!(pool.submit(Priority::Read, first).is_ok());
        assert!(pool.submit(Priority::Read, second).is_ok());
        let worker = Arc::clone(&pool.shared);
        assert!(std::thread::spawn(move || worker.run(Box::new(queue))).join().is_err());
        assert!(gone.load(Ordering::SeqCst) && !was_gone.load(Ordering::SeqCst));
    }

    #[test]
    fn a_read_does_not_wait_for_a_blocking_task_and_a_write_does() {
        let pool = pool(&Arc::default());
        let shared = &pool.shared;
        assert!(pool.run_blocking(Box::new(|| {})).is_ok());
        assert!(pool.submit(Priority::Write, Job::new(false)).is_ok());
        assert!(pool.submit(Priority::Read, Job::new(false)).is_ok());
        assert!(shared.take(Priority::Write).is_none());
        assert!(shared.take(Priority::Read).is_some());
        assert!(matches!(shared.find(), IdleWork::BlockingTask(_)));
        assert!(shared.take(Priority::Write).is_some());
    }

    /// One was cancelled before it was queued, two in the queue.
    #[test]
    fn cancelled_transfers_overtake_all_others() {
        let hint = Arc::new(AtomicBool::new(false));
        let pool = pool(&hint);
        let shared = &pool.shared;
        let is_called_off = || shared.take(Priority::Read).map(|job| job.is_called_off());
        let jobs = [0; 4].map(|_| Job::new(false));
        let [_, queued @ .., early] = jobs.each_ref().map(|job| Arc::clone(&job.called_off));
        early.store(true, Ordering::SeqCst);
        for job in jobs {
            assert!(pool.submit(Priority::Write, job).is_ok());
        }
        assert!(pool.submit(Priority::Read, Job::new(false)).is_ok());
        assert_eq!(is_called_off(), Some(true));
        queued.iter().for_each(|called_off| called_off.store(true, Ordering::SeqCst));
        hint.store(true, Ordering::SeqCst);
        let taken = [0; 4].map(|_| is_called_off());
        assert_eq!(taken, [Some(true), Some(true), Some(false), None]);
        assert!(shared.take(Priority::Write).is_some_and(|job| !job.is_called_off()));
        assert!(shared.take(Priority::Write).is_none());
    }
}
