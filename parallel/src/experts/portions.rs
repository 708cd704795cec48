//! Cuts nodes into portions at the ends of sequences.
//!
//! A node with tokens `[b, e)` runs rows `[b − 1, e − 1)` (see `forest`). A sequence that continues below
//! the node uses all of them; one that ends inside uses those up to its end. If the dense run also runs the
//! last token's row, a sequence that ends at e has one more row, e − 1, which is not shared: each child
//! runs that row itself.

use dormouse_schedule::forest::Forest;
use dormouse_schedule::{NodeId, Span};

/// Rows of one node that the same sequences use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) node: NodeId,
    pub(super) rows: Span,
}

/// The portions of a forest, by node.
#[derive(Debug)]
pub(super) struct Cuts {
    pub(super) all: Vec<Cut>,
    /// First portion of each node, and the total.
    firsts: Vec<u32>,
    feeds_last_token: bool,
}

impl Cuts {
    pub(super) fn of(forest: &Forest, feeds_last_token: bool) -> Self {
        let mut ends: Vec<(u32, u64)> = forest
            .endings()
            .iter()
            .map(|ending| (ending.node.0, fed(ending.tokens, feeds_last_token)))
            .collect();
        ends.sort_unstable();
        ends.dedup();
        let mut cuts = Self { all: Vec::new(), firsts: Vec::new(), feeds_last_token };
        let mut ends = ends.into_iter().peekable();
        for (id, node) in (0_u32..).zip(forest.nodes()) {
            cuts.firsts.push(cuts.all.len() as u32);
            let rows = node.rows();
            let mut begin = rows.begin;
            let mut cut = |end: u64| {
                if begin < end {
                    cuts.all.push(Cut { node: NodeId(id), rows: Span { begin, end } });
                    begin = end;
                }
            };
            while let Some((_, end)) = ends.next_if(|(node, end)| *node == id && *end <= rows.end) {
                cut(end);
            }
            if !forest.is_leaf(NodeId(id)) {
                cut(rows.end);
            }
            while let Some((_, end)) = ends.next_if(|(node, _)| *node == id) {
                cut(end);
            }
        }
        cuts.firsts.push(cuts.all.len() as u32);
        cuts
    }

    /// Returns the number of rows that a sequence of `tokens` uses.
    pub(super) fn fed(&self, tokens: u64) -> u64 {
        fed(tokens, self.feeds_last_token)
    }

    /// Returns the portions that a sequence uses, from its end to the root.
    pub(super) fn of_sequence<'a>(
        &'a self,
        forest: &'a Forest,
        sequence: usize,
    ) -> impl Iterator<Item = u32> + 'a {
        let ending = forest.endings()[sequence];
        forest.path(ending.node).flat_map(move |id| {
            let last = forest.node(id).rows().end;
            let end = if id == ending.node { self.fed(ending.tokens) } else { last };
            (self.firsts[id.0 as usize]..self.firsts[id.0 as usize + 1])
                .filter(move |portion| self.all[*portion as usize].rows.end <= end)
        })
    }
}

fn fed(tokens: u64, feeds_last_token: bool) -> u64 {
    tokens - u64::from(!feeds_last_token)
}
