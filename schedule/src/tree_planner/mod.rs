//! Plans a forest as ops: depth first, leaves in microbatches, a residency for each node.
//!
//! ```text
//!   Request ─► tree ─► scores ─► microbatches ─► order ─► times ─► residency ─► emit ─► Vec<Op>
//!             blocks,  labels    packed         first,   stalls   keep, sleep,   │
//!             dense    by node                  last              recompute      └─► predict
//! ```
//! Every pass is a loop over nodes by number. Nothing recurses.
//!
//! # Device memory of an op
//! K, V and accumulators of the node and all its ancestors, and
//!
//! | op | own | of each ancestor that keeps; sleeps; recomputes |
//! |---|---|---|
//! | forward | saved by all layers; a window; one layer | saved by all layers; a window during its first and last part, else 0; 0 |
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

pub use cost_model::{CostModel, NodeBytes};
pub(crate) use draft::Planned;
pub use pack::pack;
pub use predict::{Prediction, TreeVerdict, Verdict};
pub(crate) use request::Request;
pub use request::{Loss, PlanOptions, Scoring};
pub use scores::scored_rows;

use crate::PlanError;
use crate::tree_planner::draft::Draft;
use crate::tree_planner::tree::PlanTree;

/// Plans a request.
pub(crate) fn plan(request: &Request<'_>) -> Result<Planned, PlanError> {
    let block_rows = request.options.block_rows;
    let tree = PlanTree::new(request, &[], block_rows)?;
    let microbatch_rows = match (request.options.microbatch_rows, request.device_bytes) {
        (0, Some(device)) => microbatch_size::choose(request, &tree, device),
        (0, None) => u32::MAX,
        (rows, _) => rows,
    };
    let shared = Draft { request, tree: &tree, microbatch_rows, dense: &[] };
    let unknown = tree.model.kernels.is_none() || tree.model.op_s == 0.0;
    if request.options.always_share || unknown {
        return shared.plan();
    }
    let separate = |dense: &[bool]| {
        let tree = &PlanTree::new(request, dense, block_rows)?;
        Draft { request, tree, microbatch_rows, dense }.plan()
    };
    let uncut = match block_rows {
        0 => None,
        _ => Some(PlanTree::new(request, &[], 0)?),
    };
    let uncut = uncut.as_ref().unwrap_or(&tree);
    let plan = match dense::tops(uncut, microbatch_rows, request.forest.nodes().len()) {
        Some(tops) => better(&shared, separate(&tops))?,
        None => shared.plan()?,
    };
    // `tops` assumes a microbatch for each top, but trees may fill microbatches together.
    let is_slower = plan.prediction.seconds_shared > plan.prediction.seconds_dense;
    let all = is_slower.then(|| dense::all(request.forest, microbatch_rows.into())).flatten();
    Ok(match all.map(|tops| separate(&tops)) {
        Some(Ok(all)) if all.prediction.seconds_shared < plan.prediction.seconds_shared => all,
        _ => plan,
    })
}

/// Returns the faster of two plans, the shared one if that is unknown. Its ops are written only if it may be
/// the faster.
fn better(shared: &Draft<'_>, separate: Result<Planned, PlanError>) -> Result<Planned, PlanError> {
    let Ok(separate) = separate else { return shared.plan() };
    let bound_s = separate.prediction.seconds_shared.unwrap_or(f64::INFINITY);
    Ok(shared.plan_within(bound_s).ok().flatten().unwrap_or(separate))
}

#[cfg(test)]
mod tests;
