//! Forests with sequences that end inside paths, and options with simple costs.

use dormouse_parallel::balance::{BalanceMethod, BalanceOptions, BalanceUnit};
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::{Ending, Forest, NO_PARENT};
use dormouse_schedule::{Machine, ModelShape, NodeId};
use proptest::prelude::*;

/// A forest with sequences at the given ends.
pub(crate) fn with_endings(parents: &[u32], lengths: &[u64], endings: &[(u32, u64)]) -> Forest {
    let endings: Vec<Ending> = endings
        .iter()
        .map(|(node, tokens)| Ending { node: NodeId(*node), tokens: *tokens })
        .collect();
    Forest::from_nodes_with(parents, lengths, &endings).unwrap()
}

/// Rows cost one picosecond, other features nothing; K and V take 8 bytes per row, gradients 16.
pub(crate) fn options(ranks: u32) -> BalanceOptions {
    BalanceOptions {
        ranks,
        method: BalanceMethod::Contiguous,
        unit: BalanceUnit::Leaf,
        exchange: false,
        ops_hold_collectives: false,
        microbatch_tokens: 8,
        rates: Rates { rows: 1e-12, ..Rates::default() },
        model: ModelShape {
            layers: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: 2,
            dtype_bytes: 2,
            layer_linear_weights: 1,
            ..ModelShape::default()
        },
        machine: Machine { link_bytes_per_s: 1_000_000_000_000, ..Machine::default() },
    }
}

/// A forest, the groups of its sequences, the number of ranks and the link rate.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) parents: Vec<u32>,
    pub(crate) lengths: Vec<u64>,
    pub(crate) endings: Vec<(u32, u64)>,
    pub(crate) groups: Vec<u32>,
    pub(crate) ranks: u32,
    pub(crate) link: u64,
}

impl Case {
    pub(crate) fn forest(&self) -> Forest {
        with_endings(&self.parents, &self.lengths, &self.endings)
    }
}

/// Forests with sequences that end inside paths, in any order.
pub(crate) fn case() -> impl Strategy<Value = Case> {
    let nodes = 24;
    let shape = prop::collection::vec((any::<prop::sample::Index>(), 1_u64..60), 1..nodes);
    let inside = prop::collection::vec(any::<prop::sample::Index>(), 0..4);
    let groups = prop::collection::vec(0_u32..5, 2 * nodes);
    let link = prop::sample::select(vec![1_u64, 500, 5_000, 100_000]);
    (shape, inside, groups, 1_u32..9, link, any::<u64>()).prop_map(
        |(shape, inside, mut groups, ranks, link, seed)| {
            let (mut parents, mut path) = (Vec::new(), Vec::new());
            for (id, (pick, _)) in (0_u32..).zip(&shape) {
                path.truncate(pick.index(path.len() + 1));
                parents.push(path.last().copied().unwrap_or(NO_PARENT));
                path.push(id);
            }
            let lengths: Vec<u64> = shape.iter().map(|(_, length)| *length).collect();
            let forest = Forest::from_nodes(&parents, &lengths).unwrap();
            let leaves = forest.endings().iter().map(|ending| ending.node.0);
            let inner = inside.iter().map(|pick| pick.index(parents.len()) as u32);
            let mut endings: Vec<(u32, u64)> = leaves
                .chain(inner)
                .map(|node| (node, forest.node(NodeId(node)).tokens.end))
                .collect();
            let count = endings.len();
            endings.rotate_left(seed as usize % count);
            groups.truncate(count);
            Case { parents, lengths, endings, groups, ranks, link: link * 1_000_000_000_000 }
        },
    )
}

/// All valid combinations of method, unit and exchange.
pub(crate) fn every_option(case: &Case) -> Vec<BalanceOptions> {
    let mut all = Vec::new();
    for method in [BalanceMethod::Contiguous, BalanceMethod::Greedy, BalanceMethod::LongestFirst] {
        for unit in
            [BalanceUnit::Leaf, BalanceUnit::Group, BalanceUnit::Tree, BalanceUnit::GroupOrLeaf]
        {
            for exchange in [false, true] {
                if exchange && method != BalanceMethod::Contiguous {
                    continue;
                }
                let mut options = BalanceOptions { method, unit, exchange, ..options(case.ranks) };
                options.ops_hold_collectives = exchange;
                options.machine.link_bytes_per_s = case.link;
                all.push(options);
            }
        }
    }
    all
}
