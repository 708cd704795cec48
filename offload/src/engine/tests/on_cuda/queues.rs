//! The queue that reports a stream's progress is full. A free does not wait for room in it.

use dormouse_device::{Device, QUEUE_LEN_MAX};

use super::arrivals::{put_to_sleep, wake_late};
use super::both::{Fixture, Plan};
use crate::engine::tests::Held;
use crate::engine::transfers::CopyStream;
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;

const UNIT_BYTES: usize = 4096;

/// Leaves room for `rest` callbacks of the stream of that direction; none of them runs.
fn fill_queue(fixture: &Fixture, way: CopyStream, rest: usize) -> Held {
    let (device, stream) = (fixture.device(), fixture.engine.stream(way).unwrap());
    let held = Held::by(|until| device.callback(&stream, Box::new(move |_| until())).unwrap());
    for _ in rest..QUEUE_LEN_MAX {
        device.callback(&stream, Box::new(|_| {})).unwrap();
    }
    held
}

fn sleep(fixture: &Fixture, id: RegionId) {
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
}

#[test]
fn a_free_during_a_copy_in_does_not_wait_for_its_callback() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(UNIT_BYTES, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    // Of the copy in there is something to be told twice: for figures, and for the host copy.
    let telling = fill_queue(&fixture, CopyStream::In, 2);
    let copying = wake_late(&fixture, &[id]);
    fixture.engine.free(address, 0).unwrap();
    assert!(fixture.engine.region_info(id).is_ok(), "its pages stay under the copy");
    copying.let_go();
    telling.let_go();
    fixture.assert_empty();
}

#[test]
fn a_free_that_lets_another_sleep_begin_does_not_wait_for_that() {
    let mut plan = Plan::default();
    plan.config.inflight_bytes_max = 2 * UNIT_BYTES as u64;
    let fixture = plan.build();
    let [first, large, next] = [1, 2, 1].map(|units| fixture.region(units * UNIT_BYTES, 1));
    let telling = fill_queue(&fixture, CopyStream::Out, 1);
    sleep(&fixture, first.0);
    sleep(&fixture, large.0);
    sleep(&fixture, next.0);
    assert_eq!(fixture.engine.stats().queued_bytes, 3 * UNIT_BYTES as u64);
    fixture.engine.free(large.1, 0).unwrap();
    telling.let_go();
    fixture.engine.wait_settled(&[next.0]).unwrap();
    assert_eq!(fixture.state(next.0), RegionState::Host, "its turn came");
    fixture.engine.free(first.1, 0).unwrap();
    fixture.engine.free(next.1, 0).unwrap();
    fixture.assert_empty();
}
