//! Figures of a history of 10⁷ tokens, as JSON: time of records and drafts, memory.
//!
//! `drafts PROMPTS RESPONSES TOKENS [BUDGET_BYTES]`: responses of a prompt are one text, of which each token is another
//! with probability 0.1, as in `benches/history`. Beyond the budget the least recently used prompts are forgotten.

#[path = "support/numbers.rs"]
mod numbers;

use std::hint::black_box;
use std::time::Instant;

use dormouse_history::{Digest, History, Options, WINDOW_TOKENS_MAX, Window};
use numbers::Numbers;

const VOCAB: u32 = 49_152;
/// Of a thousand tokens, those that differ from the prompt's text.
const CHANGED: u64 = 100;
/// Responses that are drafted, of as many prompts.
const DRAFTED: usize = 400;

impl Numbers {
    fn id(&mut self) -> u32 {
        (self.next() % u64::from(VOCAB)) as u32
    }

    fn like(&mut self, text: &[u32]) -> Vec<u32> {
        let mut one = |&id: &u32| if self.next() % 1000 < CHANGED { self.id() } else { id };
        text.iter().map(&mut one).collect()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let sizes: Vec<usize> =
        std::env::args().skip(1).map(|it| it.parse()).collect::<Result<_, _>>()?;
    let (prompts, responses, tokens, budget_bytes) = match sizes[..] {
        [prompts, responses, tokens] => (prompts, responses, tokens, u64::MAX),
        [prompts, responses, tokens, budget] => (prompts, responses, tokens, budget as u64),
        _ => return Err("usage: drafts PROMPTS RESPONSES TOKENS [BUDGET_BYTES]".into()),
    };
    let history = History::new(Options { budget_bytes, ..Options::of_vocab(VOCAB) })?;
    let mut numbers = Numbers(1);
    let mut texts = Vec::new();
    let (mut record_s, mut recorded) = (0.0, 0);
    for _ in 0..prompts {
        let prompt: Vec<u32> = (0..32).map(|_| numbers.id()).collect();
        let text: Vec<u32> = (0..tokens).map(|_| numbers.id()).collect();
        let all: Vec<Vec<u32>> = (0..responses).map(|_| numbers.like(&text)).collect();
        let begin = Instant::now();
        for (number, response) in all.iter().enumerate() {
            history.record(&prompt, response, number as f32, 0)?;
        }
        record_s += begin.elapsed().as_secs_f64();
        recorded += responses * tokens;
        texts.push((prompt, text));
    }
    let (mut drafts, mut drafted, mut accepted, mut forwards) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut draft_s = 0.0;
    for number in 0..DRAFTED {
        // Of the last half: with a budget the others may be forgotten.
        let (prompt, text) = &texts[prompts - 1 - number * 7919 % prompts.div_ceil(2)];
        let response = numbers.like(text);
        let sequence = [prompt.as_slice(), &response].concat();
        let (digest, mut at, mut window) = (Digest::of(prompt), prompt.len(), Window::default());
        while at < sequence.len() {
            let begin = Instant::now();
            let draft =
                black_box(history.draft(digest, &sequence[..at], window.tokens() as usize)?);
            draft_s += begin.elapsed().as_secs_f64();
            let own = &sequence[at..];
            let equal = draft.tokens.iter().zip(own).take_while(|(a, b)| a == b).count();
            let count = draft.tokens.len().min(own.len());
            window = window.after(count as u32, equal as u32);
            drafts += u64::from(count > 0);
            drafted += count as u64;
            accepted += equal as u64;
            forwards += 1;
            // A forward yields one token beyond what is accepted.
            at += equal + 1;
        }
    }
    let stats = history.stats();
    println!(
        "{{\"tokens\": {recorded}, \"insert_tokens_per_s\": {:.0}, \"bytes_per_token\": {:.3}, \
         \"draft_us_per_token\": {:.3}, \"draft_us\": {:.3}, \"acceptance\": {:.3}, \
         \"tokens_per_forward\": {:.2}, \"drafts\": {drafts}, \"window_max\": {WINDOW_TOKENS_MAX}}}",
        recorded as f64 / record_s,
        stats.bytes as f64 / recorded as f64,
        draft_s * 1e6 / drafted as f64,
        draft_s * 1e6 / forwards as f64,
        accepted as f64 / drafted as f64,
        (accepted + forwards) as f64 / forwards as f64,
    );
    Ok(())
}
