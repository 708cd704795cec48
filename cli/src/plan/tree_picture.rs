//! A picture of the prefix trees in text: the trees that save the most, a few levels deep.

use dormouse_schedule::NodeId;
use dormouse_schedule::forest::Forest;

use crate::text::{count, things};

/// Maximum trees drawn.
const TREES_MAX: usize = 4;
/// Maximum levels of a tree.
const LEVELS_MAX: usize = 4;
/// Maximum children of a node drawn, without leaves, which share a line.
const CHILDREN_MAX: usize = 4;
/// Maximum lines of the picture; what exceeds them is counted in the last.
const LINES_MAX: usize = 24;

/// Counts of each node's subtree.
struct Counts<'a> {
    forest: &'a Forest,
    tokens: Vec<u64>,
    sequences: Vec<u64>,
}

/// Draws the trees of a forest, those that save the most tokens first.
pub(super) fn lines(forest: &Forest) -> Vec<String> {
    let counts = Counts::of(forest);
    let mut dense = vec![0_u64; forest.nodes().len()];
    let roots: Vec<NodeId> = forest.roots().collect();
    for ending in forest.endings() {
        let tree = roots.partition_point(|root| root.0 <= ending.node.0).saturating_sub(1);
        dense[roots[tree].0 as usize] += ending.tokens;
    }
    let mut order = roots;
    let saved = |root: &NodeId| dense[root.0 as usize] - counts.tokens[root.0 as usize];
    order.sort_by_key(|root| std::cmp::Reverse(saved(root)));
    let mut lines = Vec::new();
    for root in order.iter().take(TREES_MAX) {
        lines.push(counts.node(*root));
        counts.below(*root, 1, "", &mut lines);
    }
    if lines.len() > LINES_MAX {
        let left = lines.len() - LINES_MAX + 1;
        lines.truncate(LINES_MAX - 1);
        lines.push(format!("… {} not drawn", things(left as u64, "line", "lines")));
    }
    let others = order.get(TREES_MAX..).unwrap_or_default();
    if !others.is_empty() {
        let tokens = others.iter().map(|root| counts.tokens[root.0 as usize]).sum();
        let trees = things(others.len() as u64, "more tree", "more trees");
        lines.push(format!("… {trees} of {}", things(tokens, "token", "tokens")));
    }
    lines
}

impl<'a> Counts<'a> {
    fn of(forest: &'a Forest) -> Self {
        let nodes = forest.nodes();
        let mut tokens: Vec<u64> = nodes.iter().map(|node| node.tokens.count()).collect();
        let mut sequences = vec![0; nodes.len()];
        for ending in forest.endings() {
            sequences[ending.node.0 as usize] += 1;
        }
        // A parent has a smaller number.
        for id in (0..nodes.len()).rev() {
            if let Some(NodeId(parent)) = nodes[id].parent {
                tokens[parent as usize] += tokens[id];
                sequences[parent as usize] += sequences[id];
            }
        }
        Self { forest, tokens, sequences }
    }

    fn node(&self, node: NodeId) -> String {
        let tokens = self.forest.node(node).tokens.count();
        let sequences = self.sequences[node.0 as usize];
        format!(
            "{}, {}",
            things(tokens, "token", "tokens"),
            things(sequences, "sequence", "sequences")
        )
    }

    /// Draws the children of a node, which is at `level` from 1.
    fn below(&self, node: NodeId, level: usize, indent: &str, lines: &mut Vec<String>) {
        let (leaves, inner): (Vec<NodeId>, Vec<NodeId>) =
            self.forest.children(node).partition(|child| self.forest.is_leaf(*child));
        let drawn = if level < LEVELS_MAX { inner.len().min(CHILDREN_MAX) } else { 0 };
        let (drawn, omitted) = inner.split_at(drawn);
        let mut last: Vec<String> = Vec::new();
        last.extend((!omitted.is_empty()).then(|| self.summary(omitted)));
        last.extend((!leaves.is_empty()).then(|| self.leaves(&leaves)));
        for (number, child) in drawn.iter().enumerate() {
            let is_last = last.is_empty() && number + 1 == drawn.len();
            let (branch, below) = if is_last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            lines.push(format!("{indent}{branch}{}", self.node(*child)));
            self.below(*child, level + 1, &format!("{indent}{below}"), lines);
        }
        for (number, line) in last.iter().enumerate() {
            let branch = if number + 1 == last.len() { "└─ " } else { "├─ " };
            lines.push(format!("{indent}{branch}{line}"));
        }
    }

    fn summary(&self, nodes: &[NodeId]) -> String {
        let sum = |of: &[u64]| nodes.iter().map(|node| of[node.0 as usize]).sum::<u64>();
        format!(
            "… {} with all below: {}, {}",
            things(nodes.len() as u64, "node", "nodes"),
            things(sum(&self.tokens), "token", "tokens"),
            things(sum(&self.sequences), "sequence", "sequences")
        )
    }

    fn leaves(&self, leaves: &[NodeId]) -> String {
        let tokens = || leaves.iter().map(|leaf| self.forest.node(*leaf).tokens.count());
        let (least, most) = (tokens().min().unwrap_or(0), tokens().max().unwrap_or(0));
        let each = if least == most {
            things(most, "token", "tokens")
        } else {
            format!("{} to {}", count(least), things(most, "token", "tokens"))
        };
        format!("{} of {each}", things(leaves.len() as u64, "leaf", "leaves"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use dormouse_schedule::forest::NO_PARENT;

    use super::*;

    #[test]
    fn levels_children_and_trees_are_limited() {
        // A chain of eight nodes, each with a leaf beside the next; then six trees with a leaf each.
        let (mut parents, mut lengths) = (vec![NO_PARENT], vec![100]);
        for level in 0..8_u32 {
            parents.extend([2 * level, 2 * level]);
            lengths.extend([5 + u64::from(level), 10]);
        }
        // Leaves precede the child that continues.
        for (id, parent) in parents.iter_mut().enumerate().skip(1) {
            *parent = ((id - 1) / 2 * 2) as u32;
        }
        for _ in 0..6 {
            let root = parents.len() as u32;
            parents.extend([NO_PARENT, root, root]);
            lengths.extend([20, 1, 2]);
        }
        let forest = Forest::from_nodes(&parents, &lengths).unwrap();
        let wanted = "\
100 tokens, 9 sequences
├─ 10 tokens, 8 sequences
│  ├─ 10 tokens, 7 sequences
│  │  ├─ 10 tokens, 6 sequences
│  │  │  ├─ … 1 node with all below: 92 tokens, 5 sequences
│  │  │  └─ 1 leaf of 8 tokens
│  │  └─ 1 leaf of 7 tokens
│  └─ 1 leaf of 6 tokens
└─ 1 leaf of 5 tokens
20 tokens, 2 sequences
└─ 2 leaves of 1 to 2 tokens
20 tokens, 2 sequences
└─ 2 leaves of 1 to 2 tokens
20 tokens, 2 sequences
└─ 2 leaves of 1 to 2 tokens
… 3 more trees of 69 tokens";
        assert_eq!(lines(&forest).join("\n"), wanted);
    }

    #[test]
    fn a_wide_tree_has_a_limited_number_of_lines() {
        // Every inner node has ten children, three levels deep.
        let (mut parents, mut lengths) = (vec![NO_PARENT], vec![7]);
        fn grow(parents: &mut Vec<u32>, lengths: &mut Vec<u64>, parent: u32, levels: u32) {
            for _ in 0..10 {
                let id = parents.len() as u32;
                parents.push(parent);
                lengths.push(3);
                if levels > 0 {
                    grow(parents, lengths, id, levels - 1);
                }
            }
        }
        grow(&mut parents, &mut lengths, 0, 2);
        let forest = Forest::from_nodes(&parents, &lengths).unwrap();
        let lines = lines(&forest);
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(lines[23], "… 19 lines not drawn");
    }
}
