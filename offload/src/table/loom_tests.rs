//! Loom: the table and its executors under every interleaving, with toy resources.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p dormouse-offload --lib loom`

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;

use super::*;
use dormouse_residency::region::{CopyState, PageState, RegionState, SleepGoal};

struct Toy {
    is_cancelled: AtomicBool,
}

impl Payload for Toy {
    type Shared = ();

    fn cancel(&self, (): &()) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    fn moved(&mut self, _: RegionId, _before: &Region, _after: &Region, (): &mut ()) {}
}

/// Transfers that wait for the I/O thread.
#[derive(Default)]
struct Mail {
    steps: Vec<RegionStep>,
    /// Wakes that have begun, whose executor the I/O thread becomes.
    begun: Vec<Actions>,
    is_closed: bool,
}

struct Fixture {
    table: Table<Toy>,
    mail: Mutex<Mail>,
    came: Condvar,
    /// T1: a thread is executing.
    acting: AtomicBool,
    extents: AtomicUsize,
    finished: AtomicUsize,
}

impl Executor for Fixture {
    fn at_once(&self, id: RegionId, action: Action) {
        assert!(!self.acting.swap(true, Ordering::AcqRel), "T1: two executors");
        match action {
            Action::ReleaseExtent => {
                assert_eq!(self.extents.fetch_sub(1, Ordering::AcqRel), 1, "released twice");
            }
            Action::Finish => {
                self.finished.fetch_add(1, Ordering::AcqRel);
            }
            _ => {}
        }
        self.acting.store(false, Ordering::Release);
        if action == Action::Finish {
            self.table.remove(id);
        }
    }

    fn launch(&self, _id: RegionId, step: RegionStep) -> Launched {
        match step {
            RegionStep::Write | RegionStep::Read => {
                lock(&self.mail).steps.push(step);
                self.came.notify_one();
                Launched::InFlight
            }
            _ => Launched::Over(StepOutcome::Ok),
        }
    }
}

impl Fixture {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            table: Table::new(()),
            mail: Mutex::new(Mail::default()),
            came: Condvar::new(),
            acting: AtomicBool::new(false),
            extents: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
        })
    }

    fn insert(&self, region: Region) -> RegionId {
        let toy = Toy { is_cancelled: AtomicBool::new(false) };
        let id = self.table.lock().insert(region, toy).unwrap();
        assert_eq!(self.table.executed(id), None);
        id
    }

    fn region(&self) -> RegionId {
        self.insert(Region::awake(true))
    }

    fn request(&self, id: RegionId, input: Input) {
        if let Some(actions) = self.table.feed(id, input).actions() {
            self.table.execute(id, actions, self);
        }
    }

    /// A region that is asleep in its extent.
    fn asleep(&self) -> RegionId {
        let (state, pages, extent) = (RegionState::Nvme, PageState::Away, CopyState::Valid);
        self.extents.fetch_add(1, Ordering::AcqRel);
        self.insert(Region { state, pages, extent, ..Region::awake(true) })
    }

    /// Begins a wake, and leaves it to the I/O thread to execute.
    fn wake_ahead(&self, id: RegionId) {
        if let Some(actions) = self.table.feed(id, Input::Wake).actions() {
            lock(&self.mail).begun.push(actions);
            self.came.notify_one();
        }
    }

    fn sleep(&self, id: RegionId) {
        self.extents.fetch_add(1, Ordering::AcqRel);
        self.request(id, Input::Admit { goal: SleepGoal::Nvme, ticket: None });
        self.request(id, Input::Sleep); // refused if it was withdrawn by a wake or a drop
    }

    /// The I/O thread: completes what comes until it is told to stop.
    fn serve(&self, id: RegionId) {
        let mut mail = lock(&self.mail);
        loop {
            if let Some(actions) = mail.begun.pop() {
                drop(mail);
                self.table.execute(id, actions, self);
                mail = lock(&self.mail);
            } else if mail.steps.pop().is_some() {
                drop(mail);
                let cancelled = self
                    .table
                    .with(id, |e| e.data.is_cancelled.swap(false, Ordering::Relaxed))
                    .unwrap_or(false);
                let outcome = if cancelled { StepOutcome::Cancelled } else { StepOutcome::Ok };
                self.request(id, Input::Done(outcome));
                mail = lock(&self.mail);
            } else if mail.is_closed {
                return;
            } else {
                mail = wait(&self.came, mail);
            }
        }
    }

    fn close(&self) {
        lock(&self.mail).is_closed = true;
        self.came.notify_all();
    }

    fn wait_awake(&self, id: RegionId) {
        let waited = self.table.wait_for(|inner| match inner.get(id) {
            None => Some(()),
            Some(e) => (e.is_idle() && e.region.state == RegionState::Awake).then_some(()),
        });
        assert_eq!(waited, Ok(()));
    }

    fn wait_gone(&self, id: RegionId) {
        let waited = self.table.wait_for(|inner| inner.get(id).is_none().then_some(()));
        assert_eq!(waited, Ok(()));
    }
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(2);
    builder.check(f);
}

#[test]
fn loom_a_wake_during_a_sleep_always_ends_awake() {
    model(|| {
        let fixture = Fixture::new();
        let id = fixture.region();
        let (io, sleeper) = (Arc::clone(&fixture), Arc::clone(&fixture));
        let io = thread::spawn(move || io.serve(id));
        let sleeper = thread::spawn(move || sleeper.sleep(id));
        fixture.request(id, Input::Wake);
        sleeper.join().unwrap();
        // Whether it came before or after the sleep: this one comes after.
        fixture.request(id, Input::Wake);
        fixture.wait_awake(id);
        assert_eq!(fixture.extents.load(Ordering::Acquire), 0);
        fixture.close();
        io.join().unwrap();
    });
}

#[test]
fn loom_a_wake_ahead_is_the_wake_that_others_wait_for() {
    model(|| {
        let fixture = Fixture::new();
        let id = fixture.asleep();
        let (io, waiter) = (Arc::clone(&fixture), Arc::clone(&fixture));
        let io = thread::spawn(move || io.serve(id));
        let waiter = thread::spawn(move || {
            waiter.request(id, Input::Wake);
            waiter.wait_awake(id);
        });
        fixture.wake_ahead(id);
        fixture.wait_awake(id);
        waiter.join().unwrap();
        assert_eq!(fixture.extents.load(Ordering::Acquire), 0);
        fixture.close();
        io.join().unwrap();
    });
}

#[test]
fn loom_a_drop_racing_a_wake_ahead_finishes_once() {
    model(|| {
        let fixture = Fixture::new();
        let id = fixture.asleep();
        let (io, dropper) = (Arc::clone(&fixture), Arc::clone(&fixture));
        let io = thread::spawn(move || io.serve(id));
        let dropper = thread::spawn(move || dropper.request(id, Input::Drop));
        fixture.wake_ahead(id);
        fixture.wait_gone(id);
        dropper.join().unwrap();
        fixture.close();
        io.join().unwrap();
        assert_eq!(fixture.finished.load(Ordering::Acquire), 1);
        assert_eq!(fixture.extents.load(Ordering::Acquire), 0);
    });
}

#[test]
fn loom_a_drop_racing_a_wake_and_a_completion_always_finishes_once() {
    model(|| {
        let fixture = Fixture::new();
        let id = fixture.region();
        fixture.sleep(id);
        let (io, dropper) = (Arc::clone(&fixture), Arc::clone(&fixture));
        let io = thread::spawn(move || io.serve(id));
        let dropper = thread::spawn(move || dropper.request(id, Input::Drop));
        fixture.request(id, Input::Wake);
        fixture.wait_awake(id); // a freed region counts as done
        fixture.wait_gone(id);
        dropper.join().unwrap();
        fixture.close();
        io.join().unwrap();
        assert_eq!(fixture.finished.load(Ordering::Acquire), 1);
        assert_eq!(fixture.extents.load(Ordering::Acquire), 0);
    });
}

#[test]
fn loom_a_drop_while_a_region_is_being_set_up_waits_for_that() {
    model(|| {
        let fixture = Fixture::new();
        let toy = Toy { is_cancelled: AtomicBool::new(false) };
        let id = fixture.table.lock().insert(Region::awake(true), toy).unwrap();
        let dropper = Arc::clone(&fixture);
        let dropper = thread::spawn(move || dropper.request(id, Input::Drop));
        let is_there = fixture.table.with(id, |_| ()).is_some();
        assert!(is_there, "T2: a drop took effect under its executor");
        if let Some(actions) = fixture.table.executed(id) {
            fixture.table.execute(id, actions, &*fixture);
        }
        fixture.wait_gone(id);
        dropper.join().unwrap();
        assert_eq!(fixture.finished.load(Ordering::Acquire), 1);
    });
}
