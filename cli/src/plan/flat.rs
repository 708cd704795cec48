//! Division of a forest into flat groups for pipelines: a prompt and its responses each.
//!
//! A pipeline shares one prefix per group. In a tree with several levels, a group near the root recomputes
//! shared tokens below its prompt, and groups near the leaves recompute those above. The division with the
//! fewest tokens is found from leaves to roots: a subtree is one group, or its children's groups and the
//! sequences that end in its root node separately. The best prompt of one group ends with its root node, or
//! one token before a sequence that ends in it.

use dormouse_schedule::NodeId;
use dormouse_schedule::forest::Forest;

/// Minimum tokens of a sequence in a group: a prompt of two and one response token.
pub(crate) const TOKENS_MIN: u64 = 3;
/// Minimum tokens of a prompt: one shared row, one that predicts the response.
const PROMPT_TOKENS_MIN: u64 = 2;

/// Tokens of a prompt and of each response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) prompt: u64,
    pub(super) responses: Vec<u64>,
}

/// Number of sequences and their total tokens.
#[derive(Clone, Copy, Default)]
struct Sum {
    sequences: u64,
    tokens: u64,
}

/// Returns the groups by node, then single sequences in order. Sequences shorter than [`TOKENS_MIN`] are
/// omitted.
pub(super) fn groups(forest: &Forest) -> Vec<Group> {
    let prompts = prompts(forest);
    // The topmost group on each path; parents precede children.
    let mut group_of: Vec<Option<usize>> = vec![None; forest.nodes().len()];
    let mut groups = Vec::new();
    for (id, node) in forest.nodes().iter().enumerate() {
        let above = node.parent.and_then(|NodeId(parent)| group_of[parent as usize]);
        group_of[id] = above.or_else(|| {
            prompts[id].map(|prompt| {
                groups.push(Group { prompt, responses: Vec::new() });
                groups.len() - 1
            })
        });
    }
    let mut alone = Vec::new();
    for ending in forest.endings() {
        let group = group_of[ending.node.0 as usize];
        let group = group.filter(|group| groups[*group].prompt < ending.tokens);
        match group {
            Some(group) => {
                let prompt = groups[group].prompt;
                groups[group].responses.push(ending.tokens - prompt);
            }
            None if ending.tokens < TOKENS_MIN => {}
            None => alone.push(Group {
                prompt: PROMPT_TOKENS_MIN,
                responses: vec![ending.tokens - PROMPT_TOKENS_MIN],
            }),
        }
    }
    groups.extend(alone);
    groups
}

/// Returns, for each node, the prompt of its subtree if one group runs fewer tokens than several.
fn prompts(forest: &Forest) -> Vec<Option<u64>> {
    let nodes = forest.nodes();
    let mut prompts = vec![None; nodes.len()];
    // Sequences below each node, and the fewest tokens of its children's subtrees.
    let mut below = vec![Sum::default(); nodes.len()];
    let mut least = vec![0_u64; nodes.len()];
    let mut order = forest.sequences_by_ending();
    for id in (0..nodes.len()).rev() {
        let mut after = below[id];
        let ended: Vec<u64> = ended_in(forest, id, &mut order);
        let mut alone: u64 = ended.iter().copied().map(tokens_alone).sum();
        least[id] += alone;
        let span = nodes[id].tokens;
        let mut consider = |prompt: u64, after: Sum, alone: u64| {
            let shared = after.sequences.saturating_sub(1) * prompt;
            let all = (after.tokens - shared.min(after.tokens)) + alone;
            if prompt >= PROMPT_TOKENS_MIN && after.sequences > 1 && all < least[id] {
                (prompts[id], least[id]) = (Some(prompt), all);
            }
        };
        consider(span.end, after, alone);
        for tokens in ended {
            after = Sum { sequences: after.sequences + 1, tokens: after.tokens + tokens };
            alone -= tokens_alone(tokens);
            consider(tokens - 1, after, alone);
        }
        if let Some(NodeId(parent)) = nodes[id].parent {
            let (parent, own) = (parent as usize, least[id]);
            below[parent].sequences += after.sequences;
            below[parent].tokens += after.tokens;
            least[parent] += own;
        }
    }
    prompts
}

/// Removes the sequences that end in node `id` from the end of `order` and returns their tokens, longest
/// first.
fn ended_in(forest: &Forest, id: usize, order: &mut Vec<u32>) -> Vec<u64> {
    let mut ended = Vec::new();
    while let Some(ending) = order.last().map(|sequence| forest.endings()[*sequence as usize])
        && ending.node.0 as usize == id
    {
        ended.push(ending.tokens);
        order.pop();
    }
    ended
}

/// Returns the tokens that a single sequence runs.
fn tokens_alone(tokens: u64) -> u64 {
    if tokens < TOKENS_MIN { 0 } else { tokens }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Tokens that groups run, by the definition: prompts once, what follows for each.
    fn tokens(groups: &[Group]) -> u64 {
        groups.iter().map(|group| group.prompt + group.responses.iter().sum::<u64>()).sum()
    }

    /// The fewest tokens of all ways to give each sequence a prompt of its own, or none: prompts are
    /// common starts of two or more sequences, and no sequence has two.
    fn fewest(sequences: &[Vec<i64>]) -> u64 {
        fn best(rest: &[Vec<i64>], prompts: &[Vec<i64>]) -> u64 {
            let alone = |it: &Vec<i64>| if it.len() < 3 { 0 } else { it.len() as u64 };
            let Some((prompt, prompts)) = prompts.split_first() else {
                return rest.iter().map(alone).sum();
            };
            let without = best(rest, prompts);
            let (of, left): (Vec<_>, Vec<_>) = rest
                .iter()
                .cloned()
                .partition(|it| it.starts_with(prompt) && it.len() > prompt.len());
            if of.len() < 2 {
                return without;
            }
            let follows = of.iter().map(|it| (it.len() - prompt.len()) as u64).sum::<u64>();
            without.min(prompt.len() as u64 + follows + best(&left, prompts))
        }
        let prompts: BTreeSet<Vec<i64>> =
            sequences.iter().flat_map(|it| (2..it.len()).map(|end| it[..end].to_vec())).collect();
        best(sequences, &prompts.into_iter().collect::<Vec<_>>())
    }

    fn forest(sequences: &[Vec<i64>]) -> Forest {
        let mut offsets = vec![0];
        offsets.extend(sequences.iter().scan(0, |end, ids| {
            *end += ids.len() as u64;
            Some(*end)
        }));
        Forest::from_ids(&sequences.concat(), &offsets, &[], 10).unwrap()
    }

    proptest! {
        #[test]
        fn runs_the_fewest_tokens(
            sequences in proptest::collection::vec(proptest::collection::vec(0_i64..2, 1..6), 1..6),
        ) {
            let groups = groups(&forest(&sequences));
            prop_assert_eq!(tokens(&groups), fewest(&sequences), "{:?}", groups);
            let long = sequences.iter().filter(|it| it.len() as u64 >= TOKENS_MIN).count();
            let members = groups.iter().map(|group| group.responses.len()).sum::<usize>();
            prop_assert_eq!(members, long, "each sequence is in one group");
            for group in &groups {
                prop_assert!(group.prompt >= PROMPT_TOKENS_MIN);
                prop_assert!(group.responses.iter().all(|tokens| *tokens > 0));
            }
        }
    }

    #[test]
    fn keeps_prompts_with_a_short_common_start_apart() {
        // All begin with 1 2; sharing that alone would run each prompt's rest for each response.
        let of = |middle: &[i64], last: i64| [&[1, 2], middle, &[last; 2]].concat();
        let (a, b) = ([3, 4, 5], [6, 7, 8]);
        let batch = [of(&a, 1), of(&a, 2), of(&b, 1), of(&b, 2), vec![1, 2], vec![9; 4]];
        let wanted = [
            Group { prompt: 5, responses: vec![2, 2] },
            Group { prompt: 5, responses: vec![2, 2] },
            Group { prompt: 2, responses: vec![2] },
        ];
        assert_eq!(groups(&forest(&batch)), wanted);
    }
}
