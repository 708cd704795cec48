//! A batch as ops: depth first over a forest, microbatches of leaves, what each node does with its graph.
//!
//! ```text
//!   Batch ─► tree ─► scores ─► items ─► order ─► times ─► residency ─► emit ─► Vec<Op>
//!            blocks,  labels    microbatches    ends     stalls   keep, sleep,   │
//!            dense    by node   packed   of each           recompute      └─► predict
//! ```
//! Every pass is a loop over nodes by number, up or down; nothing recurses.
//!
//! # Device memory of an op
//! K, V and accumulators of the node and all its ancestors, plus
//!
//! | op | of its own | of each ancestor that keeps, sleeps, recomputes |
//! |---|---|---|
//! | forward | saved by all layers; a window; one layer | saved by all layers; 0, or a window beside its first and last part; 0 |
//! | microbatch | saved by its rows, logits | the same |
//! | forward again | saved by all layers | the same |
//! | backward | saved by all layers, or a window; logits | the same |

mod cost_model;
mod dense;
mod draft;
mod emit;
mod fit;
mod microbatch_size;
mod microbatches;
mod order;
mod pack;
mod pareto;
mod predict;
mod request;
mod residency;
mod scores;
mod times;
mod tree;

pub use predict::{Prediction, TreeVerdict, Verdict};
pub use request::{Loss, PlanOptions, Scoring};
pub use tree::PlanNode;

pub use cost_model::{CostModel, NodeBytes};
pub use pack::pack;
pub(crate) use request::Request;

use crate::tree_planner::draft::{Draft, ScoredTree};
use crate::{Op, PlanError};

/// A batch as ops.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) nodes: Vec<PlanNode>,
    pub(crate) ops: Vec<Op>,
    pub(crate) trees: Vec<TreeVerdict>,
    pub(crate) prediction: Prediction,
    pub(crate) microbatch_rows: u32,
}

/// Plans a request.
pub(crate) fn plan(request: &Request<'_>) -> Result<Planned, PlanError> {
    let shape = CostModel::new(request.options);
    let laid = ScoredTree::new(request, &[], request.options.block_rows)?;
    let rows = microbatch_rows(request, &shape, &laid);
    let plan = |laid: &ScoredTree, dense: &[bool]| {
        Draft { request, shape: &shape, laid, microbatch_rows: rows, dense }.plan()
    };
    let shared = plan(&laid, &[]);
    if request.options.always_share || shape.flops_per_s.is_none() || shape.op_s == 0.0 {
        return shared;
    }
    let separate =
        |tops: &[bool]| plan(&ScoredTree::new(request, tops, request.options.block_rows)?, tops);
    let whole = match request.options.block_rows {
        0 => None,
        _ => Some(ScoredTree::new(request, &[], 0)?),
    };
    let ScoredTree { tree, scores } = whole.as_ref().unwrap_or(&laid);
    let best = match dense::tops(tree, scores, &shape, rows, request.forest.nodes().len()) {
        Some(tops) => better(shared, separate(&tops)),
        None => shared,
    };
    // Chosen node by node, each top allows for a microbatch of its own; trees may fill microbatches together.
    match best {
        Ok(plan) if slower_than_dense(&plan.prediction) => {
            match dense::all(request.forest, rows.into()) {
                Some(tops) => better(Ok(plan), separate(&tops)),
                None => Ok(plan),
            }
        }
        best => best,
    }
}

/// The faster of two plans, the first where that is not known.
fn better(
    a: Result<Planned, PlanError>,
    b: Result<Planned, PlanError>,
) -> Result<Planned, PlanError> {
    match (a, b) {
        (Ok(a), Ok(b)) if b.prediction.seconds_shared < a.prediction.seconds_shared => Ok(b),
        (Err(_), Ok(b)) => Ok(b),
        (a, _) => a,
    }
}

fn slower_than_dense(prediction: &Prediction) -> bool {
    prediction.seconds_shared > prediction.seconds_dense
}

/// The rows of a microbatch: as asked, or what is best of what fits; one where none do, to say so.
fn microbatch_rows(request: &Request<'_>, shape: &CostModel, laid: &ScoredTree) -> u32 {
    match (request.options.microbatch_rows, request.device_bytes) {
        (0, Some(device)) => microbatch_size::choose(request, shape, laid, device),
        (0, None) => u32::MAX,
        (rows, _) => rows,
    }
}

#[cfg(test)]
mod tests;
