//! Ranks whose ops contain collectives run the same kinds of op in the same order.
//!
//! Every rank has its own word of forwards, waves and backwards. The agreed word contains each of
//! them in order; where a rank has nothing of its own, it runs a *dummy*: an op of that kind on one
//! padding row with weight 0. The shortest such word of many is hard to find; taken step by step is
//! the kind that most ranks want next, so each step serves at least a third of those not done.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::leaves::Leaves;
use crate::NodeId;

/// Kinds of op, by what they ask of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// Forward of a node that has children.
    Forward,
    /// Forward and backward of a wave.
    Wave,
    /// Backward of a node that has children.
    Backward,
}

/// All kinds, in the order ties are broken.
const KINDS: [Kind; 3] = [Kind::Forward, Kind::Wave, Kind::Backward];

/// One word for all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lockstep {
    /// The kinds every rank runs, in order.
    pub kinds: Vec<Kind>,
    /// For each rank, which of them are its own ops, in order; the others are dummies.
    pub own: Vec<Vec<u32>>,
}

impl Lockstep {
    /// The agreed word of all ranks' words. At most as long as all of them together.
    #[must_use]
    pub fn of(words: &[Vec<Kind>]) -> Self {
        let mut kinds = Vec::new();
        let mut own: Vec<Vec<u32>> = vec![Vec::new(); words.len()];
        let mut waiting: Vec<usize> = (0..words.len()).filter(|r| !words[*r].is_empty()).collect();
        while !waiting.is_empty() {
            let next = |rank: usize| words[rank][own[rank].len()];
            let count = |kind| waiting.iter().filter(|rank| next(**rank) == kind).count();
            // Of equals the first: ordering by what is not served keeps `min_by_key`'s first.
            let Some(kind) = KINDS.into_iter().min_by_key(|kind| waiting.len() - count(*kind))
            else {
                break;
            };
            let served: Vec<usize> = waiting.iter().copied().filter(|r| next(*r) == kind).collect();
            for rank in served {
                own[rank].push(kinds.len() as u32);
            }
            kinds.push(kind);
            waiting.retain(|rank| own[*rank].len() < words[*rank].len());
        }
        Self { kinds, own }
    }

    /// Dummies of one kind that a rank runs.
    #[must_use]
    pub fn dummies(&self, rank: usize, kind: Kind) -> u32 {
        let all = self.kinds.iter().filter(|k| **k == kind).count();
        let own = self.own[rank].iter().filter(|at| self.kinds[**at as usize] == kind).count();
        (all - own) as u32
    }
}

/// What one rank runs, by rising leaf: forwards of nodes on the way down, waves of neighbouring
/// leaves with one parent filled in order up to `wave_tokens` rows, backwards of nodes left behind.
/// Nodes in `apart` are run elsewhere.
pub(super) fn word(
    leaves: &Leaves<'_>,
    own: impl Iterator<Item = u32>,
    wave_tokens: u32,
    apart: &BTreeSet<u32>,
) -> Vec<Kind> {
    let forest = leaves.forest;
    let mut word = Vec::new();
    let mut open: Vec<NodeId> = Vec::new();
    let mut last: Option<NodeId> = None;
    let mut room = 0_u64;
    for leaf in own.map(|leaf| NodeId(leaves.nodes[leaf as usize])) {
        let rows = forest.node(leaf).rows().count();
        let shares = last.is_some_and(|last| forest.node(last).parent == forest.node(leaf).parent);
        while let Some(node) = open.pop_if(|node| forest.node(*node).subtree_end <= leaf.0) {
            word.extend((!apart.contains(&node.0)).then_some(Kind::Backward));
        }
        let is_new = |node: &NodeId| last.is_none_or(|last| node.0 > last.0);
        let mut down: Vec<NodeId> = forest.path(leaf).skip(1).take_while(is_new).collect();
        down.reverse();
        for node in down {
            word.extend((!apart.contains(&node.0)).then_some(Kind::Forward));
            open.push(node);
        }
        if shares && word.last() == Some(&Kind::Wave) && rows <= room {
            room -= rows;
        } else {
            word.push(Kind::Wave);
            room = u64::from(wave_tokens).saturating_sub(rows);
        }
        last = Some(leaf);
    }
    let closed = open.iter().filter(|node| !apart.contains(&node.0));
    word.extend(closed.map(|_| Kind::Backward));
    word
}
