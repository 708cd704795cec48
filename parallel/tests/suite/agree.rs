//! Ranks that differ are told in what, and only then.

use crate::balance_common::options;
use dormouse_parallel::agree::*;
use dormouse_parallel::balance::*;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use proptest::prelude::*;

/// SipHash-2-4 of 128 bits, written from its paper: another road than the crate's.
fn siphash_128(key: [u64; 2], bytes: &[u8]) -> u128 {
    fn rounds(v: &mut [u64; 4], count: usize) {
        for _ in 0..count {
            v[0] = v[0].wrapping_add(v[1]);
            v[1] = v[1].rotate_left(13) ^ v[0];
            v[0] = v[0].rotate_left(32);
            v[2] = v[2].wrapping_add(v[3]);
            v[3] = v[3].rotate_left(16) ^ v[2];
            v[0] = v[0].wrapping_add(v[3]);
            v[3] = v[3].rotate_left(21) ^ v[0];
            v[2] = v[2].wrapping_add(v[1]);
            v[1] = v[1].rotate_left(17) ^ v[2];
            v[2] = v[2].rotate_left(32);
        }
    }
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d ^ 0xee,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len() / 8 * 8 + 7, 0);
    padded.push(bytes.len() as u8);
    for word in padded.chunks(8) {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        v[3] ^= word;
        rounds(&mut v, 2);
        v[0] ^= word;
    }
    v[2] ^= 0xee;
    rounds(&mut v, 4);
    let low = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    rounds(&mut v, 4);
    u128::from(low) | u128::from(v[0] ^ v[1] ^ v[2] ^ v[3]) << 64
}

/// The paper's first vector: no bytes, key 00 to 0f.
#[test]
fn the_model_is_siphash() {
    let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
    let wanted = 0x9302_55c7_1472_f66d_e6a8_25ba_047f_81a3_u128;
    assert_eq!(siphash_128(key, &[]), wanted);
}

proptest! {
    #[test]
    fn digests_are_siphash_of_little_endian_numbers(
        name in "[a-z]{0,12}",
        numbers in prop::collection::vec(any::<u64>(), 0..9),
    ) {
        let mut bytes = (name.len() as u64).to_le_bytes().to_vec();
        bytes.extend(name.as_bytes());
        bytes.extend((numbers.len() as u64).to_le_bytes());
        numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        let wanted = siphash_128([0, 0], &bytes);
        let digest = Encoder::new(&name).numbers(numbers.iter().copied()).digest();
        prop_assert_eq!(u128::from(digest.high) << 64 | u128::from(digest.low), wanted);
        let text = String::from(digest);
        prop_assert_eq!(text.clone(), format!("{wanted:032x}"));
        prop_assert_eq!(Digest::try_from(text), Ok(digest));
    }
}

#[test]
fn what_is_no_digest_is_refused() {
    for text in ["", "0", "+0000000000000000000000000000000", "é000000000000000000000000000000"] {
        let seen = text.to_owned();
        assert_eq!(Digest::try_from(seen.clone()), Err(NoDigest { seen }));
    }
    assert!(serde_json::from_str::<Digest>(&format!("\"{}\"", "f".repeat(32))).is_ok());
    assert!(serde_json::from_str::<Digest>("\"f\"").is_err());
}

fn agreement(batch: &Workload<'_>, options: &Options, budget_bytes: u64) -> Agreement {
    Agreement::of(batch, options, budget_bytes, &Shares::new(batch, options).unwrap())
}

fn parts_that_differ(a: &Agreement, b: &Agreement) -> Vec<Part> {
    [Part::Version, Part::Inputs, Part::Options, Part::Collectives]
        .into_iter()
        .filter(|part| a.part(*part) != b.part(*part))
        .collect()
}

/// Every field of the options, changed one at a time by its JSON name: a field that is added and
/// not encoded fails here as well.
#[test]
fn every_option_counts() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[9, 4, 4]).unwrap();
    let batch = Workload { forest: &forest, groups: &[3, 4], logit_rows: &[] };
    let shares = Shares::new(&batch, &options(2)).unwrap();
    let of = |options: &Options| Agreement::of(&batch, options, 64, &shares);
    let base = serde_json::to_value(options(2)).unwrap();
    let mut changed = 0;
    let mut leaves = Vec::new();
    for (name, value) in base.as_object().unwrap() {
        match value.as_object() {
            Some(inner) => leaves.extend(inner.keys().map(|key| format!("/{name}/{key}"))),
            None => leaves.push(format!("/{name}")),
        }
    }
    for path in leaves {
        let mut json = base.clone();
        let value = json.pointer_mut(&path).unwrap();
        *value = match value.clone() {
            serde_json::Value::Bool(is) => (!is).into(),
            serde_json::Value::Number(n) if n.is_f64() => (n.as_f64().unwrap() + 0.5).into(),
            serde_json::Value::Number(n) => (n.as_u64().unwrap() + 1).into(),
            serde_json::Value::String(_) if path == "/method" => "greedy".into(),
            _ => "tree".into(),
        };
        let other: Options = serde_json::from_value(json).unwrap();
        assert_eq!(parts_that_differ(&of(&options(2)), &of(&other)), [Part::Options], "{path}");
        changed += 1;
    }
    assert!(changed >= 34, "only {changed} fields");
    let budget = Agreement::of(&batch, &options(2), 63, &shares);
    assert_eq!(parts_that_differ(&of(&options(2)), &budget), [Part::Options]);
}

#[test]
fn every_input_counts() {
    let base = Forest::from_nodes(&[NO_PARENT, 0, 0], &[9, 4, 4]).unwrap();
    let of = |forest: &Forest, groups: &[u32], logit_rows: &[u64]| {
        let batch = Workload { forest, groups, logit_rows };
        let shares = Shares::new(&Workload { forest: &base, ..batch }, &options(2)).unwrap();
        Agreement::of(&batch, &options(2), 64, &shares)
    };
    let first = of(&base, &[3, 4], &[0, 1, 1]);
    let shapes: [(&[u32], &[u64]); 3] = [
        (&[NO_PARENT, 0, 0], &[9, 4, 5]),
        (&[NO_PARENT, 0, NO_PARENT], &[9, 4, 4]),
        (&[NO_PARENT, 0, 1], &[9, 4, 4]),
    ];
    for (parents, lengths) in shapes {
        let other = Forest::from_nodes(parents, lengths).unwrap();
        assert_eq!(parts_that_differ(&first, &of(&other, &[3, 4], &[0, 1, 1])), [Part::Inputs]);
    }
    assert_eq!(parts_that_differ(&first, &of(&base, &[3, 5], &[0, 1, 1])), [Part::Inputs]);
    assert!(parts_that_differ(&first, &of(&base, &[3, 4], &[0, 1, 2])).contains(&Part::Inputs));
    assert!(parts_that_differ(&first, &of(&base, &[], &[0, 1, 1])).contains(&Part::Inputs));
    assert_eq!(first, of(&base, &[3, 4], &[0, 1, 1]));
}

/// Whatever ranks do together, or whose part it is, is in the digest; costs are not.
#[test]
fn every_collective_counts() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[900, 500, 500]).unwrap();
    let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
    let mut options = Options { exchange: true, ops_hold_collectives: true, ..options(2) };
    options.machine.link_bytes_per_s *= 1_000;
    let shares = Shares::new(&batch, &options).unwrap();
    assert!(!shares.exchanges.is_empty() && !shares.lockstep.kinds.is_empty());
    let of = |shares: &Shares| Agreement::of(&batch, &options, 64, shares);
    let differs = |change: &dyn Fn(&mut Shares)| {
        let mut other = shares.clone();
        change(&mut other);
        parts_that_differ(&of(&shares), &of(&other))
    };
    let changes: [&dyn Fn(&mut Shares); 14] = [
        &|s| s.shares[0].sequences[0] += 1,
        &|s| s.shares[0].leaves[0].end += 1,
        &|s| s.shares[1].features.microbatches += 1,
        &|s| s.shares[1].dummy_microbatches += 1,
        &|s| s.shares[1].dummy_forwards += 1,
        &|s| s.shares[1].dummy_backwards += 1,
        &|s| s.exchanges[0].node.0 += 1,
        &|s| s.exchanges[0].transfer = Transfer::Send,
        &|s| s.exchanges[0].from += 1,
        &|s| s.exchanges[0].to.end += 1,
        &|s| s.exchanges[0].kv_bytes += 1,
        &|s| s.exchanges[0].forward_at += 1,
        &|s| s.collectives.swap(0, 1),
        &|s| s.lockstep.own[0][0] += 1,
    ];
    for (index, change) in changes.iter().enumerate() {
        assert_eq!(differs(change), [Part::Collectives], "change {index}");
    }
    assert_eq!(differs(&|s| s.shares[0].busy_ps += 1), []);
    assert_eq!(differs(&|s| s.collectives.truncate(1)), [Part::Collectives]);
}

#[test]
fn those_who_differ_are_named() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[9, 4, 4]).unwrap();
    let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
    let ours = agreement(&batch, &options(4), 64);
    assert_eq!(Agreement::check(4, &[ours; 4]), Ok(()));
    assert_eq!(Agreement::check(4, &[]), Err(Disagreement::Nobody));
    assert_eq!(
        Agreement::check(4, &[ours; 3]),
        Err(Disagreement::RankCount { seen: 3, accepted: 4 })
    );
    let poorer = agreement(&batch, &options(4), 32);
    let longer = Forest::from_nodes(&[NO_PARENT, 0, 0], &[9, 4, 6]).unwrap();
    let other = agreement(&Workload { forest: &longer, ..batch }, &options(4), 64);
    let error = Agreement::check(4, &[other, ours, poorer, ours]).unwrap_err();
    let Disagreement::Differ(differences) = &error else { panic!("{error}") };
    assert_eq!(
        differences[..],
        [
            Difference { part: Part::Inputs, accepted: ours.inputs, seen: vec![(0, other.inputs)] },
            Difference {
                part: Part::Options,
                accepted: ours.options,
                seen: vec![(2, poorer.options)]
            },
        ]
    );
    let text = error.to_string();
    let named = format!("options: accepted: {}; seen: {} on rank 2", ours.options, poorer.options);
    assert!(text.starts_with("ranks differ in inputs: ") && text.ends_with(&named), "{text}");
    // Two against two: the lowest rank's is what is accepted.
    let error = Agreement::check(4, &[poorer, ours, ours, poorer]).unwrap_err();
    let Disagreement::Differ(differences) = error else { panic!("{error}") };
    assert_eq!(differences[0].seen, [(1, ours.options), (2, ours.options)]);
    let many: Vec<Agreement> = (0..21).map(|rank| if rank < 11 { ours } else { poorer }).collect();
    let text = Agreement::check(21, &many).unwrap_err().to_string();
    assert!(text.ends_with("on rank 18 and 2 more ranks"), "{text}");
}

#[test]
fn the_least_budget_is_agreed() {
    assert_eq!(agreed_budget(&[7, 3, 9]), Some(3));
    assert_eq!(agreed_budget(&[]), None);
}

/// The digests of a fixed plan: they may only change with `AGREE_VERSION` or a plan's form.
#[test]
fn digests_are_as_recorded() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[9, 4, 4]).unwrap();
    let batch = Workload { forest: &forest, groups: &[1, 2], logit_rows: &[0, 4, 4] };
    let ours = agreement(&batch, &options(2), 64);
    assert_eq!(AGREE_VERSION, 1);
    // The version of the crate changes with every release, those of the forms when they do.
    let mut version = Encoder::new("version");
    version.text(env!("CARGO_PKG_VERSION")).number(AGREE_VERSION);
    version.number(dormouse_schedule::PLAN_VERSION).number(SHARES_VERSION);
    assert_eq!(ours.version, version.digest());
    let got = [ours.inputs, ours.options, ours.collectives].map(|digest| digest.to_string());
    assert_eq!(
        got,
        [
            "38354267a27ae5a9d34456b3278e5e46",
            "40b545f540a62185a04d893bedcb4fc2",
            "77744867ec646d65f5ba803b4002ce69",
        ]
    );
}
