//! How the kernel schedules our threads beside the trainer's.

/// A turn of a thread of ours: just longer than the longest turn the kernel gives by itself (2.8 ms),
/// because a thread with a shorter turn may run at once when it wakes.
const TURN_NS: u64 = 4_000_000;

/// Has the calling thread wait its turn when it wakes, instead of pushing whoever runs off the
/// processor, and leave it to others when they wake; its share of time stays the same. A copy of
/// megabytes takes milliseconds, which the trainer's thread that asked for it would otherwise wait
/// for whenever both are on one processor.
///
/// Only where nobody has chosen another policy. A kernel that refuses changes nothing, and one that
/// knows no turns (before 6.12) ignores theirs.
pub(crate) fn wait_our_turn() {
    let Some(mut attributes) = attributes() else { return };
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attributes.sched_policy = libc::SCHED_BATCH as u32;
    attributes.sched_runtime = TURN_NS;
    // SAFETY: 0 names the calling thread; the struct is ours, of the size it says.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// How the kernel schedules the calling thread, where it says.
fn attributes() -> Option<libc::sched_attr> {
    // SAFETY: plain data, for which zero is a value.
    let mut found: libc::sched_attr = unsafe { std::mem::zeroed() };
    let bytes = size_of_val(&found) as u32;
    // SAFETY: 0 names the calling thread; the struct is ours, of the size given.
    let code = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut found, bytes, 0) };
    (code == 0).then_some(found)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn policy() -> (i32, i32) {
        let found = attributes().unwrap();
        (found.sched_policy as i32, found.sched_nice)
    }

    #[test]
    fn our_threads_wait_their_turn_and_the_others_are_left_alone() {
        let before = policy();
        let ours = std::thread::spawn(|| (wait_our_turn(), policy()).1).join().unwrap();
        assert_eq!((ours, policy()), ((libc::SCHED_BATCH, before.1), before));
    }

    #[test]
    fn a_policy_that_somebody_chose_stays() {
        let chosen = || {
            let plain = libc::sched_param { sched_priority: 0 };
            // SAFETY: 0 names the calling thread; reads a struct of ours.
            let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const plain) };
            wait_our_turn();
            (set, policy().0)
        };
        assert_eq!(std::thread::spawn(chosen).join().unwrap(), (0, libc::SCHED_IDLE));
    }
}
