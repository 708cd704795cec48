//! The rescue channel under every interleaving of a few threads.
//!
//! The file is compiled a second time here, over loom's atomics. A wait on a word is a wait for a
//! notification, which comes when the word has changed, and sometimes without a reason.
#![allow(dead_code, unreachable_pub, reason = "the copy is used in part")]

#[path = "channel.rs"]
mod channel;
#[path = "protocol.rs"]
mod protocol;
#[path = "table.rs"]
mod table;
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub(super) use loom::thread::yield_now;
}

use loom::sync::{Arc, Notify};
use loom::thread;

use channel::{Answer, Channel, Posting, REASON_BYTES_MAX, RescueSlot, Stray};
use protocol::Access;
use sync::{AtomicU32, AtomicU64, AtomicUsize};

/// How a poster ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Awake,
    Failed,
    Closed,
    Left,
    Full,
}

/// The channel, and what stands for the waits on its words.
struct World<const N: usize> {
    channel: Channel<N>,
    bell: Notify,
    /// By thread number.
    answered: [Notify; 4],
}

impl<const N: usize> World<N> {
    fn new() -> Arc<Self> {
        let channel = Channel {
            slots: std::array::from_fn(|_| RescueSlot {
                state: AtomicU32::new(0),
                access: AtomicU32::new(0),
                thread: AtomicU32::new(0),
                address: AtomicUsize::new(0),
                reason: std::array::from_fn(|_| AtomicU64::new(0)),
            }),
            bell: AtomicU32::new(0),
        };
        channel.open();
        let answered = std::array::from_fn(|_| Notify::new());
        Arc::new(Self { channel, bell: Notify::new(), answered })
    }

    /// Posts and waits; with `is_hasty`, for one look only.
    fn request(&self, number: usize, is_hasty: bool) -> End {
        let index = match self.channel.post(&stray(number)) {
            Posting::Posted(index) => index,
            Posting::Closed => return End::Closed,
            Posting::Full => return End::Full,
        };
        self.bell.notify();
        loop {
            if let Some(answer) = self.channel.collect(index) {
                return end(number, answer);
            }
            if is_hasty {
                return self.channel.leave(index).map_or(End::Left, |answer| end(number, answer));
            }
            self.answered[number].wait();
        }
    }

    /// Serves until the channel is closed.
    fn serve(&self) {
        loop {
            let heard = self.channel.heard();
            let mut is_idle = true;
            for (index, seen) in self.channel.take_all() {
                let number = seen.thread as usize;
                assert_eq!(seen, stray(number), "half filled");
                if self.channel.answer(index, &right_answer(&seen)) {
                    self.answered[number].notify();
                }
                is_idle = false;
            }
            if is_idle && Channel::<N>::is_end(heard) {
                return;
            }
            if is_idle {
                self.bell.wait();
            }
        }
    }

    /// Serves until `count` requests are answered, the last one first: all are taken before any is answered.
    fn serve_together(&self, count: usize) {
        let mut kept = Vec::new();
        while kept.len() < count {
            let before = kept.len();
            kept.extend(self.channel.take_all());
            if kept.len() == before {
                self.bell.wait();
            }
        }
        for (index, seen) in kept.into_iter().rev() {
            let number = seen.thread as usize;
            assert_eq!(seen, stray(number), "half filled");
            if self.channel.answer(index, &right_answer(&seen)) {
                self.answered[number].notify();
            }
        }
    }

    fn close(&self) {
        self.channel.close();
        self.bell.notify();
    }

    /// Every slot is free: all can be posted, and none was lost.
    fn assert_free(&self) {
        let channel = &self.channel;
        assert_eq!(channel.take_all().count(), 0, "a request without a poster");
        channel.open();
        for _ in 0..N {
            assert!(matches!(channel.post(&stray(0)), Posting::Posted(_)), "a slot was lost");
        }
        assert_eq!(channel.post(&stray(0)), Posting::Full);
    }
}

/// The request of thread `number`: each field tells whose it is.
fn stray(number: usize) -> Stray {
    Stray { address: number << 12, access: Access::Write, thread: number as u32 }
}

/// The answer to `stray`: even threads wake, and the reason of the others tells whose it is.
fn right_answer(stray: &Stray) -> Answer {
    if stray.thread % 2 == 0 {
        Answer::Awake
    } else {
        Answer::Failed([stray.thread as u8; REASON_BYTES_MAX])
    }
}

fn end(number: usize, answer: Answer) -> End {
    assert_eq!(answer, right_answer(&stray(number)), "the answer to another request");
    if answer == Answer::Awake { End::Awake } else { End::Failed }
}

/// A listener and these posters: (thread number, whether it is hasty).
fn check<const N: usize>(bound: usize, posters: &'static [(usize, bool)], allowed: &'static [End]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(bound);
    model.check(move || {
        let world = World::<N>::new();
        let listener = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.serve())
        };
        let ends: Vec<_> = posters
            .iter()
            .map(|&(number, is_hasty)| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.request(number, is_hasty))
            })
            .collect();
        for ended in ends {
            let ended = ended.join().unwrap();
            assert!(allowed.contains(&ended), "{ended:?}");
        }
        world.close();
        listener.join().unwrap();
        world.assert_free();
    });
}

#[test]
fn loom_every_post_has_its_own_answer() {
    check::<2>(1, &[(1, false), (2, false)], &[End::Awake, End::Failed]);
}

#[test]
fn loom_a_slot_has_one_poster() {
    check::<1>(1, &[(1, false), (3, false)], &[End::Failed, End::Full]);
}

#[test]
fn loom_a_poster_that_leaves_frees_its_slot_once() {
    check::<1>(3, &[(1, true)], &[End::Failed, End::Left]);
    check::<1>(1, &[(1, true), (2, false)], &[End::Awake, End::Failed, End::Left, End::Full]);
}

/// The end of listening and a post: the poster is answered or learns that nobody listens.
#[test]
fn loom_a_post_is_not_lost_when_listening_ends() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let world = World::<1>::new();
        let threads = [World::serve, World::close].map(|part| {
            let world = Arc::clone(&world);
            thread::spawn(move || part(&world))
        });
        let ended = world.request(2, false);
        assert!(matches!(ended, End::Awake | End::Closed), "{ended:?}");
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        world.assert_free();
    });
}

/// A request is taken while another is unanswered.
#[test]
fn loom_requests_are_taken_while_others_wait() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(1);
    model.check(|| {
        let world = World::<2>::new();
        let posters = [1, 2].map(|number| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.request(number, false))
        });
        world.serve_together(2);
        for (poster, expected) in posters.into_iter().zip([End::Failed, End::Awake]) {
            assert_eq!(poster.join().unwrap(), expected);
        }
        world.assert_free();
    });
}
