//! Pareto lists: the cost of a subtree for each amount of memory that its ancestors hold.
//!
//! A point states that the subtree runs at `cost` while its ancestors hold at most `device` and `host` bytes. A
//! list is sorted by cost, so the first point that fits is the cheapest. Lists of siblings add up, and a parent
//! shifts them by its own bytes. Lists are exact until one grows too long. Then points are dropped, which keeps
//! every point feasible, or two are merged into a better one, which makes the list a lower bound. Either way
//! the change that affects the cost least comes first.

use crate::Residency;

/// One way to run a subtree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ParetoPoint {
    /// Maximum device bytes of its ancestors.
    pub(crate) device: u64,
    /// Maximum host bytes of its ancestors.
    pub(crate) host: u64,
    pub(crate) cost: f64,
    /// Residency of the subtree's first node.
    pub(crate) choice: Residency,
}

impl ParetoPoint {
    /// Costs nothing and needs nothing.
    pub(crate) const FREE: Self =
        Self { device: u64::MAX, host: u64::MAX, cost: 0.0, choice: Residency::Keep };

    pub(crate) fn fits(&self, device: u64, host: u64) -> bool {
        device <= self.device && host <= self.host
    }

    /// Returns whether `other` fits wherever this point does.
    fn runs_within(&self, other: &Self) -> bool {
        other.fits(self.device, self.host)
    }

    /// Returns the point of both subtrees together.
    fn with(&self, other: &Self) -> Self {
        Self {
            device: self.device.min(other.device),
            host: self.host.min(other.host),
            cost: self.cost + other.cost,
            choice: Residency::Keep,
        }
    }
}

/// Bounds on the bytes that ancestors hold, for any choice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AncestorBytes {
    pub(crate) device_least: u64,
    pub(crate) device_most: u64,
    pub(crate) host_most: u64,
}

/// How a list that is too long is shortened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// Costs are never too low, and every point is feasible.
    Dearer,
    /// Costs are never too high.
    Cheaper,
}

/// Shortens lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pruner {
    pub(crate) rounding: Rounding,
    /// Maximum points of a list that differ in device bytes only, and in both.
    pub(crate) points_max: [usize; 2],
    /// Whether a list was too long, so that costs are not exact.
    pub(crate) rounded: bool,
}

impl Pruner {
    /// Drops points that are out of reach, dominated by another point, or too many.
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

    /// Adds the list of a sibling.
    pub(crate) fn add(
        &mut self,
        sum: &mut Vec<ParetoPoint>,
        other: &[ParetoPoint],
        reach: &AncestorBytes,
    ) {
        if let [one] = other {
            sum.iter_mut().for_each(|point| *point = point.with(one));
        } else if one_tier(sum.iter().chain(other)) {
            *sum = in_step(sum, other);
        } else {
            *sum = sum.iter().flat_map(|a| other.iter().map(|b| a.with(b))).collect();
        }
        self.prune(sum, reach);
    }

    /// Limits the device bytes of ancestors to what a microbatch leaves.
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

/// Returns whether points differ in device bytes only.
fn one_tier<'a>(mut points: impl Iterator<Item = &'a ParetoPoint>) -> bool {
    let host = points.next().map(|point| point.host);
    points.all(|point| Some(point.host) == host)
}

/// Adds two lists if only the device is short: each list advances when its point no longer fits.
fn in_step(a: &[ParetoPoint], b: &[ParetoPoint]) -> Vec<ParetoPoint> {
    let mut sum = Vec::with_capacity(a.len() + b.len());
    let (mut at_a, mut at_b) = (0, 0);
    while let (Some(one), Some(other)) = (a.get(at_a), b.get(at_b)) {
        let point = one.with(other);
        at_a += usize::from(one.device == point.device);
        at_b += usize::from(other.device == point.device);
        sum.push(point);
    }
    sum
}

/// Drops the point that another replaces at the least cost, or a middle one if none can be replaced.
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

/// Merges the two points nearest in cost into one that fits wherever either does, at the lower cost.
fn merge_cheaper(points: &mut Vec<ParetoPoint>) {
    let step = |at: &usize| points[*at].cost - points[*at - 1].cost;
    let Some(at) = (1..points.len()).min_by(|a, b| step(a).total_cmp(&step(b))) else { return };
    let dearer = points.remove(at);
    let cheaper = &mut points[at - 1];
    cheaper.device = cheaper.device.max(dearer.device);
    cheaper.host = cheaper.host.max(dearer.host);
}
