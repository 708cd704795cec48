//! Forests whose sequences may end inside, and options that cost little to read.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test takes what it needs")]

use dormouse_schedule::balance::{Method, Options, Unit};
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::{Ending, Forest};
use dormouse_schedule::{Machine, ModelShape, NodeId};

/// A forest with sequences at the given ends.
pub fn with_endings(parents: &[u32], lengths: &[u64], endings: &[(u32, u64)]) -> Forest {
    let endings: Vec<Ending> = endings
        .iter()
        .map(|(node, tokens)| Ending { node: NodeId(*node), tokens: *tokens })
        .collect();
    Forest::from_nodes_with(parents, lengths, &endings).unwrap()
}

/// One picosecond a row, nothing else; 8 bytes of K and V a row, 16 of their gradients.
pub fn options(ranks: u32) -> Options {
    Options {
        ranks,
        method: Method::Contiguous,
        unit: Unit::Leaf,
        exchange: false,
        ops_hold_collectives: false,
        wave_tokens: 8,
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
