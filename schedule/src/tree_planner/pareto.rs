//! What a subtree costs for each amount of memory its ancestors hold: lists of points, none worse
//! than another.
//!
//! A point says: while strict ancestors hold at most `device` and `host` bytes, the subtree runs at
//! `cost`. A list is sorted by cost, so the first point that fits is the cheapest. ParetoLists add up
//! (siblings meet the same ancestors) and shift (a parent holds so much itself). They are exact
//! until one grows too long; then two points become one, either the dearer of them, which keeps
//! every list a promise, or a better one than both, which makes every list a lower bound. Either
//! way those go first that change the cost least.

use crate::Residency;

/// One way to run a subtree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ParetoPoint {
    /// Most device bytes its ancestors may hold.
    pub(crate) device: u64,
    /// Most host bytes its ancestors may have asleep.
    pub(crate) host: u64,
    pub(crate) cost: f64,
    /// Of the subtree's first node.
    pub(crate) choice: Residency,
}

impl ParetoPoint {
    /// ResidencyCosts nothing and needs nothing.
    pub(crate) const FREE: Self =
        Self { device: u64::MAX, host: u64::MAX, cost: 0.0, choice: Residency::Keep };

    pub(crate) fn fits(&self, device: u64, host: u64) -> bool {
        device <= self.device && host <= self.host
    }

    /// Whether `other` runs wherever this does.
    fn runs_within(&self, other: &Self) -> bool {
        other.fits(self.device, self.host)
    }

    fn beside(&self, other: &Self) -> Self {
        Self {
            device: self.device.min(other.device),
            host: self.host.min(other.host),
            cost: self.cost + other.cost,
            choice: Residency::Keep,
        }
    }
}

/// Bytes that ancestors hold at least and at most, whatever is chosen for them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AncestorBytes {
    pub(crate) device_least: u64,
    pub(crate) device_most: u64,
    pub(crate) host_most: u64,
}

/// What becomes of two points where one is too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// ResidencyCosts are never less than they are: what fits, fits.
    Dearer,
    /// ResidencyCosts are never more than they are.
    Cheaper,
}

/// Keeps lists short.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pruner {
    pub(crate) rounding: Rounding,
    /// Most points of a list that differ in device bytes alone, and in both.
    pub(crate) points_max: [usize; 2],
    /// Whether any list was too long, so that costs are no longer exact.
    pub(crate) rounded: bool,
}

impl Pruner {
    /// Drops what cannot be used within reach or is worse than another, and what is too many.
    pub(crate) fn prune(&mut self, points: &mut Vec<ParetoPoint>, reach: &AncestorBytes) {
        let slack = |a: &ParetoPoint, b: &ParetoPoint| (b.device, b.host).cmp(&(a.device, a.host));
        points.sort_unstable_by(|a, b| {
            let cost = a.cost.total_cmp(&b.cost);
            cost.then(slack(a, b)).then((a.choice as u8).cmp(&(b.choice as u8)))
        });
        let mut kept = 0;
        for at in 0..points.len() {
            let point = points[at];
            let useless = point.device < reach.device_least
                || points[..kept].iter().rev().any(|better| point.runs_within(better));
            if useless {
                continue;
            }
            points[kept] = point;
            kept += 1;
            if point.fits(reach.device_most, reach.host_most) {
                break;
            }
        }
        points.truncate(kept);
        let [one, two] = self.points_max;
        let most = if one_tier(points.iter()) { one } else { two };
        while points.len() > most {
            self.rounded = true;
            match self.rounding {
                Rounding::Dearer => drop_dearer(points),
                Rounding::Cheaper => merge_cheaper(points),
            }
        }
    }

    /// Siblings: both run under the same ancestors, and both cost.
    pub(crate) fn add(
        &mut self,
        sum: &mut Vec<ParetoPoint>,
        other: &[ParetoPoint],
        reach: &AncestorBytes,
    ) {
        if let [one] = other {
            sum.iter_mut().for_each(|point| *point = point.beside(one));
        } else if one_tier(sum.iter().chain(other)) {
            *sum = in_step(sum, other);
        } else {
            *sum = sum.iter().flat_map(|a| other.iter().map(|b| a.beside(b))).collect();
        }
        self.prune(sum, reach);
    }

    /// Microbatches: nothing to choose, ancestors may hold what they leave.
    pub(crate) fn cap(
        &mut self,
        points: &mut Vec<ParetoPoint>,
        device: u64,
        reach: &AncestorBytes,
    ) {
        points.iter_mut().for_each(|point| point.device = point.device.min(device));
        self.prune(points, reach);
    }
}

/// Whether points differ in device bytes alone.
fn one_tier<'a>(mut points: impl Iterator<Item = &'a ParetoPoint>) -> bool {
    let host = points.next().map(|point| point.host);
    points.all(|point| Some(point.host) == host)
}

/// The pairs that matter where only the device is short: each list's next point where its last one
/// fits no longer.
fn in_step(a: &[ParetoPoint], b: &[ParetoPoint]) -> Vec<ParetoPoint> {
    let mut sum = Vec::with_capacity(a.len() + b.len());
    let (mut at_a, mut at_b) = (0, 0);
    while let (Some(one), Some(other)) = (a.get(at_a), b.get(at_b)) {
        let point = one.beside(other);
        at_a += usize::from(one.device == point.device);
        at_b += usize::from(other.device == point.device);
        sum.push(point);
    }
    sum
}

/// Drops the point whose place another takes at the least cost; one in the middle where none can.
fn drop_dearer(points: &mut Vec<ParetoPoint>) {
    let (mut least, mut worst) = (f64::INFINITY, points.len() / 2);
    for at in 0..points.len() {
        let point = points[at];
        let instead = points[at + 1..].iter().find(|other| point.runs_within(other));
        if let Some(other) = instead
            && other.cost - point.cost < least
        {
            (least, worst) = (other.cost - point.cost, at);
        }
    }
    points.remove(worst);
}

/// Makes the two points nearest in cost one that runs wherever either does, at the lower cost.
fn merge_cheaper(points: &mut Vec<ParetoPoint>) {
    let step = |at: &usize| points[*at].cost - points[*at - 1].cost;
    let Some(at) = (1..points.len()).min_by(|a, b| step(a).total_cmp(&step(b))) else { return };
    let dearer = points.remove(at);
    let cheaper = &mut points[at - 1];
    cheaper.device = cheaper.device.max(dearer.device);
    cheaper.host = cheaper.host.max(dearer.host);
}
