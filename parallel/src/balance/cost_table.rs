//! What it takes to send K and V of a node and to take their gradients back.

use dormouse_schedule::cost::{ACCUMULATOR_BYTES_MIN, BOUNDARY_SLOTS};
use dormouse_schedule::forest::Node;
use dormouse_schedule::{Machine, ModelShape};

const PS_PER_S: u128 = 1_000_000_000_000;
const PS_PER_NS: u64 = 1_000;
/// Of three parts of a node's cost, forward is one (see `predict`).
const FORWARD_PARTS: u64 = 3;

/// Bytes a row and rates of the link.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostTable {
    kv_row_bytes: u128,
    gradient_row_bytes: u128,
    link_bytes_per_s: u128,
    op_ps: u64,
}

/// Picoseconds of each rank of a node that they divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Divided {
    pub(super) forward_ps: u64,
    pub(super) backward_ps: u64,
}

impl Divided {
    pub(super) const fn sum_ps(self) -> u64 {
        self.forward_ps.saturating_add(self.backward_ps)
    }
}

impl CostTable {
    /// `link_bytes_per_s` is above 0.
    pub(super) fn new(model: &ModelShape, machine: &Machine) -> Self {
        let elements = u128::from(BOUNDARY_SLOTS)
            * u128::from(model.layers)
            * u128::from(model.kv_heads)
            * u128::from(model.head_dim);
        Self {
            kv_row_bytes: elements * u128::from(model.dtype_bytes),
            gradient_row_bytes: elements * u128::from(model.dtype_bytes.max(ACCUMULATOR_BYTES_MIN)),
            link_bytes_per_s: u128::from(machine.link_bytes_per_s),
            op_ps: machine.op_overhead_ns.saturating_mul(PS_PER_NS),
        }
    }

    /// Bytes of K and V of a node's rows.
    pub(super) fn kv_bytes(&self, node: &Node) -> u64 {
        clamp(u128::from(node.rows().count()) * self.kv_row_bytes)
    }

    /// Bytes of their gradients, in the accumulators' type.
    pub(super) fn gradient_bytes(&self, node: &Node) -> u64 {
        clamp(u128::from(node.rows().count()) * self.gradient_row_bytes)
    }

    /// A rank that is sent K and V and sends gradients back: it waits for all of both, and for one
    /// op each way. The sender's copies run beside its computing.
    pub(super) fn sent_ps(&self, node: &Node) -> u64 {
        let bytes = u128::from(self.kv_bytes(node)) + u128::from(self.gradient_bytes(node));
        self.link_ps(bytes).saturating_add(self.op_ps.saturating_mul(2))
    }

    /// A rank that computes one of `ranks` even parts of a node's rows: it gathers K and V of the
    /// other parts, and gradients of its own part are reduced from the other ranks.
    pub(super) fn divided(&self, node: &Node, full_ps: u64, ranks: u32) -> Divided {
        let parts = node.rows().count().clamp(1, u64::from(ranks));
        let others = |bytes: u64| {
            let bytes = u128::from(bytes) * u128::from(ranks - 1);
            self.link_ps(bytes.div_ceil(u128::from(ranks))).saturating_add(self.op_ps)
        };
        let forward_ps = full_ps / FORWARD_PARTS;
        let side = |whole_ps: u64, bytes| whole_ps.div_ceil(parts).saturating_add(others(bytes));
        Divided {
            forward_ps: side(forward_ps, self.kv_bytes(node)),
            backward_ps: side(full_ps - forward_ps, self.gradient_bytes(node)),
        }
    }

    fn link_ps(&self, bytes: u128) -> u64 {
        clamp((bytes * PS_PER_S).div_ceil(self.link_bytes_per_s))
    }
}

fn clamp(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
