//! Retrieval and forgetting beside a naive model in FP64.

use proptest::prelude::*;

use super::{DIMENSION, embedding, options, record_one};
use crate::HistoryError;
use crate::dialogue::{Dialogue, DialogueOptions, NewEntry};

/// What the naive model knows of an entry.
#[derive(Clone, Debug)]
struct Known {
    id: u64,
    embedding: Vec<f32>,
    time_s: f64,
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let product = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let lengths = (product(a, a) * product(b, b)).sqrt();
    if lengths == 0.0 { 0.0 } else { product(a, b) / lengths }
}

fn weight(it: &Known, query: &[f32], now_s: f64, alpha: f64, decay_s: f64) -> f64 {
    let recency = (-(now_s - it.time_s).max(0.0) / decay_s).exp();
    alpha * cosine(query, &it.embedding) + (1.0 - alpha) * recency
}

fn ranked(all: &[Known], query: &[f32], now_s: f64, alpha: f64, decay_s: f64) -> Vec<(u64, f64)> {
    let weigh = |it: &Known| (it.id, weight(it, query, now_s, alpha, decay_s));
    let mut all: Vec<_> = all.iter().map(weigh).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
    all
}

/// Weights in FP32 and FP64 differ by less.
const ERROR: f64 = 1e-5;

/// Asserts that ids are the best of a ranking, up to entries of equal weight in FP32.
fn assert_best(ids: &[u64], ranking: &[(u64, f64)]) {
    let weights: std::collections::HashMap<u64, f64> = ranking.iter().copied().collect();
    for (id, (_, wanted)) in ids.iter().zip(ranking) {
        assert!((weights[id] - wanted).abs() < ERROR, "{ids:?} of {ranking:?}");
    }
}

proptest! {
    #[test]
    fn retrieval_and_forgetting_are_those_of_the_naive_model(
        batches in prop::collection::vec(prop::collection::vec((0_u64..40, 0_u32..500), 1..9), 1..20),
        entries_max in 1_usize..30,
        alpha in prop::sample::select(vec![0.0_f32, 0.3, 0.5, 1.0]),
        (query, now, count) in (0_u64..40, 0_u32..600, 0_usize..12),
    ) {
        let options = DialogueOptions { entries_max, alpha, ..options() };
        let dialogue = Dialogue::new(options.clone()).unwrap();
        let mut known: Vec<Known> = Vec::new();
        let mut next_id = 0;
        for batch in &batches {
            let rows: Vec<Known> = (next_id..).zip(batch).map(|(id, (seed, time))| {
                // Entry 0 is of zeros, others are of several lengths.
                let scale = *seed as f32;
                let embedding = embedding(*seed).iter().map(|it| it * scale).collect();
                Known { id, embedding, time_s: f64::from(*time) }
            }).collect();
            let new: Vec<_> = rows.iter().map(|it| NewEntry {
                embedding: &it.embedding, query: b"q", passage: b"p", response: b"r", time_s: it.time_s,
            }).collect();
            prop_assert_eq!(dialogue.record(&new).unwrap(), next_id);
            next_id += rows.len() as u64;
            let last = rows.last().unwrap().clone();
            known.extend(rows);
            let ranking = ranked(&known, &last.embedding, last.time_s, alpha.into(), options.decay_s);
            let kept: Vec<u64> = known.iter().map(|it| it.id).filter(|id| dialogue.entry(*id).is_some()).collect();
            prop_assert_eq!(kept.len(), ranking.len().min(entries_max));
            let floor = ranking.get(entries_max).map_or(f64::MIN, |it| it.1);
            for (id, weight) in &ranking {
                prop_assert!(*weight <= floor + ERROR || kept.contains(id));
                prop_assert!(*weight >= floor - ERROR || !kept.contains(id));
            }
            known.retain(|it| kept.contains(&it.id));
        }
        let (query, now_s) = (embedding(query), f64::from(now));
        let found = dialogue.retrieve(&query, now_s, count).unwrap();
        let ranking = ranked(&known, &query, now_s, alpha.into(), options.decay_s);
        prop_assert_eq!(found.len(), count.min(known.len()));
        let ids: Vec<u64> = found.iter().map(|it| it.entry.id).collect();
        assert_best(&ids, &ranking);
        for it in &found {
            let own = known.iter().find(|own| own.id == it.entry.id).unwrap();
            prop_assert!((f64::from(it.relevance) - cosine(&query, &own.embedding)).abs() < ERROR);
            let wanted = weight(own, &query, now_s, alpha.into(), options.decay_s);
            prop_assert!((f64::from(it.weight) - wanted).abs() < ERROR);
        }
    }
}

/// Near one of 40 directions.
fn near_topic(number: u64) -> Vec<f32> {
    let topic = embedding(1000 + number * 7919 % 40);
    topic.iter().zip(embedding(number)).map(|(topic, own)| topic + 0.2 * own).collect()
}

fn many(options: &DialogueOptions, count: u64) -> (Dialogue, Vec<Known>) {
    let dialogue = Dialogue::new(options.clone()).unwrap();
    let known: Vec<Known> = (0..count)
        .map(|id| Known { id, embedding: near_topic(id), time_s: id as f64 / 100.0 })
        .collect();
    for some in known.chunks(500) {
        let new: Vec<_> = some
            .iter()
            .map(|it| NewEntry {
                embedding: &it.embedding,
                query: b"",
                passage: b"",
                response: b"",
                time_s: it.time_s,
            })
            .collect();
        dialogue.record(&new).unwrap();
    }
    (dialogue, known)
}

#[test]
fn all_levels_scanned_are_exact_and_some_find_nearly_all() {
    let all = DialogueOptions { scanned_entries: 5000, alpha: 0.9, ..options() };
    let some = DialogueOptions { scanned_entries: 500, ..all.clone() };
    let (exact, known) = many(&all, 5000);
    let (part, _) = many(&some, 5000);
    assert!(exact.stats().categories > 4 && exact.stats().summaries > 20, "{:?}", exact.stats());
    let (mut hits, mut wanted) = (0, 0);
    for number in 0..50 {
        let query = near_topic(777_777 + number);
        let ids = |it: &Dialogue| -> Vec<u64> {
            it.retrieve(&query, 50.0, 10).unwrap().iter().map(|it| it.entry.id).collect()
        };
        let best = ids(&exact);
        assert_best(&best, &ranked(&known, &query, 50.0, 0.9, all.decay_s));
        wanted += best.len();
        hits += ids(&part).iter().filter(|it| best.contains(it)).count();
    }
    // An index that looked at any 500 of 5000 would find a tenth.
    assert!(hits * 100 >= wanted * 95, "{hits} of {wanted}");
}

#[test]
fn of_equal_weights_the_later_entry_comes_first() {
    let dialogue = Dialogue::new(options()).unwrap();
    let ids = [1.0; 3].map(|time_s| record_one(&dialogue, &embedding(1), time_s));
    let found = dialogue.retrieve(&embedding(1), 1.0, 2).unwrap();
    assert_eq!([found[0].entry.id, found[1].entry.id], [ids[2], ids[1]]);
}

#[test]
fn the_last_entries_are_looked_at_wherever_they_are() {
    let options = DialogueOptions { scanned_entries: 1, alpha: 0.0, decay_s: 1.0, ..options() };
    let (dialogue, known) = many(&options, 4000);
    let found = dialogue.retrieve(&near_topic(3), 40.0, 200).unwrap();
    let ids: Vec<u64> = found.iter().map(|it| it.entry.id).collect();
    let wanted: Vec<u64> = known.iter().rev().take(200).map(|it| it.id).collect();
    assert_eq!(ids, wanted);
}

#[test]
fn entries_that_are_forgotten_leave_every_level() {
    let options =
        DialogueOptions { entries_max: 1500, scanned_entries: 1500, alpha: 1.0, ..options() };
    let (dialogue, _) = many(&options, 4000);
    let stats = dialogue.stats();
    assert_eq!((stats.entries, stats.forgotten_entries), (1500, 2500));
    let found = dialogue.retrieve(&near_topic(1), 0.0, 1024).unwrap();
    let ids: std::collections::HashSet<u64> = found.iter().map(|it| it.entry.id).collect();
    assert_eq!(ids.len(), 1024);
    assert!(ids.iter().all(|id| dialogue.entry(*id).is_some()));
}

#[test]
fn what_is_out_of_range_is_named() {
    let said = |options: DialogueOptions| Dialogue::new(options).unwrap_err().to_string();
    assert_eq!(
        said(DialogueOptions { dimension: 0, ..options() }),
        "dimension is 0; accepted: 1 to 4096"
    );
    assert_eq!(
        said(DialogueOptions { entries_max: 1 << 21, ..options() }),
        "entries_max is 2097152; accepted: 1 to 1048576"
    );
    assert_eq!(said(DialogueOptions { alpha: 1.5, ..options() }), "alpha is 1.5; accepted: 0 to 1");
    assert_eq!(
        said(DialogueOptions { alpha: f32::NAN, ..options() }),
        "alpha is NaN; accepted: 0 to 1"
    );
    assert!(said(DialogueOptions { decay_s: 0.0, ..options() }).contains("above 0"));
    let dialogue = Dialogue::new(options()).unwrap();
    record_one(&dialogue, &embedding(1), 0.0);
    let mut own = embedding(2);
    let text = vec![0; (1 << 20) + 1];
    let new = NewEntry { embedding: &own, query: b"", passage: &text, response: b"", time_s: 0.0 };
    let refused = dialogue.record(&[NewEntry { passage: b"", ..new }, new]).unwrap_err();
    assert_eq!(refused.to_string(), "passage has 1048577 bytes; accepted: 0 to 1048576");
    let late = NewEntry { passage: b"", time_s: f64::INFINITY, ..new };
    assert!(matches!(dialogue.record(&[late]), Err(HistoryError::Number { name: "time_s", .. })));
    let said = dialogue.retrieve(&own[1..], 0.0, 1).unwrap_err().to_string();
    assert_eq!(said, format!("embedding has 18 numbers; accepted: {DIMENSION} to {DIMENSION}"));
    assert!(dialogue.retrieve(&own, 0.0, 1025).unwrap_err().to_string().contains("0 to 1024"));
    own[7] = f32::NAN;
    assert!(dialogue.retrieve(&own, 0.0, 1).unwrap_err().to_string().contains("NaN"));
    assert_eq!(dialogue.stats().entries, 1, "nothing of a refused call is recorded");
}
