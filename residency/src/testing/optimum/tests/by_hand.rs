//! Cases with their arithmetic.

use super::*;

#[track_caller]
fn assert_takes(work: &StepWork, total_ns: u64) {
    assert_eq!(optimum(work, None, STATES_MAX), Optimum::Exact(total_ns));
    assert!(lower_bound(work) <= total_ns);
}

#[test]
fn there_and_back() {
    // Made 0..10, out 10..14, the operation without room 14..19, in 19..23, consumed 23..26.
    let work = at_one_byte_a_ns(&[op(10, 4), op(5, 0), op(3, 4)], &[group(4, [0, 0, 2, 2])]);
    assert_takes(&work, 26);
    assert_eq!(lower_bound(&work), 26);
    // With one byte of room it must leave whole all the same; with four it stays.
    let mut roomier = work.clone();
    roomier.operations[1].room_bytes = 1;
    assert_takes(&roomier, 26);
    assert_eq!(lower_bound(&roomier), 26);
    roomier.operations[1].room_bytes = 4;
    assert_takes(&roomier, 18);
    // No way out, no way back, nowhere to lie, no room to come back to.
    for at in 0..4 {
        let mut never = work.clone();
        match at {
            0 => never.links.device_to_host_bytes_per_s = 0,
            1 => never.links.host_to_device_bytes_per_s = 0,
            2 => never.host_bytes = 3,
            _ => never.operations[2].room_bytes = 3,
        }
        assert_eq!(optimum(&never, None, STATES_MAX), Optimum::Never, "{never:?}");
    }
}

#[test]
fn the_bound_knows_that_groups_are_whole() {
    // Of two groups of 4 bytes both must leave where there is room for 3: out 10..18, operation 1
    // runs 18..23, in 23..31.
    let pair = [group(4, [0, 0, 2, 2]); 2];
    let work = at_one_byte_a_ns(&[op(10, 8), op(5, 3), op(3, 8)], &pair);
    assert_eq!(lower_bound(&work), 34);
    assert_takes(&work, 34);
    // Of three, host memory of 7 holds one. The first is out at 14, two are written by 14 + 16,
    // operation 1 runs 30..35, two are read by 43 and the last of them is in at 47.
    let three = [group(4, [0, 0, 2, 2]); 3];
    let mut work = at_one_byte_a_ns(&[op(10, 12), op(5, 3), op(3, 12)], &three);
    (work.host_bytes, work.nvme_bytes) = (7, 12);
    set_rates(&mut work, [GB, GB, GB / 2, GB]);
    assert_eq!(lower_bound(&work), 50);
}

#[test]
fn one_may_leave_slowly_and_another_pass_it() {
    // A (50) is written 1..51 for operation 3, which has no room. StepOperation 2 has room for all but
    // B (10), which may leave once 1 has run, out 2..3; 2 runs 3..43, 3 runs 51..52. A is read
    // 52..102, and operation 4 runs to 103.
    let operations = [op(1, 60), op(1, 60), op(40, 50), op(1, 0), op(1, 60)];
    let groups = [group(50, [0, 0, 4, 4]), group(10, [0, 1, 4, 4])];
    let mut work = at_one_byte_a_ns(&operations, &groups);
    (work.host_bytes, work.nvme_bytes, work.is_direct) = (10, 50, true);
    set_rates(&mut work, [10 * GB, 10 * GB, GB, GB]);
    assert_takes(&work, 103);
}

#[test]
fn through_the_file_and_past_it() {
    // a and b of 4 bytes, host memory for one. a is out 2..6 and written 6..10, then b is out
    // 10..14; the operation without room runs 14..15. b in 15..19 and consumed 19..20; a is read
    // 19..23, in 23..27, consumed 27..28.
    let operations = [op(2, 8), op(2, 8), op(1, 0), op(1, 8), op(1, 8)];
    let groups = [group(4, [0, 0, 4, 4]), group(4, [1, 1, 3, 3])];
    let mut work = at_one_byte_a_ns(&operations, &groups);
    (work.host_bytes, work.nvme_bytes) = (4, 4);
    assert_takes(&work, 28);
    // Host memory for both: b out 6..10 as soon as the link is free... after a, 2..6. Then 10..11,
    // b in 11..15, consumed 15..16; a in 15..19, consumed 19..20.
    work.host_bytes = 8;
    assert_takes(&work, 20);
    // The file on its own links: a 2..6 into it, b 4..8 to host memory. Then 8..9, both back
    // 9..13, consumed 13..15.
    (work.host_bytes, work.is_direct) = (4, true);
    assert_takes(&work, 15);
}

#[test]
fn an_operation_may_better_wait() {
    // G (10 bytes) must leave for operation 1, out 1..2; X (20) may leave from then, 2..4.
    // StepOperation 2 makes M (5): begun at 2 it would keep G, 10 ns of copy, out until X is out. So
    // G is in 2..12, operation 2 runs 4..5, 3 runs 12..13, X comes in 13..33 and 4 runs to 34.
    let operations = [op(1, 30), op(0, 20), op(1, 30), op(1, 15), op(1, 35)];
    let groups = [group(10, [0, 0, 3, 3]), group(20, [0, 1, 4, 4]), group(5, [2, 3, 4, 4])];
    let mut work = at_one_byte_a_ns(&operations, &groups);
    work.links.device_to_host_bytes_per_s = 10 * GB;
    assert_takes(&work, 34);
    // Where it makes nothing there is no need to wait, and no harm.
    work.groups[2].bytes = 0;
    assert_takes(&work, 34);
}

#[test]
fn an_operation_may_better_run_late() {
    // G (10) leaves 1..2, X (20) 2..4 and Y (20) 4..6, for the room of operations 1, 2 and 3.
    // Under the 40 bytes of operation 2, G can come in from 4 on, under the 25 of operation 3 not
    // before Y is out. So operation 2 ends at 4, not at 3; G is in 4..14, operation 3 runs 14..15,
    // X and Y come in 15..55 and operation 4 runs to 56.
    let operations = [op(1, 50), op(0, 40), op(1, 40), op(1, 25), op(1, 40)];
    let groups = [group(10, [0, 0, 3, 3]), group(20, [0, 1, 4, 4]), group(20, [0, 1, 4, 4])];
    let mut work = at_one_byte_a_ns(&operations, &groups);
    work.links.device_to_host_bytes_per_s = 10 * GB;
    assert_takes(&work, 56);
}

#[test]
fn a_group_may_leave_while_it_is_waited_for() {
    // H (10) leaves 1..11 for the room of operation 1. StepOperation 2 needs G (1) and H beside which
    // Y (10) has no room; nor have Y and H beside G. So G leaves too, 11..12, then Y leaves as H
    // comes in, 12..22, and G is back at 23. StepOperation 2 runs 23..24, Y is in 24..34, 3 to 35.
    let operations = [op(1, 21), op(0, 11), op(1, 20), op(1, 10)];
    let groups = [group(10, [0, 0, 2, 2]), group(1, [0, 1, 2, 2]), group(10, [0, 1, 3, 3])];
    assert_takes(&at_one_byte_a_ns(&operations, &groups), 35);
}

#[test]
fn a_group_may_leave_though_all_is_there() {
    // Host memory takes but G (20, 2 ns either way). H (30) is written 1..31 for the room of
    // operation 1, which runs 31..32. Then operation 2 could begin, but G, once touched, would
    // keep H out until Y (21) is written, 32..53. So G leaves, 32..34, H is read 34..64, G comes
    // back 53..55; operations 2 and 3 run 55..56 and 64..65, Y is read 65..86, 4 runs to 87.
    let operations = [op(1, 30), op(1, 41), op(1, 55), op(1, 50), op(1, 21)];
    let groups = [group(30, [0, 0, 3, 3]), group(20, [1, 1, 2, 3]), group(21, [1, 1, 4, 4])];
    let mut work = at_one_byte_a_ns(&operations, &groups);
    (work.links.device_to_host_bytes_per_s, work.links.host_to_device_bytes_per_s) =
        (10 * GB, 10 * GB);
    (work.host_bytes, work.nvme_bytes, work.is_direct) = (20, 1000, true);
    assert_takes(&work, 87);
}

#[test]
fn host_memory_goes_to_the_group_needed_first() {
    // All of 10 bytes, and host memory for one. F is out 1..11 for the room of operation 1, which
    // runs 11..12, and written 11..21; H is out 21..31 for that of operation 2, 31..32, and in
    // 32..42. Now F could be read, or G leave. F first: read 42..52, in 52..62, operation 4 runs
    // 62..63. Then G: out 62..72, operation 5 without room 72..73, in 73..83, operation 6 to 84.
    let rooms = [10, 20, 10, 20, 20, 0, 10];
    let operations = rooms.map(|room_bytes| op(1, room_bytes));
    let [f, h] = [group(10, [0, 0, 4, 4]), group(10, [1, 1, 3, 3])];
    let mut work = at_one_byte_a_ns(&operations, &[f, h, group(10, [1, 2, 6, 6])]);
    (work.host_bytes, work.nvme_bytes) = (10, 1000);
    assert_takes(&work, 84);
    // G may leave from 43 on, and is out 43..53 for operation 4 without room, 53..54, in 54..64
    // and consumed 64..65. F, read before, could not have made way: read 64..74, in 74..84.
    let rooms = [10, 20, 10, 20, 0, 10, 10];
    work.operations = rooms.map(|room_bytes| op(1, room_bytes)).to_vec();
    work.groups = vec![group(10, [0, 0, 6, 6]), h, group(10, [1, 3, 5, 5])];
    assert_takes(&work, 85);
}

#[test]
fn device_memory_goes_to_the_slower_link_first() {
    // StepOperation 1 has no room for S and Q, nor 2 for Y beside them: Y leaves 12..22. Until then
    // there is room for one of them. S takes 25 ns, 12..37, and Q one, 22..23; so operation 2 runs
    // 37..38, Y is back at 39 and operation 3 ends at 40. Q first would cost what S then waits.
    let operations = [op(1, 35), op(1, 10), op(1, 35), op(1, 10)];
    let y = group(10, [1, 1, 3, 3]);
    let [small, large] = [group(10, [0, 0, 2, 2]), group(25, [0, 0, 2, 2])];
    let mut work = at_one_byte_a_ns(&operations, &[large, small, y]);
    work.is_direct = true;
    let (slow, fast) = (GB, 10 * GB);
    // S is read from the file, which takes no more, and host memory does not take S.
    (work.host_bytes, work.nvme_bytes) = (20, 30);
    set_rates(&mut work, [slow, fast, fast, slow]);
    assert_takes(&work, 40);
    // With Z (3) to leave before Y, 12..15, Q alone could come in at once. S still goes first,
    // 15..40, and Q once Y is out, at 25; operation 2 runs 40..41, Y and Z are back at 43.
    let z = group(3, [1, 1, 3, 3]);
    let mut with_z = work.clone();
    with_z.operations = vec![op(1, 35), op(1, 13), op(1, 35), op(1, 13)];
    with_z.groups.push(z);
    (with_z.host_bytes, with_z.nvme_bytes) = (24, 26);
    set_rates(&mut with_z, [slow, fast, fast, slow]);
    assert_takes(&with_z, 44);
    // The other way about: S in host memory, which takes no more, and the file does not take S.
    (work.host_bytes, work.nvme_bytes) = (30, 20);
    set_rates(&mut work, [fast, slow, slow, fast]);
    assert_takes(&work, 40);
}

const fn set_rates(work: &mut StepWork, [out, into, write, read]: [u64; 4]) {
    work.links = LinkRates {
        device_to_host_bytes_per_s: out,
        host_to_device_bytes_per_s: into,
        device_to_nvme_bytes_per_s: write,
        nvme_to_device_bytes_per_s: read,
    };
}

#[test]
fn a_step_too_large_to_search_has_a_bound() {
    let many = vec![group(1, [0, 0, 2, 2]); GROUPS_SEARCHED_MAX + 1];
    let work = at_one_byte_a_ns(&[op(1, 13), op(1, 0), op(1, 13)], &many);
    assert_eq!(optimum(&work, None, STATES_MAX), Optimum::AtLeast(3 + 13 + 13));
    // Its own bound proves a schedule best.
    assert_eq!(optimum(&work, Some(29), STATES_MAX), Optimum::Exact(29));
    assert_eq!(optimum(&StepWork::default(), None, STATES_MAX), Optimum::Never);
    // Rooms at the end of 64 bits, and as many bytes as are accepted, or more.
    let huge = group(BYTES_MAX, [0, 0, 2, 2]);
    let operations = [op(1, u64::MAX), op(1, u64::MAX), op(1, u64::MAX)];
    let mut work = at_one_byte_a_ns(&operations, &[huge]);
    assert_eq!(optimum(&work, None, STATES_MAX), Optimum::AtLeast(3));
    work.groups.push(huge);
    assert_eq!(optimum(&work, None, STATES_MAX), Optimum::Never);
}
