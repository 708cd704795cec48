//! Parts of a forest: the share of a rank, or some of the sequences.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Ending, Forest, Node};
use crate::{NodeId, PlanError};

/// Some of a forest's sequences, with the nodes that they run through.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The nodes in the order they had, chains of them unmerged, each with the tokens it had; only
    /// where no sequence of the part reaches a node's end, it ends where the last of them does.
    pub forest: Forest,
    /// What each node is a copy of.
    pub nodes: Vec<NodeId>,
    /// The number that each sequence had.
    pub sequences: Vec<u32>,
}

impl Forest {
    /// The part of the leaves with these places in [`Forest::leaves`]. A sequence that is a complete
    /// prefix of others goes with the first leaf below its end. So the parts of ranges that cover
    /// the leaves have every sequence once. Sequences keep their order. An empty range is an empty
    /// part.
    ///
    /// # Errors
    /// `Count` for a range that ends before it begins or after the last leaf.
    pub fn part_of_leaves(&self, leaves: Range<usize>) -> Result<Part, PlanError> {
        let refuse = |what, seen: usize, accepted| {
            Err(PlanError::Count { what, seen: seen as u64, accepted })
        };
        // A leaf and the nodes on its path alone: from `begins` of its place to that of the next.
        let mut begins = vec![0];
        begins.extend(self.leaves().map(|leaf| leaf.node.0 + 1));
        let count = begins.len() - 1;
        if leaves.end > count {
            return refuse("last leaf of a part", leaves.end, format!("{count} at most"));
        }
        if leaves.start > leaves.end {
            let accepted = format!("{} at most, where it ends", leaves.end);
            return refuse("first leaf of a part", leaves.start, accepted);
        }
        let own = begins[leaves.start]..begins[leaves.end];
        let sequences = (0..).zip(&self.endings).filter(|(_, end)| own.contains(&end.node.0));
        let sequences: Vec<u32> = sequences.map(|(sequence, _)| sequence).collect();
        Ok(self.part(sequences))
    }

    /// The part of these sequences; the part's sequence i is `sequences[i]`. They may come in any
    /// order, and the same one twice. None is an empty part.
    ///
    /// # Errors
    /// `Count` for a sequence that the forest does not have.
    pub fn part_of_sequences(&self, sequences: &[u32]) -> Result<Part, PlanError> {
        if let Some(&seen) = sequences.iter().find(|at| **at as usize >= self.endings.len()) {
            let accepted = format!("below {}", self.endings.len());
            return Err(PlanError::Count { what: "sequence", seen: seen.into(), accepted });
        }
        Ok(self.part(sequences.to_vec()))
    }

    fn part(&self, sequences: Vec<u32>) -> Part {
        // How far each node is run through: 0 for one that is not.
        let mut reached = vec![0; self.nodes.len()];
        for &sequence in &sequences {
            let Ending { node, tokens } = self.endings[sequence as usize];
            let mut reach = tokens;
            for NodeId(id) in self.path(node) {
                let seen = &mut reached[id as usize];
                // Whoever came here before has been all the way up.
                let known = *seen > 0;
                *seen = reach.max(*seen);
                if known {
                    break;
                }
                reach = self.nodes[id as usize].tokens.begin;
            }
        }
        let mut part = Part { sequences, ..Part::default() };
        let mut nodes = Vec::new();
        // Where each node is in the part.
        let mut places = vec![u32::MAX; self.nodes.len()];
        for (id, &reach) in reached.iter().enumerate().filter(|(_, reach)| **reach > 0) {
            places[id] = nodes.len() as u32;
            let mut tokens = self.nodes[id].tokens;
            tokens.end = reach;
            nodes.push(Node::of(tokens));
            part.nodes.push(NodeId(id as u32));
        }
        let endings = part.sequences.iter().map(|&sequence| {
            let Ending { node, tokens } = self.endings[sequence as usize];
            Ending { node: NodeId(places[node.0 as usize]), tokens }
        });
        let endings = endings.collect();
        part.forest = Self::link(nodes, endings);
        part
    }
}
