//! Chooses keep, sleep or recompute for each node: the cheapest choice that fits.
//!
//! From the leaves up, the Pareto list of each node (see `pareto`) is built from those of its children. From
//! the roots down, each node takes the cheapest point that fits the bytes its ancestors hold: K, V and
//! accumulators of the path, and what is kept of it. Keeping costs nothing, recomputing a forward, sleeping
//! its stalls (see `times`).

use crate::tree_planner::cost_model::NodeBytes;
use crate::tree_planner::microbatches::{EdgeParts, Microbatches, SubtreePart};
use crate::tree_planner::pareto::{AncestorBytes, ParetoPoint, Pruner, Rounding};
use crate::tree_planner::times::ResidencyCosts;
use crate::tree_planner::tree::PlanTree;
use crate::{NodeId, Residency};

/// A plan before its residency is chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResidencyProblem<'a> {
    pub(crate) tree: &'a PlanTree,
    pub(crate) items: &'a Microbatches,
    pub(crate) ends: &'a [EdgeParts],
    pub(crate) costs: &'a ResidencyCosts,
    /// Maximum points of a list if one tier is short, and if both are.
    pub(crate) points_max: [usize; 2],
}

/// A residency for every node, within memory.
#[derive(Clone, Debug)]
pub(crate) struct ResidencyChoice {
    pub(crate) residency: Vec<Residency>,
    /// Upper bound on what a better choice could save, for the given order and costs.
    pub(crate) gap: f64,
}

impl ResidencyProblem<'_> {
    /// Returns the same residency for all nodes with children; leaves keep.
    pub(crate) fn all(&self, residency: Residency) -> ResidencyChoice {
        let of = |node| if self.tree.is_leaf(node) { Residency::Keep } else { residency };
        ResidencyChoice { residency: (0..self.tree.len()).map(of).collect(), gap: 0.0 }
    }

    /// Returns the cheapest choice within `device` and `host` bytes, or `None` if none is found.
    pub(crate) fn choose(&self, device: u64, host: Option<u64>) -> Option<ResidencyChoice> {
        let mut microbatches = self.items.of(self.tree.len());
        if microbatches.any(|microbatch| self.items.microbatch(microbatch).bytes > device) {
            return None;
        }
        let reaches = self.reaches();
        // A limit that no path reaches is ignored.
        let deepest = reaches.iter().map(|reach| reach.host_most).max().unwrap_or(0);
        let host = host.filter(|host| *host < deepest).unwrap_or(u64::MAX);
        let (mut best, rounded) = self.within((device, host), &reaches);
        if rounded && host != u64::MAX {
            // Without sleeping one tier is left. Its lists are longer and miss no plan that fits.
            let awake = self.within((device, 0), &reaches).0;
            best = [best, awake].into_iter().flatten().min_by(|a, b| a.1.total_cmp(&b.1));
        }
        let (residency, cost) = best?;
        if !rounded {
            return Some(ResidencyChoice { residency, gap: 0.0 });
        }
        let lists = self.lists((device, host), &reaches, Rounding::Cheaper).0?;
        Some(ResidencyChoice { residency, gap: (cost - self.least_cost(&lists)).max(0.0) })
    }

    /// Returns the choice of the lists within `memory` and its cost, and whether any list was rounded.
    fn within(
        &self,
        memory: (u64, u64),
        reaches: &[AncestorBytes],
    ) -> (Option<(Vec<Residency>, f64)>, bool) {
        let (lists, rounded) = self.lists(memory, reaches, Rounding::Dearer);
        let Some(residency) = lists.and_then(|lists| self.take(&lists)) else {
            return (None, rounded);
        };
        let cost = self.cost(&residency);
        (Some((residency, cost)), rounded)
    }

    /// Returns the cost of all nodes.
    pub(crate) fn cost(&self, residency: &[Residency]) -> f64 {
        let chosen = residency.iter().enumerate();
        chosen.fold(0.0, |sum, (node, choice)| sum + self.costs.of(node, *choice))
    }

    /// Returns the cost of all trees by their lists: a lower bound if the lists are.
    fn least_cost(&self, lists: &ParetoLists) -> f64 {
        let roots = self.tree.inner_children(self.tree.len());
        let costs = roots.filter_map(|root| lists.of(root).first());
        costs.fold(0.0, |sum, point| sum + point.cost)
    }

    fn reaches(&self) -> Vec<AncestorBytes> {
        let mut reaches = vec![AncestorBytes::default(); self.tree.len()];
        for node in 0..self.tree.len() {
            let Some(parent) = self.tree.nodes[node].parent else { continue };
            let above = reaches[parent.0 as usize];
            let bytes = self.tree.node_bytes(parent.0 as usize);
            reaches[node] = AncestorBytes {
                device_least: above.device_least.saturating_add(bytes.boundary),
                device_most: above.device_most.saturating_add(bytes.again()),
                host_most: above.host_most.saturating_add(bytes.saved),
            };
        }
        reaches
    }

    /// Returns the lists of all nodes within `memory` (device, host), or `None` if a node does not fit; and
    /// whether any list is rounded.
    fn lists(
        &self,
        memory: (u64, u64),
        reaches: &[AncestorBytes],
        rounding: Rounding,
    ) -> (Option<ParetoLists>, bool) {
        let mut lists = ParetoLists { points: Vec::new(), place: vec![(0, 0); self.tree.len()] };
        let mut pruner = Pruner { rounding, points_max: self.points_max, rounded: false };
        for node in self.tree.inner_nodes().rev() {
            let mut maker =
                ListBuilder { given: self, lists: &lists, node, device: memory.0, pruner };
            let points = maker.points(memory.1, &reaches[node]);
            pruner = maker.pruner;
            if points.is_empty() {
                return (None, pruner.rounded);
            }
            lists.place[node] = (lists.points.len(), points.len() as u32);
            lists.points.extend(points);
        }
        (Some(lists), pruner.rounded)
    }

    fn take(&self, lists: &ParetoLists) -> Option<Vec<Residency>> {
        let mut residency = vec![Residency::Keep; self.tree.len()];
        // Device and host bytes that the ancestors of each node hold.
        let mut held: Vec<(u64, u64)> = vec![(0, 0); self.tree.len()];
        for node in self.tree.inner_nodes() {
            if let Some(NodeId(parent)) = self.tree.nodes[node].parent {
                let parent = parent as usize;
                let edge = self.ends[parent].has(SubtreePart::Node(node as u32));
                let bytes = self.tree.node_bytes(parent);
                let asleep = residency[parent] == Residency::Sleep;
                held[node] = (
                    held[parent].0.saturating_add(bytes.held(residency[parent], edge)),
                    held[parent].1.saturating_add(if asleep { bytes.saved } else { 0 }),
                );
            }
            let (device, host) = held[node];
            residency[node] = lists.of(node).iter().find(|point| point.fits(device, host))?.choice;
        }
        Some(residency)
    }
}

/// The lists of all nodes with children.
#[derive(Debug)]
struct ParetoLists {
    points: Vec<ParetoPoint>,
    place: Vec<(usize, u32)>,
}

impl ParetoLists {
    fn of(&self, node: usize) -> &[ParetoPoint] {
        let (begin, count) = self.place[node];
        &self.points[begin..begin + count as usize]
    }
}

/// Builds the list of one node.
#[derive(Debug)]
struct ListBuilder<'a> {
    given: &'a ResidencyProblem<'a>,
    lists: &'a ParetoLists,
    node: usize,
    device: u64,
    pruner: Pruner,
}

impl ListBuilder<'_> {
    fn points(&mut self, host: u64, reach: &AncestorBytes) -> Vec<ParetoPoint> {
        let bytes = self.given.tree.node_bytes(self.node);
        let ends = self.given.ends[self.node];
        // Without host memory nothing sleeps.
        let host_most = |bytes: u64| if host == 0 { 0 } else { bytes };
        let reach = &AncestorBytes { host_most: host_most(reach.host_most), ..*reach };
        let below = AncestorBytes {
            device_least: reach.device_least.saturating_add(bytes.boundary),
            device_most: reach.device_most.saturating_add(bytes.again()),
            host_most: host_most(reach.host_most.saturating_add(bytes.saved)),
        };
        let mut middle = vec![ParetoPoint { host, ..ParetoPoint::FREE }];
        for item in self.given.items.under(self.given.tree, self.node) {
            if !ends.has(item) {
                self.part(&mut middle, item, 0, &below);
            }
        }
        let mut points = Vec::new();
        let awake = self.with_ends(middle.clone(), &ends, 0, &below);
        self.shift(&mut points, &awake, Residency::Keep, &bytes);
        // No point is cheaper than the cheapest point below with the node kept.
        let cheapest =
            |kept: &ParetoPoint| awake.first().is_some_and(|below| kept.cost <= below.cost);
        let idle = points
            .first()
            .is_some_and(|kept| cheapest(kept) && kept.fits(reach.device_most, reach.host_most));
        if !idle && bytes.saved > 0 {
            self.shift(&mut points, &awake, Residency::Recompute, &bytes);
            let asleep = self.with_ends(middle, &ends, bytes.window, &below);
            self.shift(&mut points, &asleep, Residency::Sleep, &bytes);
        }
        self.pruner.prune(&mut points, reach);
        points
    }

    fn with_ends(
        &mut self,
        mut sum: Vec<ParetoPoint>,
        ends: &EdgeParts,
        window_bytes: u64,
        below: &AncestorBytes,
    ) -> Vec<ParetoPoint> {
        let second = if ends.first == ends.last { None } else { ends.last };
        for item in [ends.first, second].into_iter().flatten() {
            self.part(&mut sum, item, window_bytes, below);
        }
        sum
    }

    /// Adds one part of the subtree, during which the node holds `window_bytes`.
    fn part(
        &mut self,
        sum: &mut Vec<ParetoPoint>,
        item: SubtreePart,
        window_bytes: u64,
        below: &AncestorBytes,
    ) {
        match item {
            SubtreePart::Microbatch(microbatch) => {
                let microbatch = self.given.items.microbatch(microbatch).bytes;
                match self.device.checked_sub(microbatch.saturating_add(window_bytes)) {
                    Some(left) => self.pruner.cap(sum, left, below),
                    None => sum.clear(),
                }
            }
            SubtreePart::Node(child) => {
                let list = self.lists.of(child as usize);
                let shifted = |point: &ParetoPoint| {
                    Some(ParetoPoint { device: point.device.checked_sub(window_bytes)?, ..*point })
                };
                let list: Vec<ParetoPoint> = list.iter().filter_map(shifted).collect();
                self.pruner.add(sum, &list, below);
            }
        }
    }

    /// Appends `below` for a node with residency `choice`: its own bytes and cost are deducted.
    fn shift(
        &self,
        points: &mut Vec<ParetoPoint>,
        below: &[ParetoPoint],
        choice: Residency,
        bytes: &NodeBytes,
    ) {
        let Some(own) = self.device.checked_sub(bytes.own(choice)) else { return };
        let cost = self.given.costs.of(self.node, choice);
        let asleep = if choice == Residency::Sleep { bytes.saved } else { 0 };
        for point in below {
            let device = point.device.checked_sub(bytes.held(choice, false));
            let (Some(device), Some(host)) = (device, host_left(point.host, asleep)) else {
                continue;
            };
            points.push(ParetoPoint {
                device: device.min(own),
                host,
                cost: point.cost + cost,
                choice,
            });
        }
    }
}

/// Returns the host bytes left to ancestors; `u64::MAX` means no limit.
fn host_left(host: u64, asleep: u64) -> Option<u64> {
    if host == u64::MAX { Some(host) } else { host.checked_sub(asleep) }
}
