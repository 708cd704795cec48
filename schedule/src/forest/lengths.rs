//! Forests of which only the shape is known: lengths, no token ids.

use super::{Ending, Forest, NO_PARENT, Node};
use crate::limits::{NODES_MAX, TOKENS_MAX};
use crate::{NodeId, PlanError, Span};

impl Forest {
    /// A forest from its nodes, depth first: `parents[i] < i`, or [`NO_PARENT`] for a root, and a
    /// node's subtree is a run of numbers; `lengths[i]` is node i's tokens. Every leaf ends one
    /// sequence; they are numbered in order.
    ///
    /// # Errors
    /// `Node` for a parent that is not depth first, `NodeLength` for a length outside 1 to
    /// [`TOKENS_MAX`] or a path that grows longer, `Count` for too many nodes or as many parents
    /// as there are no lengths for.
    pub fn from_nodes(parents: &[u32], lengths: &[u64]) -> Result<Self, PlanError> {
        let mut forest = Self::shape(parents, lengths)?;
        let leaves = (0..parents.len() as u32).filter(|id| forest.is_leaf(NodeId(*id)));
        let leaves: Vec<u32> = leaves.collect();
        for (sequence, leaf) in leaves.into_iter().enumerate() {
            let tokens = forest.nodes[leaf as usize].tokens.end;
            forest.endings.push(Ending { node: NodeId(leaf), tokens });
            forest.nodes[leaf as usize].sequence = sequence as u32;
        }
        // A node's own number is not below any of its leaves', so children are set before parents.
        for id in (0..forest.nodes.len()).rev() {
            let child = id + 1;
            if forest.nodes[id].subtree_end as usize > child {
                forest.nodes[id].sequence = forest.nodes[child].sequence;
            }
        }
        Ok(forest)
    }

    /// A flat group: a prompt that all responses share and nothing else shared, whatever their ids.
    /// Response i is sequence i. Lengths have been checked.
    pub(crate) fn flat(prompt: u64, responses: impl ExactSizeIterator<Item = u64>) -> Self {
        let count = responses.len() as u32;
        let root = Node {
            parent: None,
            tokens: Span { begin: 0, end: prompt },
            subtree_end: count + 1,
            sequence: 0,
        };
        let mut forest = Self { nodes: vec![root], endings: Vec::with_capacity(count as usize) };
        for (sequence, length) in (0..count).zip(responses) {
            let tokens = Span { begin: prompt, end: prompt + length };
            let id = sequence + 1;
            let parent = Some(NodeId(0));
            forest.nodes.push(Node { parent, tokens, subtree_end: id + 1, sequence });
            forest.endings.push(Ending { node: NodeId(id), tokens: tokens.end });
        }
        forest
    }

    fn shape(parents: &[u32], lengths: &[u64]) -> Result<Self, PlanError> {
        let count = |what, seen: usize, accepted: String| {
            Err(PlanError::Count { what, seen: seen as u64, accepted })
        };
        if parents.is_empty() || parents.len() > NODES_MAX {
            return count("nodes", parents.len(), format!("1 to {NODES_MAX}"));
        }
        if lengths.len() != parents.len() {
            return count("lengths", lengths.len(), format!("{}, one a node", parents.len()));
        }
        let mut nodes: Vec<Node> = Vec::with_capacity(parents.len());
        // The path to the node before, by which a parent is depth first or not.
        let mut path: Vec<u32> = Vec::new();
        for (id, (&parent, &length)) in (0_u32..).zip(parents.iter().zip(lengths)) {
            while let Some(&last) = path.last()
                && last != parent
            {
                nodes[last as usize].subtree_end = id;
                path.pop();
            }
            if path.is_empty() && parent != NO_PARENT {
                return Err(PlanError::Node { id, parent });
            }
            let begin = path.last().map_or(0, |last| nodes[*last as usize].tokens.end);
            if !(1..=TOKENS_MAX).contains(&length) || begin + length > TOKENS_MAX {
                return Err(PlanError::NodeLength { id, seen: length, begin });
            }
            let tokens = Span { begin, end: begin + length };
            let parent = path.last().map(|last| NodeId(*last));
            nodes.push(Node { parent, tokens, subtree_end: id + 1, sequence: 0 });
            path.push(id);
        }
        for id in path {
            nodes[id as usize].subtree_end = parents.len() as u32;
        }
        Ok(Self { nodes, endings: Vec::new() })
    }
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
        fn a_subtree_is_all_that_has_the_node_on_its_path(parents in parents()) {
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
    fn what_is_not_depth_first_is_refused() {
        let none = NO_PARENT;
        assert_eq!(
            Forest::from_nodes(&[none, 0, none, 0], &[1; 4]),
            Err(PlanError::Node { id: 3, parent: 0 })
        );
        assert_eq!(Forest::from_nodes(&[0], &[1]), Err(PlanError::Node { id: 0, parent: 0 }));
        assert_eq!(
            Forest::from_nodes(&[none, 0], &[TOKENS_MAX, 1]),
            Err(PlanError::NodeLength { id: 1, seen: 1, begin: TOKENS_MAX })
        );
        assert!(Forest::from_nodes(&[none], &[0]).is_err());
        assert!(Forest::from_nodes(&[none], &[1, 1]).is_err());
        assert!(Forest::from_nodes(&[], &[]).is_err());
    }
}
