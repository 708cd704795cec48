//! Parts of a forest: some of its sequences, for example the share of a rank.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Ending, Forest, Node};
use crate::model::count;
use crate::{NodeId, PlanError};

/// Some sequences of a forest, with their nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The nodes in their order, chains unmerged. A node keeps its tokens up to the last one that a sequence of the
    /// part reaches.
    pub forest: Forest,
    /// The original of each node.
    pub nodes: Vec<NodeId>,
    /// The original number of each sequence.
    pub sequences: Vec<u32>,
}

impl Forest {
    /// Returns the part of the leaves at these positions of [`Forest::leaves`]. A sequence that is a complete
    /// prefix of others goes with the first leaf below its end, so parts that cover all leaves have every
    /// sequence once. Sequences keep their order. The part of an empty range is empty.
    ///
    /// # Errors
    /// `Count` for a range that is reversed or exceeds the leaves.
    pub fn part_of_leaves(&self, leaves: Range<usize>) -> Result<Part, PlanError> {
        // Leaf i and the nodes on its path alone have numbers `begins[i]..begins[i + 1]`.
        let mut begins = vec![0];
        begins.extend(self.leaves().map(|leaf| leaf.node.0 + 1));
        count("last leaf of a part", leaves.end as u64, 0, begins.len() as u64 - 1)?;
        count("first leaf of a part", leaves.start as u64, 0, leaves.end as u64)?;
        let own = begins[leaves.start]..begins[leaves.end];
        let sequences = (0..).zip(&self.endings).filter(|(_, end)| own.contains(&end.node.0));
        let sequences: Vec<u32> = sequences.map(|(sequence, _)| sequence).collect();
        Ok(self.part(sequences))
    }

    /// Returns the part of these sequences; sequence i of the part is `sequences[i]`. Any order and duplicates are
    /// accepted. The part of no sequences is empty.
    ///
    /// # Errors
    /// `Count` for an unknown sequence.
    pub fn part_of_sequences(&self, sequences: &[u32]) -> Result<Part, PlanError> {
        if let Some(&seen) = sequences.iter().find(|at| **at as usize >= self.endings.len()) {
            let accepted = format!("below {}", self.endings.len());
            return Err(PlanError::Count { what: "sequence", seen: seen.into(), accepted });
        }
        Ok(self.part(sequences.to_vec()))
    }

    fn part(&self, sequences: Vec<u32>) -> Part {
        // Last position reached in each node; 0 for nodes outside the part.
        let mut reached = vec![0; self.nodes.len()];
        for &sequence in &sequences {
            let Ending { node, tokens } = self.endings[sequence as usize];
            let mut reach = tokens;
            for NodeId(id) in self.path(node) {
                let seen = &mut reached[id as usize];
                // The ancestors of a known node are known.
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
        // Number of each node in the part.
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
