//! Costs of exchanging K and V of a node and their gradients.

use dormouse_schedule::cost::{ACCUMULATOR_BYTES_MIN, BOUNDARY_SLOTS};
use dormouse_schedule::forest::Node;
use dormouse_schedule::{Machine, ModelShape};

const PS_PER_S: u128 = 1_000_000_000_000;
const PS_PER_NS: u64 = 1_000;
/// The forward is one of three parts of a node's cost (see `predict`).
const FORWARD_PARTS: u64 = 3;

/// Bytes per row and rates of the link.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostTable {
    kv_row_bytes: u128,
    gradient_row_bytes: u128,
    link_bytes_per_s: u128,
    op_ps: u64,
}

/// Time per rank of a divided node, in picoseconds.
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
    /// `link_bytes_per_s` must not be 0.
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

    /// Returns the bytes of K and V of a node's rows.
    pub(super) fn kv_bytes(&self, node: &Node) -> u64 {
        clamp(u128::from(node.rows().count()) * self.kv_row_bytes)
    }

    /// Returns the bytes of their gradients, in the accumulators' type.
    pub(super) fn gradient_bytes(&self, node: &Node) -> u64 {
        clamp(u128::from(node.rows().count()) * self.gradient_row_bytes)
    }

    /// Returns the cost of receiving K and V and returning gradients, with one op each way. The sender's
    /// copies overlap its compute.
    pub(super) fn sent_ps(&self, node: &Node) -> u64 {
        let bytes = u128::from(self.kv_bytes(node)) + u128::from(self.gradient_bytes(node));
        self.link_ps(bytes).saturating_add(self.op_ps.saturating_mul(2))
    }

    /// Returns the cost of computing one of `ranks` even parts of a node's rows, gathering K and V of the
    /// other parts and reducing the gradients of its own.
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
