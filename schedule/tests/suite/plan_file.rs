//! Plan files: what was written is read, and what no plan can be is refused.

use crate::batch::Batch;
use crate::tree_planner_support::{batch, device_limits, sequences};
use dormouse_schedule::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn file_of(batch: &Batch) -> PlanFile {
    let plan = batch.plan().unwrap();
    let of = |(number, ending): (u32, &dormouse_schedule::forest::Ending)| FileSequence {
        number: 2 * number,
        name: Some(match number % 2 {
            0 => SequenceName::Number(-i64::from(number)),
            _ => SequenceName::Text(format!("sequence \"{number}\"\n")),
        }),
        tokens: ending.tokens,
        crc32: (number > 2).then_some(number),
    };
    let sequences = (0..).zip(batch.forest.endings()).map(of).collect();
    PlanFile { rank: 1, ranks: 3, sequences, plan }
}

/// The text with a changed body and a head that suits it.
fn changed(text: &str, change: impl FnOnce(&mut Value)) -> String {
    let (_, body) = text.split_once('\n').unwrap();
    let mut body: Value = serde_json::from_str(body).unwrap();
    change(&mut body);
    let body = body.to_string();
    let crc = crc32fast::hash(body.as_bytes());
    let head = json!({"dormouse_plan": 1, "bytes": body.len(), "crc32": format!("{crc:08x}")});
    format!("{head}\n{body}\n")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever residency, blocks and losses: the plan that is read is the one that was written.
    #[test]
    fn what_is_written_is_read(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        rows in 1_u32..9,
        block_rows in 0_u64..4,
        pick in any::<prop::sample::Index>(),
        runtime_residency in any::<bool>(),
    ) {
        let mut batch = batch(&sequences, &losses, rows);
        batch.block_rows = block_rows;
        batch.runtime_residency = runtime_residency;
        let limits = device_limits(&batch);
        batch.device_bytes = limits.get(pick.index(limits.len() + 1)).copied().unwrap_or(0);
        if batch.plan().is_ok() {
            let file = file_of(&batch);
            let text = file.to_text();
            prop_assert_eq!(PlanFile::parse(&text).unwrap(), file.clone());
            // What ran does not matter.
            let mut begun = file.clone();
            let id = begun.plan.next_op().id;
            let _ = begun.plan.complete(id);
            prop_assert_eq!(PlanFile::parse(&begun.to_text()).unwrap(), file);
        }
    }
}

fn example() -> (PlanFile, String) {
    let shared = [0, 1, 2, 0, 1];
    let more = |ends: &[u32]| [&shared[..], ends].concat();
    let sequences = [more(&[0, 0, 1]), more(&[0, 0, 2]), more(&[1]), vec![2, 2]];
    let mut batch = batch(&sequences, &[0], 4);
    // The least room in which a plan fits: a node runs forward again.
    let mut limits = device_limits(&batch).into_iter().rev();
    while batch.device_bytes == 0 || batch.plan().is_err() {
        batch.device_bytes = limits.next().unwrap();
    }
    let file = file_of(&batch);
    let text = file.to_text();
    (file, text)
}

#[test]
fn every_changed_byte_is_noticed() {
    let (_, text) = example();
    for at in 0..text.len() - 1 {
        let mut bytes = text.clone().into_bytes();
        bytes[at] ^= 1;
        if let Ok(text) = String::from_utf8(bytes) {
            assert!(PlanFile::parse(&text).is_err(), "byte {at}");
        }
    }
    for end in 0..text.len() - 1 {
        assert!(PlanFile::parse(&text[..end]).is_err(), "{end} bytes");
    }
    let refused = |text: &str| PlanFile::parse(text).unwrap_err().to_string();
    assert!(refused("").starts_with("it does not begin as a plan file"));
    assert!(refused(&text[..text.len() - 9]).contains("bytes after its first line; accepted:"));
    let newer = text.replacen("\"dormouse_plan\":1", "\"dormouse_plan\":2", 1);
    assert_eq!(refused(&newer), "it has version 2; accepted: 1");
    assert!(refused(&text.replacen("ranks", "Ranks", 1)).contains("its checksum is"));
}

#[test]
fn what_no_plan_can_be_is_refused() {
    let (file, text) = example();
    assert_eq!(PlanFile::parse(&changed(&text, |_| ())).unwrap(), file, "nothing is changed");
    let ops = file.plan.ops();
    let at = |is: fn(&OpKind) -> bool| ops.iter().position(|op| is(&op.kind)).unwrap();
    let forward = at(|kind| matches!(kind, OpKind::PrefixForward { .. }));
    let packed = ops.iter().rposition(|op| matches!(op.kind, OpKind::Microbatch { .. })).unwrap();
    let again = at(|kind| matches!(kind, OpKind::ForwardAgain { .. }));
    let backward = at(|kind| matches!(kind, OpKind::PrefixBackward { .. }));
    type Change<'a> = Box<dyn FnOnce(&mut Value) + 'a>;
    let set = |path: String, value: Value| -> Change<'_> {
        Box::new(move |body| *body.pointer_mut(&path).expect(&path) = value)
    };
    let removed = |op: usize| -> Change<'_> {
        Box::new(move |body| {
            let ops = body["plan"]["ops"].as_array_mut().unwrap();
            ops.remove(op);
            (0..).zip(ops).for_each(|(id, op)| op["id"] = json!(id));
        })
    };
    // A root has no such field.
    let reads = |op: usize, node: u32| -> Change<'_> {
        Box::new(move |body| body["plan"]["ops"][op]["reads"] = json!(node))
    };
    let cases: Vec<(Change<'_>, &str)> = vec![
        (set("/rank".into(), json!(3)), "rank is 3"),
        (set("/sequences/0/tokens".into(), json!(3)), "has rows outside its sequence"),
        (set("/sequences/0/tokens".into(), json!(0)), "tokens is 0"),
        (set("/options/model/layers".into(), json!(0)), "layers is 0"),
        (set("/plan/nodes/1/parent".into(), json!(null)), "is not below its parent"),
        (set("/plan/nodes/0/subtree_end".into(), json!(99)), "has a subtree outside"),
        (set("/plan/nodes/1/rows/begin".into(), json!(0)), "does not continue the rows"),
        (set("/plan/nodes/0/sequence".into(), json!(99)), "has rows outside its sequence"),
        (set(format!("/plan/ops/{packed}/id"), json!(99)), "has another id"),
        (
            set(format!("/plan/ops/{forward}/tokens/end"), json!(2)),
            "is not the forward of its node",
        ),
        (set(format!("/plan/ops/{forward}/node"), json!(99)), "names a node that is not there"),
        (set(format!("/plan/ops/{backward}/node"), json!(99)), "ends a node that is not"),
        (reads(again, 99), "reads another node than its parent"),
        (reads(backward, 99), "reads another node than its parent"),
        (set(format!("/plan/ops/{packed}/members/0/node"), json!(99)), "names a node that is not"),
        (set(format!("/plan/ops/{packed}/members/0/first_position"), json!(0)), "other rows than"),
        (set(format!("/plan/ops/{packed}/members"), json!([])), "has no members"),
        (set(format!("/plan/ops/{packed}/scores/0/sequence"), json!(99)), "scores rows or"),
        (set(format!("/plan/ops/{packed}/scores/0/first_label"), json!(1)), "scores other labels"),
        (set(format!("/plan/ops/{packed}/scores/0/rows/end"), json!(99)), "scores rows or"),
        (removed(packed), "ends a node before all nodes below it"),
        (removed(forward), "runs a node whose parent is not the one that is open"),
        (removed(ops.len() - 1), "is not where the plan ends"),
        (removed(ops.len() - 2), "before all nodes have run"),
    ];
    for (change, words) in cases {
        let refused = PlanFile::parse(&changed(&text, change));
        let refused = refused.expect_err(words).to_string();
        assert!(refused.contains(words), "{refused} instead of {words}");
    }
}
