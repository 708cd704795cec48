//! Drafts beside a model that looks at every position of every response.

use proptest::prelude::*;

use super::{VOCAB, history};
use crate::limits::*;
use crate::{Digest, History, Options, Weighing};

/// A response with its reward and epoch.
type Recorded = (Vec<u32>, f32, u32);

/// What follows the longest match, as the rule says it.
fn naive(
    prompt: &[u32],
    all: &[Recorded],
    end: &[u32],
    max: usize,
    weighing: Weighing,
) -> Vec<u32> {
    let rewards = || all.iter().map(|it| it.1);
    let least = rewards().fold(f32::INFINITY, f32::min);
    let greatest = rewards().fold(f32::NEG_INFINITY, f32::max);
    let latest = all.iter().map(|it| it.2).max().unwrap_or(0);
    let weight = |reward: f32, epoch: u32| match weighing {
        Weighing::Count => 1.0,
        Weighing::Reward => {
            let above = if greatest > least { (reward - least) / (greatest - least) } else { 1.0 };
            (REWARD_WEIGHT_MIN + above) * EPOCH_DECAY.powi((latest - epoch) as i32)
        }
    };
    for count in (MATCH_TOKENS_MIN..=CONTEXT_TOKENS.min(end.len())).rev() {
        let wanted = &end[end.len() - count..];
        // What is left of each response after a match, its weight, and the order of recording.
        let mut votes: Vec<(&[u32], f32)> = Vec::new();
        let tail = &prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..];
        let texts: Vec<Vec<u32>> = all.iter().map(|it| [tail, it.0.as_slice()].concat()).collect();
        for (text, (_, reward, epoch)) in texts.iter().zip(all) {
            for at in tail.len()..=text.len() {
                if at >= count && text[at - count..at] == *wanted {
                    votes.push((&text[at..], weight(*reward, *epoch)));
                }
            }
        }
        if votes.is_empty() {
            continue;
        }
        assert!(votes.len() <= VOTES_MAX, "the model has no sample");
        let sum: f32 = votes.iter().map(|it| it.1).sum();
        let mut drafted = Vec::new();
        while drafted.len() < max {
            let mut sums: Vec<(Option<u32>, f32)> = Vec::new();
            for (text, weight) in &votes {
                let next = text.first().copied();
                // The latest occurrence last, which wins among equals.
                let before = sums.iter().position(|it| it.0 == next).map(|at| sums.remove(at));
                sums.push((next, before.map_or(0.0, |it| it.1) + weight));
            }
            let best = sums.iter().fold(
                (None, -1.0),
                |best: (Option<u32>, f32), it| {
                    if it.1 >= best.1 { *it } else { best }
                },
            );
            let (Some(token), true) = (best.0, best.1 >= PATH_SHARE_MIN * sum) else { break };
            drafted.push(token);
            votes.retain_mut(|(text, _)| {
                let agrees = text.first() == Some(&token);
                *text = text.get(1..).unwrap_or_default();
                agrees
            });
        }
        return drafted;
    }
    Vec::new()
}

fn recorded() -> impl Strategy<Value = Recorded> {
    (prop::collection::vec(0_u32..3, 0..14), 0_u8..3, 0_u32..2)
        .prop_map(|(tokens, reward, epoch)| (tokens, f32::from(reward), epoch))
}

proptest! {
    #[test]
    fn drafts_are_those_of_a_naive_search(
        prompt in prop::collection::vec(0_u32..3, 0..10),
        mut all in prop::collection::vec(recorded(), 0..5),
        end in prop::collection::vec(0_u32..3, 0..10),
        max in 0_usize..6,
        by_reward in any::<bool>(),
    ) {
        let weighing = if by_reward { Weighing::Reward } else { Weighing::Count };
        all.sort_by_key(|it| it.2);
        let options = Options { weighing, ..Options::of_vocab(3) };
        let history = History::new(options).unwrap();
        for (response, reward, epoch) in &all {
            history.record(&prompt, response, *reward, *epoch).unwrap();
        }
        let draft = history.draft(Digest::of(&prompt), &end, max).unwrap();
        prop_assert_eq!(draft.tokens, naive(&prompt, &all, &end, max, weighing));
    }

    #[test]
    fn any_order_of_records_of_an_epoch_matches_as_much(
        all in prop::collection::vec(prop::collection::vec(0_u32..3, 0..20), 1..12),
        end in prop::collection::vec(0_u32..3, 3..8),
    ) {
        let drafts = [false, true].map(|turned| {
            let history = history();
            let mut all = all.clone();
            if turned {
                all.reverse();
            }
            for response in &all {
                history.record(&[], response, 0.0, 0).unwrap();
            }
            history.draft(Digest::of(&[]), &end, 32).unwrap().matched_tokens
        });
        prop_assert_eq!(drafts[0], drafts[1]);
    }
}

fn drafted(history: &History, prompt: &[u32], end: &[u32], max: usize) -> Vec<u32> {
    history.draft(Digest::of(prompt), end, max).unwrap().tokens
}

#[test]
fn a_response_begins_after_the_end_of_its_prompt() {
    let history = history();
    let prompt: Vec<u32> = (0..20).collect();
    history.record(&prompt, &[500, 501, 502], 1.0, 0).unwrap();
    assert_eq!(drafted(&history, &prompt, &prompt, 8), [500, 501, 502]);
    assert_eq!(drafted(&history, &prompt, &[18, 19, 500], 8), [501, 502]);
    assert_eq!(drafted(&history, &prompt, &[19, 500], 8), [0; 0], "two tokens are no match");
    assert_eq!(drafted(&history, &prompt, &[500, 501, 502], 8), [0; 0], "it ended there");
}

#[test]
fn the_longest_match_wins_over_many_shorter_ones() {
    let history = history();
    history.record(&[1, 2, 3, 4, 5, 6, 7], &[100], 0.0, 0).unwrap();
    let prompt = [1, 2, 3, 4, 5, 6, 7];
    for _ in 0..9 {
        history.record(&prompt, &[50, 5, 6, 7, 200], 0.0, 0).unwrap();
    }
    let draft = history.draft(Digest::of(&prompt), &[2, 3, 4, 5, 6, 7], 1).unwrap();
    assert_eq!((draft.tokens, draft.matched_tokens), (vec![50], 6));
    let draft = history.draft(Digest::of(&prompt), &[50, 5, 6, 7], 1).unwrap();
    assert_eq!((draft.tokens, draft.matched_tokens), (vec![200], 4));
}

#[test]
fn reward_and_recency_weigh() {
    let history = history();
    let (prompt, end) = ([1, 2, 3], [1, 2, 3]);
    for (token, reward, epoch) in [(10, 0.0, 0), (10, 0.0, 0), (11, 1.0, 0)] {
        history.record(&prompt, &[token], reward, epoch).unwrap();
    }
    assert_eq!(drafted(&history, &prompt, &end, 1), [11], "one good response over two bad ones");
    history.record(&prompt, &[12], 0.9, 1).unwrap();
    assert_eq!(drafted(&history, &prompt, &end, 1), [12], "and a later one over an earlier one");
}

#[test]
fn a_draft_ends_where_its_votes_are_too_few() {
    let history = history();
    // Each token of the path has half of the votes of the one before: 1/2, 1/4, 1/8, 1/16.
    for number in 0..16_u32 {
        let path: Vec<u32> = (0..4).map(|bit| 10 * bit + (number >> bit & 1)).collect();
        history.record(&[1, 2, 3], &path, 0.0, 0).unwrap();
    }
    assert_eq!(drafted(&history, &[1, 2, 3], &[1, 2, 3], 8).len(), 3);
}

#[test]
fn of_many_occurrences_evenly_spaced_ones_vote() {
    let history = history();
    // The first 32 would agree on 8, the last 32 on 10; of all 128, most say 9.
    for number in 0..4 * VOTES_MAX as u32 {
        let token = match number {
            0..40 => 8,
            88.. => 10,
            _ => 9,
        };
        history.record(&[1, 2, 3], &[token, 7], 0.0, 0).unwrap();
    }
    assert_eq!(drafted(&history, &[1, 2, 3], &[1, 2, 3], 8), [9, 7]);
}

#[test]
fn weights_are_of_what_is_kept_and_of_any_reward() {
    let history = history();
    let (prompt, end) = ([1, 2, 3], [1, 2, 3]);
    // With the reward of epoch 0, which is forgotten, the others would weigh about the same.
    history.record(&prompt, &[9], -1000.0, 0).unwrap();
    for (token, reward) in [(10, 0.0), (10, 0.0), (11, 1.0)] {
        history.record(&prompt, &[token], reward, 2).unwrap();
    }
    assert_eq!(drafted(&history, &prompt, &end, 1), [11]);
    // The best one is of an epoch that stays when another is forgotten.
    for (token, reward, epoch) in [(9, 0.0, 0), (20, 10.0, 1), (21, 0.0, 2), (21, 0.0, 2)] {
        history.record(&[4, 5, 6], &[token], reward, epoch).unwrap();
    }
    assert_eq!(drafted(&history, &[4, 5, 6], &[4, 5, 6], 1), [20]);
    // The distance of these has no f32.
    for (token, reward) in [(12, f32::MAX), (13, f32::MIN), (13, f32::MIN)] {
        history.record(&prompt, &[token], reward, 4).unwrap();
    }
    assert_eq!(drafted(&history, &prompt, &end, 1), [12]);
}

#[test]
fn only_the_last_tokens_of_a_sequence_are_read() {
    let history = history();
    history.record(&[1, 2, 3], &[4], 0.0, 0).unwrap();
    // Ids that would be refused are further back.
    let mut sequence = vec![VOCAB; 5];
    sequence.extend([1, 1, 1, 1, 1, 2, 3]);
    assert_eq!(drafted(&history, &[1, 2, 3], &sequence, 1), [4]);
    sequence.push(VOCAB);
    let said = history.draft(Digest::of(&[1]), &sequence, 4).unwrap_err().to_string();
    assert_eq!(said, "id 12 of end is 1000; accepted: 0 to 999");
}

#[test]
fn unknown_prompts_and_short_ends_have_no_draft() {
    let history = history();
    history.record(&[1, 2, 3], &[4, 5, 6], 0.0, 0).unwrap();
    assert_eq!(drafted(&history, &[1, 2], &[1, 2, 3], 4), [0; 0]);
    assert_eq!(drafted(&history, &[1, 2, 3], &[], 4), [0; 0]);
    assert_eq!(drafted(&history, &[1, 2, 3], &[1, 2, 3], 0), [0; 0]);
    assert_eq!(history.stats().prompts, 1);
    assert_eq!(
        history.draft(Digest::of(&[1]), &[VOCAB], 4).unwrap_err().to_string(),
        "id 0 of end is 1000; accepted: 0 to 999"
    );
}
