//! A prompt's responses as bytes, little-endian. Bytes come from disks: nothing in them is believed.
//!
//! ```text
//! tail [7] · tokens · responses · runs (u32 counts)
//! tokens [tokens] · begin, end, epoch, reward [responses] · for each run: length, positions
//! ```

use crate::limits::{CONTEXT_TOKENS, PROMPT_HISTORY_TOKENS_MAX};
use crate::prompt::{Extremes, NO_TOKEN, Prompt, Response};

impl Prompt {
    /// Appends the prompt to `bytes`.
    pub(crate) fn encode(&self, bytes: &mut Vec<u8>) {
        let mut put = |value: u32| bytes.extend_from_slice(&value.to_le_bytes());
        self.tail.iter().copied().for_each(&mut put);
        for count in [self.tokens.len(), self.responses.len(), self.runs.len()] {
            put(count as u32);
        }
        self.tokens.iter().copied().for_each(&mut put);
        for it in &self.responses {
            [it.begin, it.end, it.epoch, it.reward.to_bits()].into_iter().for_each(&mut put);
        }
        for run in &self.runs {
            put(run.len() as u32);
            run.iter().copied().for_each(&mut put);
        }
    }

    /// Returns the bytes that [`Prompt::encode`] appends.
    pub(crate) fn encoded_bytes(&self) -> u64 {
        let runs: usize = self.runs.iter().map(|run| 1 + run.len()).sum();
        let words = CONTEXT_TOKENS + 3 + self.tokens.len() + 4 * self.responses.len() + runs;
        4 * words as u64
    }

    /// Reads what [`Prompt::encode`] wrote. The error says what is wrong.
    pub(crate) fn decode(bytes: &[u8], vocab: u32) -> Result<Self, String> {
        let mut words = Words { bytes };
        let mut prompt = Self::new(&[]);
        for place in &mut prompt.tail {
            *place = words.one("tail")?;
        }
        let [tokens, responses, runs] =
            [words.one("counts")?, words.one("counts")?, words.one("counts")?];
        if tokens as usize > PROMPT_HISTORY_TOKENS_MAX {
            return Err(format!("{tokens} tokens of a prompt"));
        }
        prompt.tokens = words.many(tokens, "tokens")?;
        let each = words.many(responses.saturating_mul(4), "responses")?;
        prompt.responses.reserve_exact(each.len() / 4);
        for words in each.chunks_exact(4) {
            let [begin, end, epoch, reward] = [words[0], words[1], words[2], words[3]];
            let reward = f32::from_bits(reward);
            prompt.responses.push(Response { begin, end, epoch, reward });
        }
        for _ in 0..runs {
            let count = words.one("run")?;
            prompt.runs.push(words.many(count, "run")?);
        }
        if !words.bytes.is_empty() {
            return Err(format!("{} bytes after a prompt", words.bytes.len()));
        }
        prompt.check(vocab)?;
        prompt.extremes = Extremes::of(&prompt.responses);
        Ok(prompt)
    }

    /// Refuses what no [`Prompt::record`] makes, as far as lookups depend on it.
    fn check(&self, vocab: u32) -> Result<(), String> {
        let check_ids = |ids: &[u32]| match ids.iter().all(|&id| id < vocab) {
            true => Ok(()),
            false => Err(format!("a token id beyond the vocabulary of {vocab}")),
        };
        let unfilled = self.tail.iter().take_while(|&&id| id == NO_TOKEN).count();
        check_ids(&self.tail[unfilled..])?;
        let mut at = 0;
        for it in &self.responses {
            let (begin, end) = (it.begin as usize, it.end as usize);
            let own = self.tokens.get(begin..end);
            let Some(own) = own.filter(|_| begin == at + CONTEXT_TOKENS && it.reward.is_finite())
            else {
                return Err(format!("a response from {begin} to {end}"));
            };
            check_ids(own)?;
            if self.tokens.get(at..begin) != Some(self.tail.as_slice()) {
                return Err(format!("the tail of another prompt before {begin}"));
            }
            at = end;
        }
        if at != self.tokens.len() {
            return Err(format!("responses end at {at} of {} tokens", self.tokens.len()));
        }
        // Each position once, so votes are counted once.
        let mut positions: Vec<u32> = self.runs.iter().flatten().copied().collect();
        positions.sort_unstable();
        let wanted = self.responses.iter().flat_map(|it| it.begin..=it.end);
        if !positions.into_iter().eq(wanted) {
            return Err("positions that are not those of the responses".into());
        }
        if self.runs.iter().any(|run| !run.is_sorted_by_key(|&p| (self.context(p), p))) {
            return Err("positions out of order".into());
        }
        Ok(())
    }
}

/// Words that are left.
struct Words<'a> {
    bytes: &'a [u8],
}

impl Words<'_> {
    fn one(&mut self, name: &str) -> Result<u32, String> {
        let (word, rest) = self.bytes.split_first_chunk().ok_or_else(|| format!("no {name}"))?;
        self.bytes = rest;
        Ok(u32::from_le_bytes(*word))
    }

    fn many(&mut self, count: u32, name: &str) -> Result<Vec<u32>, String> {
        let bytes = 4 * count as usize;
        let Some((words, rest)) = self.bytes.split_at_checked(bytes) else {
            return Err(format!("{} of {bytes} bytes of {name}", self.bytes.len()));
        };
        self.bytes = rest;
        let word = |word: &[u8]| word.try_into().map_or(0, u32::from_le_bytes);
        Ok(words.chunks_exact(4).map(word).collect())
    }
}
