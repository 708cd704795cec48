//! The recorded responses of one prompt, and their positions by what comes before them.
//!
//! ```text
//! tokens     │tail of the prompt│ response 0 │tail│ response 1 │ …     a tail has CONTEXT_TOKENS places
//! positions   begin ..= end of each response: the token there is what came next; at the end nothing did
//! run         positions, sorted by the tokens before them, the nearest first; then by position
//! ```
//! A run costs 4 bytes a position beside 4 bytes a token. Each recorded response is a run, and runs of about
//! one size become one, so there are at most about log₄ of the responses.

use crate::error::HistoryError;
use crate::limits::{
    CONTEXT_TOKENS, MATCH_TOKENS_MIN, PROMPT_HISTORY_TOKENS_MAX, RESPONSE_TOKENS_MAX,
};

/// A run has at least so many times the positions of the next.
const RUN_RATIO: usize = 4;

/// Place of a tail that a shorter prompt does not fill. No id is equal to it.
pub(crate) const NO_TOKEN: u32 = u32::MAX;

/// The tokens before a position, the nearest first.
pub(crate) type Context = [u32; CONTEXT_TOKENS];

/// A recorded response.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Response {
    /// Position of its first token.
    pub(crate) begin: u32,
    /// Position after its last token.
    pub(crate) end: u32,
    /// Epoch in which it was recorded.
    pub(crate) epoch: u32,
    pub(crate) reward: f32,
}

/// Positions whose contexts begin with the same tokens.
#[derive(Clone, Debug)]
pub(crate) struct Matches<'a> {
    /// Number of equal tokens.
    pub(crate) tokens: usize,
    /// Parts of runs.
    pub(crate) positions: Vec<&'a [u32]>,
}

/// The recorded responses of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompt {
    pub(crate) tail: [u32; CONTEXT_TOKENS],
    pub(crate) tokens: Vec<u32>,
    pub(crate) responses: Vec<Response>,
    pub(crate) runs: Vec<Vec<u32>>,
    pub(crate) extremes: Extremes,
}

/// What weights of responses depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Extremes {
    pub(crate) least_reward: f32,
    pub(crate) greatest_reward: f32,
    pub(crate) latest_epoch: u32,
}

impl Extremes {
    const NONE: Self =
        Self { least_reward: f32::INFINITY, greatest_reward: f32::NEG_INFINITY, latest_epoch: 0 };

    pub(crate) fn of(responses: &[Response]) -> Self {
        responses.iter().fold(Self::NONE, Self::with)
    }

    fn with(self, it: &Response) -> Self {
        Self {
            least_reward: self.least_reward.min(it.reward),
            greatest_reward: self.greatest_reward.max(it.reward),
            latest_epoch: self.latest_epoch.max(it.epoch),
        }
    }
}

impl Prompt {
    pub(crate) fn new(prompt: &[u32]) -> Self {
        let mut tail = [NO_TOKEN; CONTEXT_TOKENS];
        for (place, id) in tail.iter_mut().rev().zip(prompt.iter().rev()) {
            *place = *id;
        }
        let (tokens, responses, runs) = (Vec::new(), Vec::new(), Vec::new());
        Self { tail, tokens, responses, runs, extremes: Extremes::NONE }
    }

    /// Returns the bytes of memory that the responses take.
    pub(crate) fn bytes(&self) -> u64 {
        let runs: usize = self.runs.iter().map(Vec::capacity).sum();
        let words = self.tokens.capacity() + runs;
        let responses = self.responses.capacity() * size_of::<Response>();
        (size_of::<Self>() + 4 * words + responses) as u64
    }

    /// Returns the number of tokens of responses.
    pub(crate) fn recorded_tokens(&self) -> u64 {
        self.responses.iter().map(|it| u64::from(it.end - it.begin)).sum()
    }

    /// Adds a response, and forgets those of epochs before `epoch_min`.
    pub(crate) fn record(
        &mut self,
        response: &[u32],
        reward: f32,
        epoch: u32,
        epoch_min: u32,
    ) -> Result<(), HistoryError> {
        if response.len() > RESPONSE_TOKENS_MAX {
            let (value, max) = (response.len() as u64, RESPONSE_TOKENS_MAX as u64);
            return Err(HistoryError::Range { name: "response tokens", value, min: 0, max });
        }
        let added = CONTEXT_TOKENS + response.len();
        let kept = self.responses.iter().filter(|it| it.epoch >= epoch_min);
        let kept: usize = kept.map(|it| CONTEXT_TOKENS + (it.end - it.begin) as usize).sum();
        if kept + added > PROMPT_HISTORY_TOKENS_MAX {
            let max = PROMPT_HISTORY_TOKENS_MAX as u64;
            return Err(HistoryError::Limit { what: "recorded tokens of a prompt", max });
        }
        self.forget_before(epoch_min);
        reserve(&mut self.tokens, added);
        self.tokens.extend_from_slice(&self.tail);
        let begin = self.tokens.len() as u32;
        self.tokens.extend_from_slice(response);
        let end = self.tokens.len() as u32;
        reserve(&mut self.responses, 1);
        let recorded = Response { begin, end, epoch, reward };
        self.extremes = self.extremes.with(&recorded);
        self.responses.push(recorded);
        let mut run = self.sorted(begin..=end);
        while let Some(before) = self.runs.pop_if(|it| it.len() / RUN_RATIO < run.len()) {
            run = self.merged(&before, &run);
        }
        self.runs.push(run);
        Ok(())
    }

    /// Returns the positions with the longest match of `end`, the last tokens of a sequence; `None` if fewer
    /// than [`MATCH_TOKENS_MIN`] tokens match anywhere.
    pub(crate) fn longest_matches(&self, end: &[u32]) -> Option<Matches<'_>> {
        let mut wanted = [NO_TOKEN; CONTEXT_TOKENS];
        let count = end.len().min(CONTEXT_TOKENS);
        for (place, id) in wanted.iter_mut().zip(end.iter().rev()) {
            *place = *id;
        }
        let wanted = &wanted[..count];
        let equal = |run: &[u32], index: usize| {
            let context = run.get(index).map(|&p| self.context(p));
            context.map_or(0, |it| it.iter().zip(wanted).take_while(|(a, b)| a == b).count())
        };
        // In each run the longest match is beside the place where `end` would be.
        let mut found: Vec<(&[u32], usize, usize)> = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            let at = run.partition_point(|&p| self.context(p)[..count] < *wanted);
            let before = at.checked_sub(1).map_or(0, |before| equal(run, before));
            found.push((run, at, before.max(equal(run, at))));
        }
        let tokens = found.iter().map(|it| it.2).max().unwrap_or(0);
        if tokens < MATCH_TOKENS_MIN {
            return None;
        }
        found.retain(|it| it.2 == tokens);
        let of_run = |(run, at, _): (&'_ [u32], usize, usize)| {
            let matches = |index: usize| equal(run, index) >= tokens;
            let after = at + extent(run.len() - at, |by| matches(at + by));
            let first = at - extent(at, |by| matches(at - 1 - by));
            (first, after)
        };
        let positions = found.iter().map(|&it| {
            let (first, after) = of_run(it);
            it.0.get(first..after).unwrap_or_default()
        });
        Some(Matches { tokens, positions: positions.collect() })
    }

    /// Returns the response of a position.
    pub(crate) fn response_of(&self, position: u32) -> Option<&Response> {
        let after = self.responses.partition_point(|it| it.begin <= position);
        self.responses.get(after.checked_sub(1)?)
    }

    /// Returns what comes before a position. A position has a tail or more before it.
    pub(crate) fn context(&self, position: u32) -> Context {
        let mut context = [NO_TOKEN; CONTEXT_TOKENS];
        let end = position as usize;
        if let Some(before) = self.tokens.get(end - CONTEXT_TOKENS..end) {
            context.copy_from_slice(before);
            context.reverse();
        }
        context
    }

    fn sorted(&self, positions: std::ops::RangeInclusive<u32>) -> Vec<u32> {
        let mut keyed: Vec<(Context, u32)> = positions.map(|p| (self.context(p), p)).collect();
        keyed.sort_unstable();
        // Not collected in place: that would keep the room of the keys.
        let mut run = Vec::with_capacity(keyed.len());
        run.extend(keyed.iter().map(|(_, position)| *position));
        run
    }

    /// Returns one run of two. Positions of `before` are before those of `after`.
    fn merged(&self, before: &[u32], after: &[u32]) -> Vec<u32> {
        let mut run = Vec::with_capacity(before.len() + after.len());
        let (mut before, mut after) = (before.iter().peekable(), after.iter().peekable());
        while let (Some(&&b), Some(&&a)) = (before.peek(), after.peek()) {
            let earlier = self.context(b) <= self.context(a);
            run.extend(if earlier { before.next() } else { after.next() });
        }
        run.extend(before);
        run.extend(after);
        run
    }

    /// Forgets the responses of epochs before `epoch_min`.
    fn forget_before(&mut self, epoch_min: u32) {
        if self.responses.iter().all(|it| it.epoch >= epoch_min) {
            return;
        }
        let old = std::mem::replace(self, Self { tail: self.tail, ..Self::new(&[]) });
        let is_kept = |it: &&Response| it.epoch >= epoch_min;
        let lengths = old.responses.iter().filter(is_kept).map(|it| (it.end - it.begin) as usize);
        let (count, tokens) = lengths.fold((0, 0), |(count, all), own| (count + 1, all + own));
        self.tokens.reserve_exact(tokens + CONTEXT_TOKENS * count);
        self.responses.reserve_exact(count);
        // How far the positions of each old response move down, if it is kept.
        let mut moves = vec![None; old.responses.len()];
        for (by, response) in moves.iter_mut().zip(&old.responses) {
            if !is_kept(&response) {
                continue;
            }
            self.tokens.extend_from_slice(&self.tail);
            let begin = self.tokens.len() as u32;
            let own = old.tokens.get(response.begin as usize..response.end as usize);
            self.tokens.extend_from_slice(own.unwrap_or_default());
            let end = self.tokens.len() as u32;
            *by = Some(response.begin - begin);
            self.responses.push(Response { begin, end, ..*response });
        }
        self.extremes = Extremes::of(&self.responses);
        for run in &old.runs {
            let moved = |&p: &u32| {
                let after = old.responses.partition_point(|it| it.begin <= p);
                moves.get(after.checked_sub(1)?).copied().flatten().map(|by: u32| p - by)
            };
            let mut run: Vec<u32> = run.iter().filter_map(moved).collect();
            if !run.is_empty() {
                run.shrink_to_fit();
                self.runs.push(run);
            }
        }
    }
}

/// Returns how many of `count` indices, from 0 on, are so; those that are come first. Few are.
fn extent(count: usize, is_so: impl Fn(usize) -> bool) -> usize {
    let mut step = 1;
    while step < count && is_so(step - 1) {
        step *= 2;
    }
    let (mut low, mut high) = (step / 2, step.min(count));
    while low < high {
        let middle = low.midpoint(high);
        if is_so(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

/// Makes room for `more` elements, and for an eighth more.
fn reserve<T>(list: &mut Vec<T>, more: usize) {
    if list.capacity() - list.len() < more {
        list.reserve_exact(more.max(list.len() / 8));
    }
}
