//! Which part of a node's subtree runs first and which last, and the least memory that takes.
//!
//! A part leaves nothing behind on the device but sums in accumulators made before it began, so
//! the order of parts changes memory only beside the windows of a node that sleeps: the first part
//! runs beside its last layers going, the last beside the same layers coming back. With least
//! peaks `p_1 ≤ p_2 ≤ … ≤ p_k` of the parts, a node of boundary `b` and window `w` needs
//! `b + max(p_k, w + max(p_first, p_last))`, which the two smallest parts make least; where
//! there is one part, the window stays. The peak of the whole grows with each part's, so least
//! parts make a least whole: one pass from the leaves up finds the least peak over all orders and
//! all residencies.

use crate::Residency;
use crate::tree_planner::cost_model::{CostModel, NodeBytes};
use crate::tree_planner::microbatches::{EdgeParts, Microbatches, SubtreePart};
use crate::tree_planner::tree::PlanTree;

/// Every residency there is.
pub(crate) const ANY: [Residency; 3] = [Residency::Keep, Residency::Sleep, Residency::Recompute];

/// The plan that needs the least device memory.
#[derive(Clone, Debug)]
pub(crate) struct LeastMemory {
    /// By node, and for what hangs from nothing last.
    pub(crate) ends: Vec<EdgeParts>,
    pub(crate) residency: Vec<Residency>,
    /// Bytes of the whole.
    pub(crate) bytes: u64,
}

/// The peaks of a node's parts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeakParts {
    most: u64,
    smallest: Option<(u64, SubtreePart)>,
    second: Option<(u64, SubtreePart)>,
}

impl PeakParts {
    /// Of equal parts, the ends as given stay the ends.
    pub(crate) fn add(&mut self, peak: u64, item: SubtreePart) {
        self.most = self.most.max(peak);
        match (self.smallest, self.second) {
            (Some((least, _)), _) if peak < least => {
                self.second = self.smallest;
                self.smallest = Some((peak, item));
            }
            (None, _) => self.smallest = Some((peak, item)),
            (_, Some((second, _))) if peak > second => {}
            _ => self.second = Some((peak, item)),
        }
    }

    fn ends(&self) -> (EdgeParts, u64) {
        let smallest = self.smallest.map(|(_, item)| item);
        let Some((beside, second)) = self.second else {
            let ends = EdgeParts { first: smallest, last: smallest };
            return (ends, self.smallest.map_or(0, |(peak, _)| peak));
        };
        // Of two, the one given later runs last.
        let (first, last) = (smallest.min(Some(second)), smallest.max(Some(second)));
        (EdgeParts { first, last }, beside)
    }
}

impl LeastMemory {
    pub(crate) fn new(
        tree: &PlanTree,
        items: &Microbatches,
        scored: &[u64],
        shape: &CostModel,
    ) -> Self {
        Self::of(tree, scored, shape, &ANY, |node, parts| {
            for microbatch in items.of(node) {
                parts.add(items.microbatch(microbatch).bytes, SubtreePart::Microbatch(microbatch));
            }
        })
    }

    /// With the microbatches that `microbatches` adds to the parts of a node, of plans in which every node has one
    /// of `choices`.
    pub(crate) fn of(
        tree: &PlanTree,
        scored: &[u64],
        shape: &CostModel,
        choices: &[Residency],
        microbatches: impl Fn(usize, &mut PeakParts),
    ) -> Self {
        let count = tree.len();
        let mut peaks = vec![0_u64; count];
        let mut least = Self {
            ends: vec![EdgeParts::default(); count + 1],
            residency: vec![Residency::Keep; count],
            bytes: 0,
        };
        for node in (0..count).rev().chain([count]) {
            if node < count && tree.is_leaf(node) {
                continue;
            }
            let mut parts = PeakParts::default();
            microbatches(node, &mut parts);
            for child in tree.inner_children(node) {
                parts.add(peaks[child], SubtreePart::Node(child as u32));
            }
            let (ends, beside) = parts.ends();
            if node == count {
                // Nothing sleeps above the trees: they run in the order given.
                least.bytes = parts.most;
                continue;
            }
            let keeping = shape.keeping(tree.nodes[node].rows.count(), scored[node]);
            least.ends[node] = ends;
            (peaks[node], least.residency[node]) = least_of(&keeping, choices, parts.most, beside);
        }
        least
    }
}

/// The choice that needs least, given the parts' largest peak and the larger at the two ends.
fn least_of(
    keeping: &NodeBytes,
    choices: &[Residency],
    most: u64,
    beside: u64,
) -> (u64, Residency) {
    let mut best = (u64::MAX, Residency::Keep);
    for &residency in choices {
        let middle = keeping.held(residency, false).saturating_add(most);
        let ends = keeping.held(residency, true).saturating_add(beside);
        let peak = keeping.own(residency).max(middle).max(ends);
        if peak < best.0 {
            best = (peak, residency);
        }
    }
    best
}

/// The order as given: microbatches, then children by number.
pub(crate) fn as_given(tree: &PlanTree, items: &Microbatches) -> Vec<EdgeParts> {
    (0..=tree.len())
        .map(|node| {
            let mut parts = items.under(tree, node);
            let first = parts.next();
            EdgeParts { first, last: parts.last().or(first) }
        })
        .collect()
}
