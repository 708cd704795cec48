//! A scheduler against jobs and a file that do as they like, in any order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;
use crate::IoMemory;

/// What a job did, by its number.
#[derive(Default)]
struct Log {
    answered: Vec<(usize, u32)>,
    finished: Vec<usize>,
}

/// Asks for `left` things, at most `burst` of them before an answer.
struct Job {
    number: usize,
    left: u32,
    burst: u32,
    unanswered: u32,
    log: Arc<Mutex<Log>>,
}

impl TransferJob for Job {
    fn next_request(&mut self) -> Option<(u32, Request)> {
        assert!(!self.is_over() || self.left == 0, "asked after its end");
        if self.left == 0 || self.unanswered >= self.burst {
            return None;
        }
        self.left -= 1;
        self.unanswered += 1;
        let memory = IoMemory::none();
        Some((
            self.left,
            Request { operation: IoOperation::Read, offset: self.number as u64, memory },
        ))
    }

    fn answer(&mut self, name: u32, _: io::Result<usize>) {
        self.unanswered -= 1;
        self.log.lock().unwrap().answered.push((self.number, name));
    }

    fn is_over(&self) -> bool {
        self.left == 0 && self.unanswered == 0
    }

    fn finish(self: Box<Self>) {
        assert!(self.is_over());
        self.log.lock().unwrap().finished.push(self.number);
    }
}

#[derive(Clone, Copy, Debug)]
struct Made {
    is_read: bool,
    requests: u32,
    burst: u32,
    /// After how many answers it comes.
    comes: usize,
}

fn made() -> impl Strategy<Value = Made> {
    (any::<bool>(), 0..9_u32, 1..6_u32, 0..20_usize)
        .prop_map(|(is_read, requests, burst, comes)| Made { is_read, requests, burst, comes })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn every_job_is_asked_answered_and_finished_once_and_reads_go_first(
        jobs in prop::collection::vec(made(), 1..14),
        depth in 1..9_usize,
        order in prop::collection::vec(any::<prop::sample::Index>(), 160),
    ) {
        let log = Arc::new(Mutex::new(Log::default()));
        let mut scheduler = IoScheduler::new(depth);
        let waiting: RefCell<[VecDeque<Box<dyn TransferJob>>; 2]> = RefCell::default();
        let slot = |priority| usize::from(priority == Priority::Write);
        let mut unanswered: Vec<u64> = Vec::new();
        let mut kinds = vec![Priority::Read; jobs.len()];
        let (mut answers, mut order) = (0, order.into_iter());
        let mut coming: Vec<_> = jobs.iter().copied().enumerate().collect();
        coming.sort_by_key(|(_, job)| job.comes);
        let mut coming = coming.into_iter().peekable();
        loop {
            while let Some((number, job)) = coming.next_if(|(_, job)| job.comes <= answers) {
                kinds[number] = if job.is_read { Priority::Read } else { Priority::Write };
                let Made { requests: left, burst, .. } = job;
                let job = Job { number, left, burst, unanswered: 0, log: Arc::clone(&log) };
                waiting.borrow_mut()[slot(kinds[number])].push_back(Box::new(job));
            }
            let next_step = scheduler.next_step(|priority| waiting.borrow_mut()[slot(priority)].pop_front());
            match next_step {
                SchedulerStep::Submit(token, request) => {
                    let kind = kinds[request.offset as usize];
                    unanswered.push(token);
                    prop_assert!(unanswered.len() <= depth);
                    prop_assert_eq!(scheduler.unanswered(), unanswered.len());
                    if kind == Priority::Write {
                        prop_assert!(waiting.borrow()[0].is_empty(), "a read waits for a write");
                        prop_assert!(scheduler.unanswered_writes <= share(IoOperation::Write, depth));
                    }
                }
                SchedulerStep::Finished(job) => job.finish(),
                SchedulerStep::Idle if !unanswered.is_empty() => {
                    let at = order.next().map_or(0, |index| index.index(unanswered.len()));
                    if let Some(job) = scheduler.answer(unanswered.swap_remove(at), Ok(0)) {
                        job.finish();
                    }
                    answers += 1;
                }
                SchedulerStep::Idle => {
                    // Nothing is left behind: what waits would have been taken.
                    prop_assert!(waiting.borrow().iter().all(VecDeque::is_empty));
                    if coming.peek().is_none() {
                        break;
                    }
                    answers += 1;
                }
            }
            prop_assert!(scheduler.slots.len() <= depth + share(IoOperation::Write, depth));
        }
        let mut log = std::mem::take(&mut *log.lock().unwrap());
        log.finished.sort_unstable();
        prop_assert_eq!(log.finished, (0..jobs.len()).collect::<Vec<_>>());
        log.answered.sort_unstable();
        let all = |(number, job): (usize, &Made)| (0..job.requests).map(move |name| (number, name));
        prop_assert_eq!(log.answered, jobs.iter().enumerate().flat_map(all).collect::<Vec<_>>());
    }
}
