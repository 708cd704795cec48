//! Cutting a prefix into chunks, and the costs of ops.

use super::spec::{NS_MAX, Pipeline, PipelineGroup, StageShare};
use dormouse_residency::copy_ns;
use dormouse_schedule::bisect;

/// A scale of 1, in thousandths.
pub(super) const PERMILLE: u32 = 1000;

impl StageShare {
    /// Returns the scaled time of the first `end` of `rows` rows. Chunks cost differences of it, so they
    /// add up to the whole exactly.
    fn until_ns(self, end: u64, rows: u64, permille: u32) -> u64 {
        let (end, rows) = (u128::from(end), u128::from(rows));
        let linear = u128::from(self.linear_ns) * end * (rows + 1);
        let pairs = u128::from(self.pairs_ns) * end * (end + 1);
        let ns = (linear + pairs) * u128::from(permille) / (rows * (rows + 1) * 1000);
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            linear_ns: self.linear_ns + other.linear_ns,
            pairs_ns: self.pairs_ns + other.pairs_ns,
        }
    }
}

/// Cuts a prefix into at most `wanted` chunks of nearly equal cost and returns their ends: as many as the
/// pipeline's `chunk_rows_min` and `chunk_rows_multiple` allow.
pub(super) fn cut(pipeline: &Pipeline, group: &PipelineGroup, wanted: u32) -> Vec<u64> {
    let rows = group.prefix_rows;
    let multiple = u64::from(pipeline.chunk_rows_multiple.max(1));
    let most = (rows / u64::from(pipeline.chunk_rows_min.max(1))).max(1);
    let wanted = u64::from(wanted).min(most);
    let mut cost = group.forward.plus(group.backward);
    if cost == StageShare::default() {
        cost.linear_ns = rows;
    }
    let until = |end| u128::from(cost.until_ns(end, rows, PERMILLE));
    let whole = until(rows);
    let mut ends = Vec::new();
    let mut last = 0;
    for chunk in 1..wanted {
        // The smallest multiple that reaches this share of the cost.
        let reaches =
            |count| until(count * multiple) * u128::from(wanted) >= whole * u128::from(chunk);
        let end = bisect(last / multiple + 1, rows / multiple, reaches) * multiple;
        if end >= rows {
            break;
        }
        ends.push(end);
        last = end;
    }
    ends.push(rows);
    ends
}

/// Costs of a pipeline's ops on a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs<'a>(pub(super) &'a Pipeline);

impl Costs<'_> {
    fn permille(of: &[u32], part: u32) -> u32 {
        of.get(part as usize).copied().unwrap_or(PERMILLE)
    }

    /// Adds the overhead of an op; at least 1 ns, so that an op ends after it starts.
    pub(super) fn op_ns(self, compute_ns: u64) -> u64 {
        compute_ns.saturating_add(self.0.rates.op_overhead_ns).clamp(1, NS_MAX)
    }

    /// Returns the compute time of prefix rows `[begin, end)`, without overhead.
    pub(super) fn prefix_ns(
        self,
        group: &PipelineGroup,
        share: StageShare,
        [begin, end]: [u64; 2],
        part: u32,
    ) -> u64 {
        let permille = Self::permille(&self.0.prefix_permille, part);
        let until = |end| share.until_ns(end, group.prefix_rows, permille);
        until(end) - until(begin)
    }

    /// Returns the compute time of a microbatch on a part, without overhead.
    pub(super) fn microbatch_ns(self, ns: u64, part: u32) -> u64 {
        let permille = u128::from(Self::permille(&self.0.microbatch_permille, part));
        u64::try_from(u128::from(ns) * permille / u128::from(PERMILLE)).unwrap_or(u64::MAX)
    }

    pub(super) fn transfer_ns(self, rows: u64) -> u64 {
        let rates = &self.0.rates;
        let copy_ns = copy_ns(self.bytes(rows).into(), rates.link_bytes_per_s);
        copy_ns.unwrap_or(0).saturating_add(rates.transfer_latency_ns).min(NS_MAX)
    }

    /// Returns the bytes of a transfer of `rows`.
    pub(super) fn bytes(self, rows: u64) -> u64 {
        rows.saturating_mul(self.0.row_bytes.activation)
    }

    /// Returns the compute time of the busiest stage, with whole prefixes and no overhead.
    pub(super) fn ideal_ns(self) -> u64 {
        let pipeline = self.0;
        let stage_ns = |stage: u32| {
            let groups = pipeline.groups.iter().map(|group| self.group_ns(group, stage));
            groups.fold(0, u64::saturating_add)
        };
        (0..pipeline.stages).map(stage_ns).max().unwrap_or(0)
    }

    /// Returns the compute time of a group on a stage, with a whole prefix and no overhead.
    pub(super) fn group_ns(self, group: &PipelineGroup, stage: u32) -> u64 {
        let mut sum = 0_u64;
        for part in (stage..self.0.parts()).step_by(self.0.stages as usize) {
            for share in [group.forward, group.backward] {
                let whole = self.prefix_ns(group, share, [0, group.prefix_rows], part);
                sum = sum.saturating_add(whole);
            }
            for microbatch in &group.microbatches {
                let ns = [microbatch.forward_ns, microbatch.backward_ns];
                let ns = ns.map(|ns| self.microbatch_ns(ns, part).min(NS_MAX));
                sum = sum.saturating_add(ns[0] + ns[1]);
            }
        }
        sum
    }
}
