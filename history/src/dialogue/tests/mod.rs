//! Tests of dialogues: retrieval beside a naive model, the log cut and damaged at every place.

mod chains;
mod levels;
mod logs;
mod model;
mod threads;

use crate::dialogue::{Dialogue, DialogueOptions, NewEntry};

/// Numbers of an embedding in tests.
const DIMENSION: usize = 19;

fn options() -> DialogueOptions {
    DialogueOptions { decay_s: 100.0, ..DialogueOptions::of_dimension(DIMENSION) }
}

/// An embedding made of a number.
fn embedding(seed: u64) -> Vec<f32> {
    let mut z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut one = || {
        z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(0x94d0_49bb);
        (z >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..DIMENSION).map(|_| one()).collect()
}

fn record_one(dialogue: &Dialogue, embedding: &[f32], time_s: f64) -> u64 {
    let text = time_s.to_string();
    let query = text.as_bytes();
    let new = NewEntry { embedding, query, passage: b"passage", response: b"", time_s };
    dialogue.record(&[new]).unwrap()
}
