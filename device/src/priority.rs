//! Scheduling of the runtime's threads relative to the trainer's.

/// Time slice of the runtime's threads: just longer than the kernel's longest default slice (2.8 ms),
/// because a thread with a shorter slice may preempt others when it wakes.
const SLICE_NS: u64 = 4_000_000;

/// Applies `SCHED_BATCH` to the calling thread: when it wakes it does not preempt other threads, and
/// they preempt it; its share of time stays the same. Otherwise a trainer's thread on the same
/// processor could wait milliseconds.
///
/// Threads with another policy than the default are not changed. Errors are ignored; kernels before
/// 6.12 ignore the time slice.
pub(crate) fn use_batch_policy() {
    let Some(mut attributes) = attributes() else { return };
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attributes.sched_policy = libc::SCHED_BATCH as u32;
    attributes.sched_runtime = SLICE_NS;
    // SAFETY: 0 names the calling thread; the struct is ours, of the size it says.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

/// Returns the scheduling attributes of the calling thread.
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
    fn batch_policy_applies_to_the_calling_thread_only() {
        let before = policy();
        let ours = std::thread::spawn(|| (use_batch_policy(), policy()).1).join().unwrap();
        assert_eq!((ours, policy()), ((libc::SCHED_BATCH, before.1), before));
    }

    #[test]
    fn other_policies_are_not_changed() {
        let chosen = || {
            let plain = libc::sched_param { sched_priority: 0 };
            // SAFETY: 0 names the calling thread; reads a struct of ours.
            let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const plain) };
            use_batch_policy();
            (set, policy().0)
        };
        assert_eq!(std::thread::spawn(chosen).join().unwrap(), (0, libc::SCHED_IDLE));
    }
}
