//! Deadlock-free by rule: every interface, however full the device is, whatever copy is in flight, and
//! whatever lock the caller holds. `tests/deadlock/matrix.txt` says which cells there are.
//!
//! A call that may wait for copies of ours is given [`A_WHILE`], then the copy is let go; one that
//! may not has to return while it is held. Either way it ends as the table says, no byte is lost,
//! and somebody who needs the caller's lock to free memory has not come to it.

mod calls;
mod cells;
mod scene;
mod watch;

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dormouse_device::Device;

use self::calls::{Answer, CALLS, Call, Outcome};
use self::cells::{Caller, Cell, InFlight};
use self::scene::{Scene, Seam, fixture};
use self::watch::Watchdog;
use super::*;

/// Each region's.
const BYTES: usize = 64 << 10;
/// How long a call is left to return before what it may wait for is let go.
const A_WHILE: Duration = Duration::from_millis(4);
/// How long a call has that nothing is in the way of.
const DEADLINE: Duration = Duration::from_secs(6);
/// Limit on reported failures.
const WRONG_MAX: usize = 12;

const SUITE: &str =
    if matches!(ASLEEP_FIRST, RegionState::Host) { "engine-cuda" } else { "engine-host" };

/// A call on a thread of its own, which holds `lock` from before it until after.
struct Called {
    go: std::sync::mpsc::Sender<()>,
    answer: Receiver<Answer>,
}

fn caller(scene: &Arc<Scene>, run: fn(&Scene) -> Answer, lock: Option<Arc<Mutex<()>>>) -> Called {
    let (go, wait) = channel::<()>();
    let (tell, answer) = channel();
    let (ready, is_ready) = channel::<()>();
    let scene = Arc::clone(scene);
    std::thread::Builder::new()
        .name("caller".to_owned())
        .spawn(move || {
            let _held = lock.as_ref().map(|lock| lock.lock().unwrap());
            ready.send(()).unwrap();
            wait.recv().unwrap();
            let answer = run(&scene);
            drop(scene);
            // The harness has given up on a call that comes too late.
            let _ = tell.send(answer);
        })
        .unwrap();
    is_ready.recv().unwrap();
    Called { go, answer }
}

fn let_go(seam: Option<Seam>) {
    if let Some(seam) = seam {
        seam.let_go();
    }
}

/// Waits for the answer, letting the copy go where the call may wait for it.
fn await_answer(
    answer: &Receiver<Answer>,
    may_wait: bool,
    seam: &mut Option<Seam>,
) -> Result<Answer, String> {
    let patience = if may_wait && seam.is_some() { A_WHILE } else { DEADLINE };
    match answer.recv_timeout(patience) {
        Ok(answer) => return Ok(answer),
        Err(RecvTimeoutError::Disconnected) => return Err("panicked".to_owned()),
        Err(RecvTimeoutError::Timeout) if !may_wait => {
            return Err("waits for a copy, which it must not".to_owned());
        }
        Err(RecvTimeoutError::Timeout) => {}
    }
    let_go(seam.take());
    match answer.recv_timeout(DEADLINE) {
        Ok(answer) => Ok(answer),
        Err(RecvTimeoutError::Disconnected) => Err("panicked".to_owned()),
        Err(RecvTimeoutError::Timeout) => Err("waits though no copy is held".to_owned()),
    }
}

/// Runs one call of one cell.
fn run(cell: Cell, call: &Call, watchdog: &Watchdog) -> Result<(), String> {
    let fixture = fixture();
    watchdog.watch(format!("{SUITE} {cell:?}: {}", call.name));
    let scene = Arc::new(Scene::new(&fixture, cell.copy, call.name == "backward begin"));
    let lock = (cell.caller == Caller::Lock).then(|| Arc::new(Mutex::new(())));
    let mut seam = scene.hold(&fixture, cell.copy);
    let called = caller(&scene, call.run, lock.clone());
    let freer = lock.map(|lock| {
        scene.event_wait_behind(&fixture, &lock);
        let scene = Arc::clone(&scene);
        let free = move || {
            let _after_the_caller = lock.lock().unwrap();
            scene.engine.free(scene.others, 0).unwrap();
        };
        std::thread::spawn(free)
    });
    scene.tighten(cell.memory);
    let expected = (call.expected)(&scene, cell);
    called.go.send(()).unwrap();
    let answered = await_answer(&called.answer, call.may_wait, &mut seam);
    let answered = answered.map_err(|wrong| format!("{wrong}\n{}", watch::dump(&fixture)));
    if answered.is_err() {
        // Threads that are still inside hold handles of their own.
        let_go(seam.take());
        std::mem::forget(scene);
        return answered.map(drop);
    }
    let answer = answered?;
    // A free comes to its end with the copy held as well.
    if let Some(freer) = freer {
        soon("the other thread frees", || freer.is_finished());
        freer.join().unwrap();
    } else {
        scene.engine.free(scene.others, 0).unwrap();
    }
    let_go(seam.take());
    soon("the caller is gone", || Arc::strong_count(&scene) == 1);
    let scene = Arc::into_inner(scene).unwrap();
    scene.end(&fixture, &answer.freed, &answer.made);
    fixture.assert_empty();
    if answer.outcome == expected {
        Ok(())
    } else {
        Err(format!("{:?}, not {expected:?}", answer.outcome))
    }
}

/// Runs every call of every cell of an interface.
fn run_interface(interface: &str) {
    let watchdog = Watchdog::start();
    let calls: Vec<&Call> = CALLS.iter().filter(|call| call.interface == interface).collect();
    assert!(!calls.is_empty(), "{interface} has no calls");
    let mut wrong = Vec::new();
    let mut count = 0;
    let cells = cells::cells(SUITE, interface);
    assert!(!cells.is_empty() || cells::is_impossible(SUITE, interface), "nobody runs {interface}");
    for cell in cells {
        for call in &calls {
            count += 1;
            watchdog.rest();
            if let Err(how) = run(cell, call, &watchdog) {
                wrong.push(format!("{cell:?}: {} {how}", call.name));
            }
            assert!(wrong.len() < WRONG_MAX, "after {count} calls:\n{}", wrong.join("\n"));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} calls:\n{}", wrong.len(), wrong.join("\n"));
    println!("{SUITE}, {interface}: {count} calls");
}

#[test]
fn allocator() {
    run_interface("allocator");
}

#[test]
fn pool() {
    run_interface("pool");
}

#[test]
fn copy() {
    run_interface("copy");
}

#[test]
fn tags() {
    run_interface("tags");
}

#[test]
fn marks() {
    run_interface("marks");
}

#[test]
fn preload() {
    run_interface("preload");
}

#[test]
fn every_interface_has_a_test_here() {
    assert_eq!(cells::interfaces(), ["allocator", "pool", "copy", "tags", "marks", "preload"]);
}

/// How a thread of ours comes to make a call.
type Ours = fn(&Arc<Scene>, Box<dyn FnOnce() + Send>);

/// Whatever a thread of ours is made to do, it never waits: for a copy, for memory, or for work of
/// the trainer's.
#[test]
fn threads_of_ours_never_wait() {
    let watchdog = Watchdog::start();
    let on_an_io_thread: Ours = |scene, work| scene.engine.run_blocking(work);
    let on_a_streams_thread: Ours = |scene, work| {
        let device = scene.allocator.device();
        let stream = device.create_stream("ours").unwrap();
        device.callback(&stream, Box::new(move |_| work())).unwrap();
    };
    for (kind, ours) in [("I/O", on_an_io_thread), ("stream", on_a_streams_thread)] {
        for copy in [InFlight::Out, InFlight::In, InFlight::Write] {
            for call in CALLS {
                watchdog.rest();
                let fixture = fixture();
                watchdog.watch(format!("{SUITE} {kind} thread, {copy:?}: {}", call.name));
                never_waits(&fixture, copy, call, ours);
            }
        }
    }
}

fn never_waits(fixture: &Fixture, copy: InFlight, call: &'static Call, ours: Ours) {
    let scene = Arc::new(Scene::new(fixture, copy, call.name == "backward begin"));
    // The trainer's own stream is busy too, and what it has cached could be had after it.
    let busy = fixture.device().create_stream("trainer").unwrap();
    fixture.allocator.register_stream(9, busy.clone()).unwrap();
    let cached = fixture.allocator.allocate(&Request { stream: 9, ..Request::new(BYTES) }).unwrap();
    fixture.engine.free(cached.range.start, 9).unwrap();
    let trainer = fixture.hold(&busy);
    let seam = scene.hold(fixture, copy);
    // Not by a new budget: that trims, and trims wait.
    let held_bytes = fixture.allocator.stats().mapped_bytes.current;
    let rest = (16 << 20) - held_bytes as usize;
    let ballast = fixture.allocator.allocate(&Request::new(rest)).unwrap().range.start;
    let (tell, answer) = channel();
    let on_it = Arc::clone(&scene);
    ours(
        &scene,
        Box::new(move || {
            let answer = (call.run)(&on_it);
            drop(on_it);
            tell.send(answer).unwrap();
        }),
    );
    let answer = answer.recv_timeout(DEADLINE);
    let answer =
        answer.unwrap_or_else(|_| panic!("{}: waits\n{}", call.name, watch::dump(fixture)));
    trainer.let_go();
    let_go(seam);
    fixture.engine.free(ballast, 0).unwrap();
    fixture.engine.free(scene.others, 0).unwrap();
    soon("the thread is gone", || Arc::strong_count(&scene) == 1);
    Arc::into_inner(scene).unwrap().end(fixture, &answer.freed, &answer.made);
    fixture.finish(&busy);
    fixture.allocator.trim(u64::MAX);
    drop(busy);
    fixture.assert_empty();
    let is_refused = matches!(answer.outcome, Outcome::Refused | Outcome::OutOfMemory);
    assert!(is_refused || answer.outcome == Outcome::Done, "{}: {:?}", call.name, answer.outcome);
}
