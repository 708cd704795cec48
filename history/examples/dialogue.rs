//! Figures of a dialogue of many entries, as JSON: recall against an exact scan, time of retrievals and records.
//!
//! `dialogue ENTRIES DIMENSION SCANNED TOPICS NOISE ALPHA`: embeddings are one of TOPICS directions and a random one
//! NOISE times as long; with 0 topics they are random directions, which no index serves. Queries are made in the same
//! way.

#[path = "support/numbers.rs"]
mod numbers;

use std::hint::black_box;
use std::time::Instant;

use dormouse_history::dialogue::{Found, NewEntry};
use dormouse_history::{Dialogue, DialogueOptions};
use numbers::Numbers;

const QUERIES: usize = 200;
const COUNT: usize = 10;
const RECORDED: usize = 1024;
/// Seconds between two entries.
const PERIOD_S: f64 = 10.0;

impl Numbers {
    /// Sum of twelve uniform numbers, with variance 1.
    fn gaussian(&mut self) -> f32 {
        (0..12).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32).sum::<f32>() - 6.0
    }

    fn direction(&mut self, dimension: usize) -> Vec<f32> {
        let mut own: Vec<f32> = (0..dimension).map(|_| self.gaussian()).collect();
        let length = own.iter().map(|it| it * it).sum::<f32>().sqrt();
        own.iter_mut().for_each(|it| *it /= length);
        own
    }

    fn near(&mut self, topics: &[Vec<f32>], noise: f32, dimension: usize) -> Vec<f32> {
        let mut own = self.direction(dimension);
        if !topics.is_empty() {
            let topic = &topics[self.next() as usize % topics.len()];
            own.iter_mut().zip(topic).for_each(|(own, it)| *own = *own * noise + it);
        }
        own
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<f64> =
        std::env::args().skip(1).map(|it| it.parse()).collect::<Result<_, _>>()?;
    let [entries, dimension, scanned, topics, noise, alpha] = numbers[..] else {
        return Err("usage: dialogue ENTRIES DIMENSION SCANNED TOPICS NOISE ALPHA".into());
    };
    let (entries, dimension) = (entries as usize, dimension as usize);
    let mut numbers = Numbers(1);
    let topics: Vec<_> = (0..topics as usize).map(|_| numbers.direction(dimension)).collect();
    let noise = noise as f32;
    let options = |scanned_entries| DialogueOptions {
        scanned_entries,
        entries_max: entries,
        alpha: alpha as f32,
        ..DialogueOptions::of_dimension(dimension)
    };
    let some = Dialogue::new(options(scanned as usize))?;
    let exact = Dialogue::new(options(entries))?;
    let (mut record_s, mut longest_s) = (0.0, 0.0_f64);
    let mut recorded = 0;
    while recorded < entries {
        let count = RECORDED.min(entries - recorded);
        let embeddings: Vec<_> =
            (0..count).map(|_| numbers.near(&topics, noise, dimension)).collect();
        let new: Vec<NewEntry<'_>> = embeddings
            .iter()
            .enumerate()
            .map(|(index, embedding)| NewEntry {
                embedding,
                query: b"query",
                passage: b"passage",
                response: b"response",
                time_s: (recorded + index) as f64 * PERIOD_S,
            })
            .collect();
        let begin = Instant::now();
        some.record(&new)?;
        let seconds = begin.elapsed().as_secs_f64();
        record_s += seconds;
        longest_s = longest_s.max(seconds);
        exact.record(&new)?;
        recorded += count;
    }
    let now_s = entries as f64 * PERIOD_S;
    // The exact scans come behind: each reads every embedding, and would leave nothing else in the caches.
    let queries: Vec<_> = (0..QUERIES).map(|_| numbers.near(&topics, noise, dimension)).collect();
    let timed = |dialogue: &Dialogue| -> Result<Vec<_>, Box<dyn std::error::Error>> {
        let mut all = Vec::with_capacity(QUERIES);
        for query in &queries {
            let begin = Instant::now();
            let found = black_box(dialogue.retrieve(query, now_s, COUNT)?);
            all.push((found, begin.elapsed().as_secs_f64()));
        }
        Ok(all)
    };
    let (own, best) = (timed(&some)?, timed(&exact)?);
    let mut times_s: Vec<f64> = own.iter().map(|(_, seconds)| *seconds).collect();
    let exact_s: f64 = best.iter().map(|(_, seconds)| seconds).sum();
    let (mut common, mut found) = (0, 0);
    for ((own, _), (best, _)) in own.iter().zip(&best) {
        let is_best = |it: &&Found| best.iter().any(|other| other.entry.id == it.entry.id);
        common += own.iter().filter(is_best).count();
        found += best.len();
    }
    times_s.sort_by(f64::total_cmp);
    let stats = some.stats();
    println!(
        "{{\"entries\": {}, \"categories\": {}, \"summaries\": {}, \"recall\": {:.4}, \"retrieval_ms\": {:.4}, \
         \"retrieval_min_ms\": {:.4}, \"retrieval_p99_ms\": {:.4}, \"exact_ms\": {:.3}, \"record_us\": {:.2}, \"longest_record_ms\": {:.1}}}",
        stats.entries,
        stats.categories,
        stats.summaries,
        common as f64 / found as f64,
        times_s[QUERIES / 2] * 1e3,
        times_s[0] * 1e3,
        times_s[QUERIES * 99 / 100] * 1e3,
        exact_s / QUERIES as f64 * 1e3,
        record_s / entries as f64 * 1e6,
        longest_s * 1e3,
    );
    Ok(())
}
