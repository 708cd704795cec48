//! Sequences: 32-bit ids in one buffer, and scoring, group and kind of each sequence.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{Debug, Display};

use dormouse_schedule::forest::SEQUENCES_MAX;
use dormouse_schedule::{Loss, Scoring, SequenceName, Span, TOKENS_MAX};
use serde::Deserialize;

/// Maximum number of token ids of all sequences (32 GiB). Small in tests, which reach it.
pub const IDS_MAX: u64 = if cfg!(test) { 1 << 10 } else { 1 << 33 };
/// Largest vocabulary; ids are signed 32-bit integers.
pub const VOCAB_MAX: u32 = 1 << 31;

/// Maximum length of a name in bytes.
const NAME_BYTES_MAX: usize = 1 << 12;

/// A value of a row that is not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The field: `ids`, `ids[3]` or `weight`.
    pub field: String,
    /// The value seen.
    pub seen: String,
    /// The values accepted.
    pub accepted: String,
}

impl Refusal {
    pub(crate) fn new(
        field: impl Into<String>,
        seen: impl Display,
        accepted: impl Display,
    ) -> Self {
        Self { field: field.into(), seen: seen.to_string(), accepted: accepted.to_string() }
    }
}

/// Tokens of a row, borrowed from the file's buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowTokens<'a> {
    Ids(&'a dyn TokenIds),
    Prompted { prompt: &'a dyn TokenIds, response: &'a dyn TokenIds },
    Length { tokens: u64, prompt: Option<u64> },
}

/// Token ids of any integer width.
pub(crate) trait TokenIds: Debug {
    /// Appends the ids, each below `vocab`. `field`: their name in a refusal.
    fn append_to(&self, ids: &mut Vec<i32>, field: &str, vocab: u32) -> Result<(), Refusal>;
}

impl<I: Copy + Debug + Display + TryInto<u32>> TokenIds for &[I] {
    fn append_to(&self, ids: &mut Vec<i32>, field: &str, vocab: u32) -> Result<(), Refusal> {
        extend(ids, field, self, vocab)
    }
}

impl TokenIds for Vec<i64> {
    fn append_to(&self, ids: &mut Vec<i32>, field: &str, vocab: u32) -> Result<(), Refusal> {
        extend(ids, field, self, vocab)
    }
}

/// The user's name of a group or a sequence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(untagged)]
pub(crate) enum Name<'a> {
    Number(i64),
    #[serde(borrow)]
    Text(Cow<'a, str>),
}

impl From<&Name<'_>> for SequenceName {
    fn from(name: &Name<'_>) -> Self {
        match name {
            Name::Number(number) => Self::Number(*number),
            Name::Text(text) => Self::Text(text.to_string()),
        }
    }
}

impl Name<'_> {
    /// Refuses a long name. `field`: what it names.
    fn check(&self, field: &str) -> Result<(), Refusal> {
        match self {
            Self::Text(text) if text.len() > NAME_BYTES_MAX => {
                let seen = format!("a string of {} bytes", text.len());
                Err(Refusal::new(field, seen, format!("at most {NAME_BYTES_MAX} bytes")))
            }
            _ => Ok(()),
        }
    }

    fn to_owned(&self) -> Name<'static> {
        match self {
            Self::Number(number) => Name::Number(*number),
            Self::Text(text) => Name::Text(Cow::Owned(text.to_string())),
        }
    }
}

/// The labels that carry loss, if the row specifies them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RowLoss {
    From(u64),
    Spans(Vec<Span>),
    /// Of all tokens, or of those of the response.
    Mask(Vec<bool>),
}

/// One sequence.
#[derive(Clone, Debug)]
pub(crate) struct Row<'a> {
    pub(crate) tokens: RowTokens<'a>,
    pub(crate) weight: Option<f64>,
    pub(crate) loss: Option<RowLoss>,
    pub(crate) group: Option<Name<'a>>,
    pub(crate) kind: Option<u64>,
    pub(crate) id: Option<Name<'a>>,
}

/// What is known of all sequences beside their tokens, by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Described {
    pub(crate) scoring: Vec<Scoring>,
    /// Groups, numbered; empty if there are none.
    pub(crate) groups: Vec<u32>,
    /// The user's ids; empty if there are none.
    pub(crate) names: Vec<Name<'static>>,
    /// CRC-32 of the token ids as little-endian 32-bit integers; empty if only lengths are known.
    pub(crate) checksums: Vec<u32>,
}

/// Tokens of all sequences, as ids or as lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Sequence i is `ids[offsets[i]..offsets[i + 1]]`.
    Ids {
        /// All ids.
        ids: Vec<i32>,
        /// One more than sequences.
        offsets: Vec<u64>,
    },
    /// Lengths only.
    Lengths {
        /// Tokens of each sequence.
        tokens: Vec<u64>,
        /// Tokens that the sequences of its group share.
        shared: Vec<u64>,
    },
}

/// All sequences of a batch, in the order of the files and of their rows.
#[derive(Clone, Debug)]
pub struct Sequences {
    vocab: u32,
    tokens: Option<Tokens>,
    scoring: Vec<Scoring>,
    response_tokens: Vec<u64>,
    groups: Groups,
    kinds: Vec<u64>,
    names: Vec<Name<'static>>,
    checksums: Vec<u32>,
}

/// Groups, numbered by first occurrence.
#[derive(Clone, Debug, Default)]
struct Groups {
    numbers: BTreeMap<Name<'static>, u32>,
    /// Tokens that the sequences of each group share, if only lengths are known.
    shared: Vec<u64>,
    of_sequence: Vec<u32>,
}

impl Sequences {
    /// Creates an empty batch of ids below `vocab`.
    #[must_use]
    pub fn new(vocab: u32) -> Self {
        let groups = Groups::default();
        let vocab = vocab.min(VOCAB_MAX);
        Self {
            vocab,
            tokens: None,
            scoring: Vec::new(),
            response_tokens: Vec::new(),
            groups,
            kinds: Vec::new(),
            names: Vec::new(),
            checksums: Vec::new(),
        }
    }

    /// Returns the number of sequences.
    #[must_use]
    pub fn count(&self) -> usize {
        self.scoring.len()
    }

    /// Returns the tokens; `None` before the first sequence.
    #[must_use]
    pub fn tokens(&self) -> Option<&Tokens> {
        self.tokens.as_ref()
    }

    /// Returns the scoring of each sequence.
    #[must_use]
    pub fn scoring(&self) -> &[Scoring] {
        &self.scoring
    }

    /// Returns the tokens of each response: of the whole sequence, if its prompt is not known.
    #[must_use]
    pub fn response_tokens(&self) -> &[u64] {
        &self.response_tokens
    }

    /// Returns the group of each sequence, numbered by first occurrence; empty if no sequence has one.
    #[must_use]
    pub fn groups(&self) -> &[u32] {
        &self.groups.of_sequence
    }

    /// Returns the kind of each sequence; empty if no sequence has one.
    #[must_use]
    pub fn kinds(&self) -> &[u64] {
        &self.kinds
    }

    /// Drops the tokens and returns the rest.
    pub(crate) fn without_tokens(self) -> Described {
        let Self { scoring, groups: Groups { of_sequence, .. }, names, checksums, .. } = self;
        Described { scoring, groups: of_sequence, names, checksums }
    }

    /// Appends a row. On refusal the row may be partly appended.
    pub(crate) fn push(&mut self, row: &Row<'_>) -> Result<(), Refusal> {
        let number = self.count();
        if number == SEQUENCES_MAX {
            return Err(Refusal::new("sequences", number + 1, format!("{SEQUENCES_MAX} in all")));
        }
        let (tokens, prompt) = self.push_tokens(row.tokens)?;
        let group = self.groups.push(row.group.as_ref(), number)?;
        self.push_name(row.id.as_ref(), number)?;
        if let RowTokens::Length { prompt, .. } = row.tokens {
            self.push_shared(group, prompt)?;
        }
        let weight = row.weight.unwrap_or(1.0);
        if !weight.is_finite() {
            return Err(Refusal::new("weight", weight, "finite numbers"));
        }
        let loss = loss(row.loss.as_ref(), tokens, prompt)?;
        self.scoring.push(Scoring { loss, weight });
        self.response_tokens.push(tokens - prompt.unwrap_or(0));
        if row.kind.is_some() && self.kinds.is_empty() {
            self.kinds.resize(number, 0);
        }
        if row.kind.is_some() || !self.kinds.is_empty() {
            self.kinds.push(row.kind.unwrap_or(0));
        }
        Ok(())
    }

    /// Appends the user's id: of all sequences, or of none.
    fn push_name(&mut self, name: Option<&Name<'_>>, number: usize) -> Result<(), Refusal> {
        let Some(name) = name else {
            if self.names.is_empty() {
                return Ok(());
            }
            return Err(Refusal::new("id", "none", "an id, as in earlier sequences"));
        };
        if self.names.len() != number {
            return Err(Refusal::new("id", "an id", "no id, as in earlier sequences"));
        }
        name.check("id")?;
        self.names.push(name.to_owned());
        Ok(())
    }

    /// Appends the tokens; returns their number and that of the prompt, if known.
    fn push_tokens(&mut self, row: RowTokens<'_>) -> Result<(u64, Option<u64>), Refusal> {
        if let RowTokens::Length { tokens, prompt } = row {
            let of_ids = || Refusal::new("length", tokens, "ids, as in earlier sequences");
            let fresh = || Tokens::Lengths { tokens: Vec::new(), shared: Vec::new() };
            let Tokens::Lengths { tokens: all, .. } = self.tokens.get_or_insert_with(fresh) else {
                return Err(of_ids());
            };
            count("length", tokens)?;
            all.push(tokens);
            if let Some(prompt) = prompt
                && !(1..=tokens).contains(&prompt)
            {
                return Err(Refusal::new("prompt_length", prompt, format!("1 to {tokens}")));
            }
            return Ok((tokens, prompt));
        }
        let fresh = || Tokens::Ids { ids: Vec::new(), offsets: vec![0] };
        let Tokens::Ids { ids, offsets } = self.tokens.get_or_insert_with(fresh) else {
            let accepted = "a length, as in earlier sequences";
            return Err(Refusal::new("ids", "token ids", accepted));
        };
        let before = ids.len();
        let prompt = match row {
            RowTokens::Ids(row) => row.append_to(ids, "ids", self.vocab).map(|()| None),
            RowTokens::Prompted { prompt, response } => {
                prompt.append_to(ids, "prompt_ids", self.vocab)?;
                let shared = ids.len() - before;
                response.append_to(ids, "response_ids", self.vocab)?;
                Ok(Some(shared as u64))
            }
            RowTokens::Length { .. } => Ok(None),
        }?;
        let tokens = (ids.len() - before) as u64;
        count("ids", tokens)?;
        let all = ids.len() as u64;
        if all > IDS_MAX {
            return Err(Refusal::new("ids", format!("{all} of all"), format!("{IDS_MAX} in all")));
        }
        offsets.push(all);
        self.checksums.push(checksum(&ids[before..]));
        Ok((tokens, prompt))
    }

    /// Appends the number of tokens that a sequence given by its length shares with its group.
    fn push_shared(&mut self, group: Option<u32>, prompt: Option<u64>) -> Result<(), Refusal> {
        let prompt = prompt.unwrap_or(0);
        let of_group = group.map(|group| {
            let shared = &mut self.groups.shared;
            if group as usize == shared.len() {
                shared.push(prompt);
            }
            shared[group as usize]
        });
        if let Some(of_group) = of_group
            && of_group != prompt
        {
            let accepted = format!("{of_group}, as in the rest of the group");
            return Err(Refusal::new("prompt_length", prompt, accepted));
        }
        if let Some(Tokens::Lengths { shared, .. }) = &mut self.tokens {
            shared.push(of_group.unwrap_or(0));
        }
        Ok(())
    }
}

impl Groups {
    fn push(&mut self, name: Option<&Name<'_>>, sequence: usize) -> Result<Option<u32>, Refusal> {
        let Some(name) = name else {
            if self.of_sequence.is_empty() {
                return Ok(None);
            }
            return Err(Refusal::new("group", "none", "a group, as in earlier sequences"));
        };
        if self.of_sequence.len() != sequence {
            let seen = match name {
                Name::Number(number) => number.to_string(),
                Name::Text(text) => format!("{text:?}"),
            };
            return Err(Refusal::new("group", seen, "no group, as in earlier sequences"));
        }
        name.check("group")?;
        let next = self.numbers.len() as u32;
        let group = match self.numbers.get(name) {
            Some(group) => *group,
            None => *self.numbers.entry(name.to_owned()).or_insert(next),
        };
        self.of_sequence.push(group);
        Ok(Some(group))
    }
}

/// Returns the CRC-32 of token ids as little-endian 32-bit integers.
pub(crate) fn checksum(ids: &[i32]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    ids.iter().for_each(|id| crc.update(&id.to_le_bytes()));
    crc.finalize()
}

fn count(field: &str, tokens: u64) -> Result<(), Refusal> {
    if (1..=TOKENS_MAX).contains(&tokens) {
        return Ok(());
    }
    Err(Refusal::new(field, format!("{tokens} tokens"), format!("1 to {TOKENS_MAX}")))
}

fn extend<I>(ids: &mut Vec<i32>, field: &str, row: &[I], vocab: u32) -> Result<(), Refusal>
where
    I: Copy + Display + TryInto<u32>,
{
    if ids.try_reserve(row.len()).is_err() {
        let seen = format!("{} of all", ids.len().saturating_add(row.len()));
        return Err(Refusal::new(field, seen, "at most what fits in memory"));
    }
    for (index, id) in row.iter().enumerate() {
        let known = (*id).try_into().ok().filter(|id| *id < vocab);
        let Some(id) = known.and_then(|id| i32::try_from(id).ok()) else {
            let accepted = format!("0 to {}", vocab.saturating_sub(1));
            return Err(Refusal::new(format!("{field}[{index}]"), id, accepted));
        };
        ids.push(id);
    }
    Ok(())
}

/// Returns the loss of a row; by default the response is scored, or all tokens if there is no prompt.
fn loss(row: Option<&RowLoss>, tokens: u64, prompt: Option<u64>) -> Result<Loss, Refusal> {
    match row {
        None => Ok(prompt.map_or(Loss::AllButFirst, |first| Loss::From(first.min(tokens)))),
        Some(RowLoss::From(first)) if *first <= tokens => Ok(Loss::From(*first)),
        Some(RowLoss::From(first)) => {
            Err(Refusal::new("loss", first, format!("a position, 0 to {tokens}")))
        }
        Some(RowLoss::Spans(spans)) => {
            let mut before = 1;
            for (index, span) in spans.iter().enumerate() {
                if span.begin < before || span.end <= span.begin || span.end > tokens {
                    let seen = format!("{} to {}", span.begin, span.end);
                    let accepted = format!("ascending spans within {before} to {tokens}");
                    return Err(Refusal::new(format!("loss[{index}]"), seen, accepted));
                }
                before = span.end;
            }
            Ok(Loss::Spans(spans.clone()))
        }
        Some(RowLoss::Mask(mask)) => masked(mask, tokens, prompt).map(Loss::Spans),
    }
}

/// Returns the labels of a mask of all tokens, or of those after the prompt. No row predicts the first token.
fn masked(mask: &[bool], tokens: u64, prompt: Option<u64>) -> Result<Vec<Span>, Refusal> {
    let first = match (mask.len() as u64, prompt) {
        (seen, _) if seen == tokens => 0,
        (seen, Some(prompt)) if seen == tokens - prompt => prompt,
        (seen, prompt) => {
            let of_response = prompt.map(|prompt| format!(" or {}", tokens - prompt));
            let accepted =
                format!("{tokens}{}, one for each token", of_response.unwrap_or_default());
            return Err(Refusal::new("loss_mask", format!("{seen} values"), accepted));
        }
    };
    let mut spans: Vec<Span> = Vec::new();
    for (label, _) in (first..).zip(mask).filter(|(label, scored)| **scored && *label > 0) {
        match spans.last_mut() {
            Some(span) if span.end == label => span.end += 1,
            _ => spans.push(Span { begin: label, end: label + 1 }),
        }
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tokens: RowTokens<'_>) -> Row<'_> {
        Row { tokens, weight: None, loss: None, group: None, kind: None, id: None }
    }

    #[test]
    fn refuses_too_many_ids_in_all() {
        let mut sequences = Sequences::new(10);
        let half = vec![1_i64; IDS_MAX as usize / 2];
        assert_eq!(sequences.push(&row(RowTokens::Ids(&half))), Ok(()));
        assert_eq!(sequences.push(&row(RowTokens::Ids(&half))), Ok(()));
        let refusal = sequences.push(&row(RowTokens::Ids(&vec![1]))).unwrap_err();
        assert_eq!(refusal, Refusal::new("ids", "1025 of all", "1024 in all"));
    }

    #[test]
    fn ids_of_any_width_are_stored_in_32_bits() {
        let most = VOCAB_MAX - 1;
        let mut sequences = Sequences::new(u32::MAX);
        let rows: &[&dyn TokenIds] =
            &[&&[0_u32, most][..], &&[0_i64, most.into()][..], &&[0_u64, most.into()][..]];
        for ids in rows {
            assert_eq!(sequences.push(&row(RowTokens::Ids(*ids))), Ok(()));
        }
        let rows: &[&dyn TokenIds] =
            &[&&[7_i8][..], &&[7_u8][..], &&[7_i16][..], &&[7_u16][..], &&[7_i32][..]];
        for ids in rows {
            assert_eq!(sequences.push(&row(RowTokens::Ids(*ids))), Ok(()));
        }
        let ids = [&[0, i32::MAX].repeat(3)[..], &[7; 5]].concat();
        let wanted = Tokens::Ids { ids, offsets: vec![0, 2, 4, 6, 7, 8, 9, 10, 11] };
        assert_eq!(sequences.tokens(), Some(&wanted));
        let rows: &[&dyn TokenIds] = &[
            &&[VOCAB_MAX][..],
            &&[i64::MAX][..],
            &&[(1_i64 << 32) + 1][..],
            &&[u64::MAX][..],
            &&[-1_i8][..],
            &&[-1_i32][..],
        ];
        for ids in rows {
            let refusal = sequences.push(&row(RowTokens::Ids(*ids))).unwrap_err();
            assert_eq!((&*refusal.field, &*refusal.accepted), ("ids[0]", "0 to 2147483647"));
        }
    }

    #[test]
    fn a_mask_is_of_all_tokens_or_of_the_response() {
        let spans = |spans: &[(u64, u64)]| {
            spans.iter().map(|(begin, end)| Span { begin: *begin, end: *end }).collect::<Vec<_>>()
        };
        let mask = |text: &str| text.bytes().map(|bit| bit == b'1').collect::<Vec<_>>();
        assert_eq!(masked(&mask("1110011"), 7, None), Ok(spans(&[(1, 3), (5, 7)])));
        assert_eq!(masked(&mask("1011"), 7, Some(3)), Ok(spans(&[(3, 4), (5, 7)])));
        assert_eq!(masked(&mask("000"), 3, Some(1)), Ok(vec![]));
        assert_eq!(masked(&mask("1"), 1, None), Ok(vec![]));
        let refused = masked(&mask("11"), 7, Some(3)).unwrap_err();
        assert_eq!(refused, Refusal::new("loss_mask", "2 values", "7 or 4, one for each token"));
        let refused = masked(&mask("11"), 7, None).unwrap_err();
        assert_eq!(refused, Refusal::new("loss_mask", "2 values", "7, one for each token"));
    }

    #[test]
    fn omitted_fields_have_defaults() {
        let mut sequences = Sequences::new(10);
        let ids = RowTokens::Ids(&&[1_i64, 2, 3][..]);
        let prompted = RowTokens::Prompted { prompt: &&[1_i64, 2][..], response: &&[4_i64][..] };
        assert_eq!(sequences.push(&row(ids)), Ok(()));
        assert_eq!(sequences.push(&Row { kind: Some(5), ..row(prompted) }), Ok(()));
        assert_eq!(sequences.push(&Row { weight: Some(0.5), ..row(ids) }), Ok(()));
        let wanted = [
            Scoring { loss: Loss::AllButFirst, weight: 1.0 },
            Scoring { loss: Loss::From(2), weight: 1.0 },
            Scoring { loss: Loss::AllButFirst, weight: 0.5 },
        ];
        assert_eq!(sequences.scoring(), wanted);
        assert_eq!(sequences.kinds(), [0, 5, 0]);
        assert!(sequences.groups().is_empty());
    }
}
