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

mod batch;
mod dense;
mod emit;
mod fit;
mod items;
mod order;
mod points;
mod residency;
mod scores;
mod shape;
mod sizes;
mod times;
mod tree;

pub use batch::{Batch, Loss, Scoring};
pub use tree::PlanNode;

pub(crate) use batch::Request;
pub(crate) use residency::{Choice, Given};
pub(crate) use scores::Scores;
pub(crate) use shape::{Keeping, Shape};
pub(crate) use times::Stalls;

use crate::limits::{POINTS_MAX, POINTS_OF_TWO_TIERS_MAX};
use crate::predict::Made;
use crate::walk::emit::Parts;
use crate::walk::items::Items;
use crate::walk::order::Least;
use crate::walk::times::Costs;
use crate::walk::tree::Tree;
use crate::{Op, PlanError, Prediction, Remedy, Residency, TreeVerdict};

/// A batch as ops.
#[derive(Clone, Debug)]
pub(crate) struct Walk {
    pub(crate) nodes: Vec<PlanNode>,
    pub(crate) ops: Vec<Op>,
    pub(crate) trees: Vec<TreeVerdict>,
    pub(crate) prediction: Prediction,
    pub(crate) microbatch_rows: u32,
}

/// Nodes and what they score.
#[derive(Debug)]
struct Laid {
    tree: Tree,
    scores: Scores,
}

impl Laid {
    fn new(request: &Request<'_>, dense: &[bool], block_rows: u64) -> Result<Self, PlanError> {
        let tree = Tree::new(request.forest, dense, block_rows)?;
        let scores = Scores::new(&tree, request.forest.endings(), request.scoring)?;
        Ok(Self { tree, scores })
    }
}

/// Plans a request.
pub(crate) fn walk(request: &Request<'_>) -> Result<Walk, PlanError> {
    let shape = Shape::new(request);
    let laid = Laid::new(request, &[], request.block_rows)?;
    let rows = microbatch_rows(request, &shape, &laid);
    let plan = |laid: &Laid, dense: &[bool]| {
        Draft { request, shape: &shape, laid, microbatch_rows: rows, dense }.plan()
    };
    let shared = plan(&laid, &[]);
    if request.always_share || shape.flops_per_s.is_none() || shape.op_s == 0.0 {
        return shared;
    }
    let separate = |tops: &[bool]| plan(&Laid::new(request, tops, request.block_rows)?, tops);
    let whole = match request.block_rows {
        0 => None,
        _ => Some(Laid::new(request, &[], 0)?),
    };
    let Laid { tree, scores } = whole.as_ref().unwrap_or(&laid);
    let best = match dense::tops(tree, scores, &shape, rows, request.forest.nodes().len()) {
        Some(tops) => better(shared, separate(&tops)),
        None => shared,
    };
    // Chosen node by node, each top allows for a microbatch of its own; trees may fill microbatches together.
    match best {
        Ok(walk) if slower_than_dense(&walk.prediction) => {
            match dense::all(request.forest, rows.into()) {
                Some(tops) => better(Ok(walk), separate(&tops)),
                None => Ok(walk),
            }
        }
        best => best,
    }
}

/// The faster of two plans, the first where that is not known.
fn better(a: Result<Walk, PlanError>, b: Result<Walk, PlanError>) -> Result<Walk, PlanError> {
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
fn microbatch_rows(request: &Request<'_>, shape: &Shape, laid: &Laid) -> u32 {
    match (request.microbatch_rows, request.device_bytes) {
        (0, Some(device)) => sizes::choose(request, shape, laid, device),
        (0, None) => u32::MAX,
        (rows, _) => rows,
    }
}

/// A plan of which all but the memory is decided.
#[derive(Debug)]
struct Draft<'a> {
    request: &'a Request<'a>,
    shape: &'a Shape,
    laid: &'a Laid,
    microbatch_rows: u32,
    /// By the forest's number, tops of what runs separately.
    dense: &'a [bool],
}

impl Draft<'_> {
    /// All there is to choose by, handed to `with`, and the choice that needs the least memory.
    fn given<T>(&self, with: impl FnOnce(&Given<'_>, &Least) -> T) -> T {
        let (request, shape) = (self.request, self.shape);
        let Laid { tree, scores } = self.laid;
        let scored = &scores.rows[..];
        let items = &Items::new(tree, scored, shape, self.microbatch_rows.into());
        let mut least = Least::new(tree, items, scored, shape);
        if request.open {
            least.ends = order::as_given(tree, items);
        }
        let ends = &least.ends[..];
        let costs = &Costs::new(tree, items, scored, shape, ends);
        let points_max = [POINTS_MAX, POINTS_OF_TWO_TIERS_MAX];
        with(&Given { tree, items, scored, shape, ends, costs, points_max }, &least)
    }

    fn ops(&self, given: &Given<'_>, residency: &[Residency]) -> Vec<Op> {
        let Given { tree, items, shape, ends, .. } = *given;
        let (scores, scoring) = (&self.laid.scores, self.request.scoring);
        Parts { tree, items, scores, scoring, shape, ends, residency }.ops()
    }

    /// Seconds that nodes and microbatches cost beside their operations, where all of it fits and that is
    /// below `bound_s`.
    fn cost_s(&self, device: u64, bound_s: f64) -> Option<f64> {
        self.given(|given, _| {
            let microbatches_s = self.shape.op_s * given.items.microbatches.len() as f64;
            if microbatches_s >= bound_s {
                return None;
            }
            let choice = given.choose(device, self.request.host_bytes)?;
            let cost_s = given.cost(&choice.residency) + microbatches_s;
            (cost_s < bound_s).then_some(cost_s)
        })
    }

    fn plan(&self) -> Result<Walk, PlanError> {
        let request = self.request;
        self.given(|given, least| {
            let choice = match request.device_bytes {
                None if request.open => given.all(Residency::Sleep),
                None => given.all(Residency::Keep),
                Some(device) => match given.choose(device, request.host_bytes) {
                    Some(choice) => choice,
                    None => return Err(self.misfit(given, least, device)),
                },
            };
            let ops = self.ops(given, &choice.residency);
            let made =
                Made { request, given, scores: &self.laid.scores, choice: &choice, ops: &ops };
            let (prediction, trees) = made.predict(self.microbatch_rows, self.dense);
            let with = |(node, residency): (&PlanNode, &Residency)| PlanNode {
                residency: *residency,
                ..*node
            };
            let nodes = given.tree.nodes.iter().zip(&choice.residency).map(with).collect();
            Ok(Walk { nodes, ops, trees, prediction, microbatch_rows: self.microbatch_rows })
        })
    }

    /// What is short: on the device in the plan that needs least of it, or else on the host in the
    /// plan that a host without limit would have.
    fn misfit(&self, given: &Given<'_>, least: &Least, device: u64) -> PlanError {
        if let (Some(choice), Some(host)) = (given.choose(device, None), self.request.host_bytes) {
            let ops = self.ops(given, &choice.residency);
            return fit::too_little("host", &ops, host, Remedy::BlocksOrBytes, |op| op.host_bytes);
        }
        let most = fit::most_rows(given.tree, given.scored, self.shape, device, &order::ANY);
        let remedy = match most {
            Some(rows) if rows < self.microbatch_rows => Remedy::MicrobatchRows(rows),
            _ => Remedy::BlocksOrBytes,
        };
        let ops = self.ops(given, &least.residency);
        fit::too_little("device", &ops, device, remedy, |op| op.device_bytes)
    }
}

#[cfg(test)]
mod tests;
