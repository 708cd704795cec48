//! A queue whose requests meet the faults of their file, and whose answers come in no order.

use std::collections::{HashMap, VecDeque};

use super::random::Random;
use super::{Fate, Faults, Mishap};
use crate::sync::lock;
use crate::{Answer, Queue, Request};

/// A queue with the faults of its file. An answer is given out once all that were asked for have
/// come, and then any of them.
#[derive(Debug)]
pub(super) struct FaultyQueue {
    inner: Box<dyn Queue>,
    depth: usize,
    faults: Faults,
    random: Random,
    asked: VecDeque<(u64, Request)>,
    started: HashMap<u64, Fate>,
    ready: Vec<Answer>,
}

impl FaultyQueue {
    pub(super) fn new(inner: Box<dyn Queue>, depth: usize, faults: Faults, seed: u64) -> Self {
        let random = Random::new(seed * 7919 + 3);
        let (asked, started, ready) = (VecDeque::new(), HashMap::new(), Vec::new());
        Self { inner, depth, faults, random, asked, started, ready }
    }

    fn start(&mut self, token: u64, request: &Request) {
        let fate = match self.faults.decide(request) {
            Ok(fate) => fate,
            Err(e) => return self.ready.push(Answer { token, result: Err(e) }),
        };
        let Some(request) = fate.of(request) else {
            return self.ready.push(Answer { token, result: Ok(fate.told) });
        };
        self.faults.before(&fate);
        assert!(self.started.insert(token, fate).is_none(), "{token:#x} was asked twice");
        self.inner.push(token, request);
    }

    fn gather(&mut self) {
        while let Some(answer) = self.inner.wait() {
            let fate = self.started.remove(&answer.token).unwrap();
            self.faults.after(&fate);
            let told = |n: usize| if n == fate.done { fate.told } else { n.min(fate.told) };
            let Answer { token, result } = answer;
            self.ready.push(Answer { token, result: result.map(told) });
        }
    }
}

impl Queue for FaultyQueue {
    fn depth(&self) -> usize {
        self.depth
    }

    fn push(&mut self, token: u64, request: Request) {
        self.asked.push_back((token, request));
        let unanswered = self.asked.len() + self.started.len() + self.ready.len();
        assert!(unanswered <= self.depth(), "{unanswered} unanswered");
    }

    fn wait(&mut self) -> Option<Answer> {
        loop {
            for (token, request) in std::mem::take(&mut self.asked) {
                let is_held = lock(&self.faults.plan.0).holds(request.operation);
                if is_held {
                    self.asked.push_back((token, request));
                } else {
                    self.start(token, &request);
                }
            }
            self.gather();
            if !self.ready.is_empty() {
                let at = self.random.below(self.ready.len() as u64) as usize;
                if at > 0 {
                    lock(&self.faults.plan.0).befell(Mishap::OutOfOrder);
                }
                return Some(self.ready.swap_remove(at));
            }
            let (_, held) = self.asked.front()?;
            self.faults.wait_for_turn(held.operation);
        }
    }
}
