//! What a case is measured against.

use dormouse_residency::plan::{ReplayOutcome, ResidencyPlan, choose};
use dormouse_residency::testing::{Optimum, optimum};

use crate::case::Case;

/// Moments the search for the optimum looks at before it gives up.
const STATES_MAX: usize = 2_000_000;
/// Of one block: out, to the file, from it, and in.
const COPIES_MAX: u64 = 4;

/// Of one case.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    /// The least stall of any schedule where that was found out, else the stall of the best known.
    pub(crate) stall_ns: u64,
    /// Whether it was.
    pub(crate) is_exact: bool,
    /// No schedule stalls less; the same where it is exact.
    pub(crate) proven_ns: u64,
    /// The plan, and what it comes to on links that do what they say.
    pub(crate) plan: ResidencyPlan,
    pub(crate) planned: ReplayOutcome,
}

/// `None` where no plan comes to an end.
///
/// A plan moves whole layers. The optimum over their blocks is a lower bound.
pub(crate) fn bound(case: &Case) -> Option<Bound> {
    let (plan, planned) = choose(&case.work())?;
    let blocks = case.work_of_blocks();
    // Each copy of a block takes whole nanoseconds.
    let rounding_ns = COPIES_MAX * blocks.groups.len() as u64;
    let known_ns = planned.total_ns + rounding_ns;
    let (is_exact, total_ns) = match optimum(&blocks, Some(known_ns), STATES_MAX) {
        Optimum::Exact(total_ns) => (true, total_ns),
        Optimum::AtLeast(total_ns) => (total_ns + rounding_ns >= planned.total_ns, total_ns),
        Optimum::Never => return None,
    };
    let proven_ns = total_ns.saturating_sub(blocks.compute_ns());
    let stall_ns = if is_exact { proven_ns } else { planned.stall_ns };
    Some(Bound { stall_ns, is_exact, proven_ns, plan, planned })
}
