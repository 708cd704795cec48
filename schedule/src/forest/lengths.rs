//! Builds forests from lengths, without token ids.

use super::ids::check_tokens;
use super::{Ending, Forest, NO_PARENT, Node};
use crate::limits::{NODES_MAX, PROMPT_TOKENS_MIN, RESPONSES_MAX, TOKENS_MAX};
use crate::model::count;
use crate::{NodeId, PlanError, Span};

impl Forest {
    /// Builds a forest from nodes in depth-first order. `parents[i]` is less than i, or [`NO_PARENT`] for a root;
    /// `lengths[i]` is the tokens of node i. One sequence ends in every leaf, numbered in order.
    ///
    /// # Errors
    /// `Node` for a parent out of depth-first order, `Tokens` for a length outside 1 to [`TOKENS_MAX`] or a longer
    /// path, `Count` for too many nodes or different numbers of parents and lengths.
    pub fn from_nodes(parents: &[u32], lengths: &[u64]) -> Result<Self, PlanError> {
        let nodes = shape(parents, lengths)?;
        let starts = nodes.iter().skip(1).map(|node| Some(node.tokens.begin)).chain([None]);
        let leaves = (0..).zip(nodes.iter().zip(starts)).filter_map(|(id, (node, next))| {
            // A child begins where its parent ends.
            let tokens = node.tokens.end;
            (next != Some(tokens)).then_some(Ending { node: NodeId(id), tokens })
        });
        let endings = leaves.collect();
        Ok(Self::link(nodes, endings))
    }

    /// Builds a forest from nodes and the ends of its sequences: `endings[i]`, at the end of a node or inside it,
    /// is that of sequence i. Several sequences may end at the same token.
    ///
    /// # Errors
    /// Those of [`Forest::from_nodes`]; `Count` for no or too many endings, `Ending` for one outside its node,
    /// `Leaf` for a leaf at whose end no sequence ends.
    pub fn from_nodes_with(
        parents: &[u32],
        lengths: &[u64],
        endings: &[Ending],
    ) -> Result<Self, PlanError> {
        let nodes = shape(parents, lengths)?;
        count("endings", endings.len() as u64, 1, NODES_MAX as u64)?;
        for (sequence, ending) in endings.iter().enumerate() {
            let tokens = nodes.get(ending.node.0 as usize).map(|node| node.tokens);
            if !tokens.is_some_and(|t| t.begin < ending.tokens && ending.tokens <= t.end) {
                let Ending { node, tokens: seen } = *ending;
                let accepted = tokens.map_or_else(
                    || format!("nodes 0 to {}", nodes.len() - 1),
                    |t| format!("{} to {} tokens", t.begin + 1, t.end),
                );
                return Err(PlanError::Ending { sequence, node: node.0, seen, accepted });
            }
        }
        let forest = Self::link(nodes, endings.to_vec());
        // `link` sets `sequence` from below, so it is unset in a leaf at whose end no sequence ends.
        let bare = |node: &Node| node.sequence == u32::MAX;
        let mut ids = 0..forest.nodes.len() as u32;
        match ids.find(|id| forest.is_leaf(NodeId(*id)) && bare(forest.node(NodeId(*id)))) {
            None => Ok(forest),
            Some(node) => Err(PlanError::Leaf { node }),
        }
    }

    /// Builds a flat group: a prompt that all responses share. Response i is sequence i, and its labels are the
    /// tokens from position `prompt` on.
    ///
    /// # Errors
    /// `Tokens` for a prompt, response or sequence of invalid length, `Count` for too few or too many responses.
    pub fn group(prompt: u64, responses: &[u64]) -> Result<Self, PlanError> {
        check_tokens(|| "prompt".to_owned(), prompt, PROMPT_TOKENS_MIN, TOKENS_MAX)?;
        count("responses", responses.len() as u64, 1, RESPONSES_MAX as u64)?;
        for (index, &seen) in responses.iter().enumerate() {
            check_tokens(|| format!("response {index}"), seen, 1, TOKENS_MAX)?;
        }
        let parents = [&[NO_PARENT][..], &vec![0; responses.len()]].concat();
        Self::from_nodes(&parents, &[&[prompt], responses].concat())
    }
}

/// Returns nodes in depth-first order with their tokens.
fn shape(parents: &[u32], lengths: &[u64]) -> Result<Vec<Node>, PlanError> {
    count("nodes", parents.len() as u64, 1, NODES_MAX as u64)?;
    if lengths.len() != parents.len() {
        let accepted = format!("{}, one for each node", parents.len());
        return Err(PlanError::Count { what: "lengths", seen: lengths.len() as u64, accepted });
    }
    let mut nodes: Vec<Node> = Vec::with_capacity(parents.len());
    // Path to the previous node.
    let mut path: Vec<u32> = Vec::new();
    for (id, (&parent, &length)) in (0_u32..).zip(parents.iter().zip(lengths)) {
        while path.last().is_some_and(|last| *last != parent) {
            path.pop();
        }
        if path.is_empty() && parent != NO_PARENT {
            return Err(PlanError::Node { id, parent });
        }
        let begin = path.last().map_or(0, |last| nodes[*last as usize].tokens.end);
        check_tokens(|| format!("node {id}"), length, 1, TOKENS_MAX)?;
        check_tokens(|| format!("the path to node {id}"), begin + length, 1, TOKENS_MAX)?;
        nodes.push(Node::of(Span { begin, end: begin + length }));
        path.push(id);
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;

    /// Trees as nested choices: each node's parent is any on the path to the one before, or none.
    fn parents() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(any::<proptest::sample::Index>(), 0..40).prop_map(|picks| {
            let (mut parents, mut path) = (vec![NO_PARENT], vec![0_u32]);
            for (id, pick) in (1_u32..).zip(picks) {
                path.truncate(pick.index(path.len() + 1));
                parents.push(path.last().copied().unwrap_or(NO_PARENT));
                path.push(id);
            }
            parents
        })
    }

    proptest! {
        #[test]
        fn a_subtree_holds_the_nodes_whose_path_contains_its_root(parents in parents()) {
            let lengths: Vec<u64> = (1..=parents.len() as u64).collect();
            let forest = Forest::from_nodes(&parents, &lengths).unwrap();
            for id in 0..parents.len() as u32 {
                let node = forest.node(NodeId(id));
                prop_assert_eq!(node.parent.map_or(NO_PARENT, |parent| parent.0), parents[id as usize]);
                let before: u64 = forest.path(NodeId(id)).skip(1)
                    .map(|above| lengths[above.0 as usize]).sum();
                prop_assert_eq!(node.tokens.begin, before);
                prop_assert_eq!(node.tokens.count(), lengths[id as usize]);
                let below: Vec<u32> = (0..parents.len() as u32)
                    .filter(|other| forest.path(NodeId(*other)).any(|above| above.0 == id))
                    .collect();
                prop_assert_eq!(&below, &(id..node.subtree_end).collect::<Vec<_>>());
                let children: Vec<u32> = forest.children(NodeId(id)).map(|child| child.0).collect();
                let wanted: Vec<u32> = (0..parents.len() as u32)
                    .filter(|other| parents[*other as usize] == id)
                    .collect();
                prop_assert_eq!(&children, &wanted);
                let end = forest.endings()[node.sequence as usize].node;
                prop_assert!(below.contains(&end.0), "its sequence runs through it");
            }
        }
    }

    #[test]
    fn a_flat_group_is_a_prompt_and_its_responses() {
        let tree = Forest::from_nodes(&[NO_PARENT, 0, 0, 0], &[5, 2, 1, 2]).unwrap();
        assert_eq!(Forest::group(5, &[2, 1, 2]), Ok(tree));
    }

    #[test]
    fn parents_out_of_depth_first_order_are_refused() {
        let none = NO_PARENT;
        assert_eq!(
            Forest::from_nodes(&[none, 0, none, 0], &[1; 4]),
            Err(PlanError::Node { id: 3, parent: 0 })
        );
        assert_eq!(Forest::from_nodes(&[0], &[1]), Err(PlanError::Node { id: 0, parent: 0 }));
        assert_eq!(
            Forest::from_nodes(&[none, 0], &[TOKENS_MAX, 1]),
            Err(PlanError::Tokens {
                of: "the path to node 1".to_owned(),
                seen: TOKENS_MAX + 1,
                accepted: format!("1 to {TOKENS_MAX}"),
            })
        );
        assert!(Forest::from_nodes(&[none], &[0]).is_err());
        assert!(Forest::from_nodes(&[none], &[1, 1]).is_err());
        assert!(Forest::from_nodes(&[], &[]).is_err());
    }
}
