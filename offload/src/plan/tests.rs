//! Plans of small steps against arithmetic done by hand.

use super::*;

/// A byte a nanosecond.
const GB: u64 = 1_000_000_000;

/// A prefix as a node plays it: forward, waves, backward.
struct Prefix {
    layers: usize,
    waves: usize,
    bytes: u64,
    forward_ns: u64,
    wave_ns: u64,
    backward_ns: u64,
    /// In A and C, in B.
    room: [u64; 2],
}

impl Prefix {
    fn work(&self) -> Work {
        let &Self { layers, waves, .. } = self;
        let op = |compute_ns, room_bytes| Operation { compute_ns, room_bytes };
        let mut operations = vec![op(self.forward_ns, self.room[0]); layers];
        operations.extend(vec![op(self.wave_ns, self.room[1]); waves]);
        operations.extend(vec![op(self.backward_ns, self.room[0]); layers]);
        let top = layers - 1;
        let backward = |layer: usize| layers + waves + top - layer;
        let groups = (0..layers).map(|layer| Group {
            bytes: self.bytes,
            made: layer,
            leaves: (layer + 1).min(top),
            needed: backward((layer + 1).min(top)),
            freed: backward(layer),
        });
        Work {
            operations,
            groups: groups.collect(),
            links: Links {
                out_bytes_per_s: GB,
                in_bytes_per_s: GB,
                write_bytes_per_s: GB,
                read_bytes_per_s: GB,
            },
            host_bytes: 1 << 40,
            nvme_bytes: 1 << 40,
            is_direct: false,
        }
    }
}

const SMALL: Prefix = Prefix {
    layers: 4,
    waves: 2,
    bytes: 10,
    forward_ns: 10,
    wave_ns: 100,
    backward_ns: 20,
    room: [40, 40],
};

#[test]
fn where_all_fits_nothing_sleeps() {
    let (plan, outcome) = choose(&SMALL.work()).unwrap();
    assert_eq!(plan.choices, vec![Choice::Keep; 4]);
    assert_eq!(outcome, Outcome { total_ns: 40 + 200 + 80, ..Outcome::default() });
}

#[test]
fn what_is_needed_last_sleeps_and_wakes_late() {
    // Two layers' room in B: the two lowest sleep. Layer 1 is needed when layer 2's backward
    // begins, 20 after C has begun; room for it is there from C on, when B's own memory has gone.
    let work = Prefix { room: [40, 20], ..SMALL }.work();
    let (plan, outcome) = choose(&work).unwrap();
    use Choice::{Host, Keep};
    assert_eq!(plan.choices, [Host, Host, Keep, Keep]);
    assert_eq!(outcome.stall_ns, 0);
    assert_eq!(outcome.slept_bytes, 20);
    assert_eq!(plan.wake_from, 6, "C's first backward of 20 hides the copy of layer 1");
}

#[test]
fn the_lead_a_slow_link_needs_is_taken_from_the_waves() {
    // Room for all, but asleep by order: 30 of 10 ns each must be back 20 apart.
    let mut work = SMALL.work();
    work.links.in_bytes_per_s = GB / 10; // 100 a layer
    for op in &mut work.operations[4..6] {
        op.room_bytes = 10;
    }
    // The last wave has room for three.
    work.operations[5].room_bytes = 30;
    let (plan, outcome) = choose(&work).unwrap();
    // 3 asleep. Wakes begin with the last wave (100): layer 2 is there as C begins, layer 1
    // 100 later, where it is needed after 20; layer 0 another 100 later, after 40 of compute.
    assert_eq!(plan.choices[3], Choice::Keep);
    assert_eq!(plan.wake_from, 5);
    // And B's first wave waits for the copy out of layer 2.
    assert_eq!(outcome.stall_ns, 80 + 80 + 10);
}

#[test]
fn a_small_host_sends_what_is_needed_last_to_the_file() {
    let work = Work { host_bytes: 20, ..Prefix { room: [40, 10], ..SMALL }.work() };
    let (plan, outcome) = choose(&work).unwrap();
    use Choice::{Host, Keep, Nvme};
    assert_eq!(plan.choices, [Nvme, Host, Host, Keep]);
    assert_eq!(outcome.written_bytes, 10);
    // B waits for layer 2's copy out, and C for its copy in: there is no room for it before.
    assert_eq!(outcome.stall_ns, 10 + 10);
}

#[test]
fn no_room_at_all_is_said() {
    let mut work = SMALL.work();
    work.operations[0].room_bytes = 9;
    assert_eq!(choose(&work), None);
    // Nor without a link out.
    let mut work = Prefix { room: [40, 20], ..SMALL }.work();
    work.links.out_bytes_per_s = 0;
    assert_eq!(choose(&work), None);
}
