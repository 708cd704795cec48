//! The order of the parts of a node's subtree, and the least memory of a plan.
//!
//! A part leaves nothing on the device but sums in accumulators that exist before it begins. So the order of
//! parts changes memory only through the window of a sleeping node, held during the first part (the last
//! layers leave) and the last part (the same layers return). With least peaks `p_1 ≤ p_2 ≤ … ≤ p_k` of the
//! parts, a node of boundary `b` and window `w` needs `b + max(p_k, w + max(p_first, p_last))`. The two
//! smallest parts at the ends minimise it. The peak of the whole grows with the peak of each part, so one
//! pass from the leaves up finds the least peak over all orders and residencies.

use crate::Residency;
use crate::tree_planner::microbatches::{EdgeParts, Microbatches, SubtreePart};
use crate::tree_planner::tree::PlanTree;

/// All residencies.
pub(crate) const ANY: [Residency; 3] = [Residency::Keep, Residency::Sleep, Residency::Recompute];

/// The plan that needs the least device memory.
#[derive(Clone, Debug)]
pub(crate) struct LeastMemory {
    /// By node; the last entry is for the roots.
    pub(crate) ends: Vec<EdgeParts>,
    pub(crate) residency: Vec<Residency>,
    /// Its peak.
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
    /// Adds a part. Among equal parts the first and the last added become the ends.
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

    /// Returns the two smallest parts in order, and the larger of their peaks.
    fn ends(&self) -> (EdgeParts, u64) {
        let smallest = self.smallest.map(|(_, item)| item);
        let Some((edge_peak, second)) = self.second else {
            let ends = EdgeParts { first: smallest, last: smallest };
            return (ends, self.smallest.map_or(0, |(peak, _)| peak));
        };
        // The part added later runs last.
        let (first, last) = (smallest.min(Some(second)), smallest.max(Some(second)));
        (EdgeParts { first, last }, edge_peak)
    }
}

impl LeastMemory {
    pub(crate) fn new(tree: &PlanTree, items: &Microbatches) -> Self {
        Self::of(tree, &ANY, |node, parts| {
            for microbatch in items.of(node) {
                parts.add(items.microbatch(microbatch).bytes, SubtreePart::Microbatch(microbatch));
            }
        })
    }

    /// Returns the plan of least memory if every node has one of `choices`. `add_microbatches` adds the
    /// microbatches of a node to its parts.
    pub(crate) fn of(
        tree: &PlanTree,
        choices: &[Residency],
        add_microbatches: impl Fn(usize, &mut PeakParts),
    ) -> Self {
        let count = tree.len();
        let mut peaks = vec![0_u64; count];
        let mut least = Self {
            ends: vec![EdgeParts::default(); count + 1],
            residency: vec![Residency::Keep; count],
            bytes: 0,
        };
        for node in tree.inner_nodes().rev().chain([count]) {
            let mut parts = PeakParts::default();
            add_microbatches(node, &mut parts);
            for child in tree.inner_children(node) {
                parts.add(peaks[child], SubtreePart::Node(child as u32));
            }
            if node == count {
                // Nothing sleeps above the trees: they run in the given order.
                least.bytes = parts.most;
                continue;
            }
            let (ends, edge_peak) = parts.ends();
            let peak = |residency: &Residency| {
                let bytes = tree.node_bytes(node);
                let middle = bytes.held(*residency, false).saturating_add(parts.most);
                let edge = bytes.held(*residency, true).saturating_add(edge_peak);
                (bytes.own(*residency).max(middle).max(edge), *residency)
            };
            least.ends[node] = ends;
            let best = choices.iter().map(peak).min_by_key(|(bytes, _)| *bytes);
            (peaks[node], least.residency[node]) = best.unwrap_or((u64::MAX, Residency::Keep));
        }
        least
    }
}

/// Returns the edge parts in the given order: microbatches, then children by number.
pub(crate) fn as_given(tree: &PlanTree, items: &Microbatches) -> Vec<EdgeParts> {
    (0..=tree.len())
        .map(|node| {
            let mut parts = items.under(tree, node);
            let first = parts.next();
            EdgeParts { first, last: parts.last().or(first) }
        })
        .collect()
}
