//! What every device must do, written once against the trait.
//!
//! Each case makes a device of its own and panics with what it saw. Bytes are read and written
//! through copies on a stream, for a device's memory need not be the CPU's; the few cases that
//! need it to be (a thread's own touch) run where the device is not stream-ordered.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a case of a suite fails by panicking, like a test"
)]

mod bench;
mod pages;
mod readers;
mod spans;
mod streams;
mod wrong;

use crate::Hold;
use bench::Bench;

/// Runs every case, in a fixed order, each on a device that `make` makes.
///
/// `make`'s devices have a capacity of 16 to 1024 whole pages, and a space of at least twice that.
/// On the host device the guard must be installed.
///
/// # Panics
/// At the first case that fails.
pub fn run<D: Hold>(make: &dyn Fn() -> D) {
    for case in [
        pages::mapped_pages_are_zeroed_and_keep_bytes,
        pages::unmapped_bytes_are_gone,
        pages::counts_follow,
        pages::large_pages_hold_bytes_and_leave_whole,
        pages::capacity_is_never_passed,
        pages::pinned_memory_serves_copies,
        wrong::bad_ranges_are_refused,
        wrong::pages_in_a_wrong_state_are_refused,
        wrong::spans_in_a_wrong_state_are_refused,
        wrong::ids_that_never_were_are_refused,
        spans::bytes_survive_a_sleep,
        spans::a_frozen_span_can_be_read_and_thawed,
        spans::neighbours_are_left_alone,
        spans::staged_bytes_show_only_when_published,
        spans::a_wake_to_large_pages_keeps_bytes,
        spans::a_forgotten_span_is_unmapped,
        spans::a_stage_past_the_capacity_is_refused,
        streams::work_runs_in_order,
        streams::an_event_completes_when_reached,
        streams::streams_wait_for_each_other,
        streams::the_null_stream_takes_part,
        streams::more_work_than_a_queue_holds_is_done,
        streams::a_dropped_stream_finishes_its_work,
    ] {
        case(&Bench::new(make()));
    }
    if !make().is_stream_ordered() {
        spans::a_write_to_a_frozen_span_cancels_the_sleep(&Bench::new(make()));
        readers::never_see_foreign_bytes(&Bench::new(make()));
    }
    pages::threads_share_a_device(make);
    wrong::spans_of_another_device_are_refused(&Bench::new(make()), &Bench::new(make()));
}
