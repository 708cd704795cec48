//! Parts of a forest: some of its sequences, for example the share of a rank.

use super::{Ending, Forest, Node};
use crate::{NodeId, PlanError};

/// Some sequences of a forest, with their nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
        // Last position reached in each node; 0 for nodes outside the part.
        let mut reached = vec![0; self.nodes.len()];
        for &sequence in sequences {
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
        let mut part = Part { sequences: sequences.to_vec(), ..Part::default() };
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
        let endings = sequences.iter().map(|&sequence| {
            let Ending { node, tokens } = self.endings[sequence as usize];
            Ending { node: NodeId(places[node.0 as usize]), tokens }
        });
        let endings = endings.collect();
        part.forest = Self::link(nodes, endings);
        Ok(part)
    }
}
