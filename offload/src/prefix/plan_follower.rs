//! Follows a plan: the operation that the trainer is at, the layers that may sleep and their tiers, and the
//! layers that have room to wake. Pure.
//!
//! The work's operations are those of one prefix: a forward for each layer, the microbatches, a backward
//! for each layer from the top. The last microbatch may be several operations, which advance as its
//! gradients arrive, because that is when its memory is freed.

use super::report::Planned;
use crate::engine::LayerResidency;
use crate::error::OffloadError;
use crate::ids::Tier;
use crate::step_profile::part_of;
use dormouse_residency::plan::{GroupPlan, ResidencyPlan, StepWork};

/// The plan of one prefix, and the progress through it.
#[derive(Debug)]
pub(super) struct PlanFollower {
    work: StepWork,
    plan: ResidencyPlan,
    layers: usize,
    /// Operations of the last microbatch.
    last_microbatch_parts: usize,
    /// The operation that runs, or is next.
    operation: usize,
    /// Operations before this one have ended.
    ended: usize,
    /// Layers that sleep, in the order in which they fall asleep.
    sleepers: Vec<u32>,
    /// The first operation in which one of them may wake; the first backward if none sleeps.
    waking_from: usize,
    /// Predicted stall of the plan.
    stall_ns: u64,
}

impl PlanFollower {
    /// Creates a follower for a prefix of `layers` layers, which are the plan's groups in their order.
    ///
    /// # Errors
    /// `Argument` if the figures do not match each other or the prefix.
    pub(super) fn new(
        work: StepWork,
        plan: ResidencyPlan,
        layers: u32,
        last_microbatch_parts: usize,
    ) -> Result<Self, OffloadError> {
        work.validate()?;
        let layers = layers as usize;
        for (what, seen) in
            [("groups of the work", work.groups.len()), ("groups of the plan", plan.groups.len())]
        {
            if seen != layers {
                return Err(OffloadError::argument(what, seen, format!("{layers}, one a layer")));
            }
        }
        let microbatches = work.operations.len().checked_sub(2 * layers);
        if microbatches.is_none_or(|microbatches| {
            last_microbatch_parts == 0 || microbatches < last_microbatch_parts
        }) {
            let accepted = format!("{} and more", 2 * layers + last_microbatch_parts.max(1));
            return Err(OffloadError::argument("operations", work.operations.len(), accepted));
        }
        let asleep = || plan.groups.iter().enumerate().filter(|(_, p)| p.choice != Tier::Device);
        let mut sleepers: Vec<_> = asleep().map(|(at, p)| (p.sleep_after, at as u32)).collect();
        sleepers.sort_unstable();
        // If the plan lets none sleep, reclaim can still put some to sleep: the microbatches then needed more
        // memory than predicted, and the first backward finds it free.
        let first_backward = work.operations.len() - layers;
        let waking_from = asleep().map(|(_, p)| p.wake_from).min().unwrap_or(first_backward);
        Ok(Self {
            sleepers: sleepers.into_iter().map(|(_, layer)| layer).collect(),
            waking_from,
            work,
            plan,
            layers,
            last_microbatch_parts,
            operation: 0,
            ended: 0,
            stall_ns: 0,
        })
    }

    /// Sets the predicted stall.
    pub(super) fn expecting(self, stall_ns: u64) -> Self {
        Self { stall_ns, ..self }
    }

    /// Returns the plan in figures.
    pub(super) fn planned(&self) -> Planned {
        let mut planned = Planned { stall_ns: self.stall_ns, ..Planned::default() };
        for (group, placing) in self.work.groups.iter().zip(&self.plan.groups) {
            *match placing.choice {
                Tier::Device => &mut planned.kept_bytes,
                Tier::Host => &mut planned.host_bytes,
                Tier::Nvme => &mut planned.nvme_bytes,
            } += group.bytes;
        }
        planned
    }

    /// Returns the plan of a layer.
    fn placing(&self, layer: usize) -> GroupPlan {
        self.plan.groups.get(layer).copied().unwrap_or_default()
    }

    /// Returns true if a layer stays awake.
    pub(super) fn keeps(&self, layer: usize) -> bool {
        self.placing(layer).choice == Tier::Device
    }

    /// Returns the layers that sleep, in the order in which they fall asleep.
    pub(super) fn sleepers(&self) -> impl Iterator<Item = u32> {
        self.sleepers.iter().copied()
    }

    /// Returns the layers that may fall asleep by now and their tiers, in order.
    pub(super) fn to_sleep(&self) -> impl Iterator<Item = (u32, Tier)> {
        let all = self.sleepers.iter().map(|&layer| (layer, self.placing(layer as usize)));
        let due = all.take_while(|(_, placing)| placing.sleep_after < self.ended);
        due.map(|(layer, placing)| (layer, placing.choice))
    }

    /// Advances to this operation; never back.
    fn reach(&mut self, operation: usize) {
        self.operation = self.operation.max(operation).min(self.work.operations.len() - 1);
        self.ended = self.ended.max(self.operation);
    }

    pub(super) fn forward(&mut self, layer: u32) {
        self.reach(layer as usize);
    }

    pub(super) fn forward_ended(&mut self, layer: u32) {
        self.ended = self.ended.max(layer as usize + 1);
    }

    /// Begins a microbatch, with `after` more to come.
    pub(super) fn microbatch(&mut self, after: u32) {
        let first_backward = self.work.operations.len() - self.layers;
        let operations = self.last_microbatch_parts.saturating_add(after as usize);
        self.reach(first_backward.saturating_sub(operations).max(self.layers));
    }

    /// Notes that `arrived` of `all` gradients of the last microbatch have arrived.
    pub(super) fn gradients(&mut self, arrived: usize, all: usize) {
        let first_backward = self.work.operations.len() - self.layers;
        // The first part ends with the first gradient.
        let parts = self.last_microbatch_parts - 1;
        if parts > 0 {
            self.reach(first_backward - parts + part_of(arrived, all, parts));
        }
    }

    pub(super) fn backward(&mut self, layer: u32) {
        self.reach(self.work.operations.len() - 1 - layer as usize);
    }

    /// Returns true if the plan lets layers wake by now.
    pub(super) const fn is_waking_time(&self) -> bool {
        self.operation >= self.waking_from
    }

    /// Returns the layers to wake now, in the order in which backward needs them, as far as every operation
    /// until they are freed has room. `layers` is the residency of each layer.
    pub(super) fn to_wake(&self, layers: &[LayerResidency]) -> Vec<u32> {
        let mut found = Vec::new();
        if !self.is_waking_time() {
            return found;
        }
        let mut held_bytes: Vec<u64> = layers.iter().map(|layer| layer.resident_bytes).collect();
        for (at, layer) in layers.iter().enumerate().rev() {
            if layer.is_awake || self.operation > self.freed(at) {
                continue;
            }
            if let Some(held) = held_bytes.get_mut(at) {
                *held = layer.bytes;
            }
            if self.operation < self.placing(at).wake_from {
                continue;
            }
            if !self.fits(at, &held_bytes) {
                break;
            }
            found.push(at as u32);
        }
        found
    }

    /// Returns true if the held bytes are within the room of each operation until `layer` is freed. Layers
    /// above it are freed earlier.
    fn fits(&self, layer: usize, held_bytes: &[u64]) -> bool {
        let mut bytes: u64 = held_bytes.iter().sum();
        let operations = self.work.operations.iter().enumerate();
        for (number, operation) in operations.take(self.freed(layer) + 1).skip(self.operation) {
            if bytes > operation.room_bytes {
                return false;
            }
            let freed = self.work.operations.len() - 1 - number;
            if freed < self.layers {
                bytes -= held_bytes.get(freed).copied().unwrap_or(0).min(bytes);
            }
        }
        true
    }

    /// Returns the operation that frees a layer: its backward.
    const fn freed(&self, layer: usize) -> usize {
        self.work.operations.len() - 1 - layer
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use dormouse_residency::plan::{DormantGroup, StepOperation};

    /// Three layers, two microbatches, the last of them in three parts; the room of each operation.
    fn follow(rooms: [u64; 10], wake_from: usize) -> PlanFollower {
        let operations = rooms.map(|room_bytes| StepOperation { compute_ns: 1, room_bytes });
        let groups = (0..3).map(|layer: usize| {
            let above = (layer + 1).min(2);
            DormantGroup {
                bytes: 10,
                made: layer,
                leaves: above,
                needed: 9 - above,
                freed: 9 - layer,
            }
        });
        let work = StepWork {
            operations: operations.to_vec(),
            groups: groups.collect(),
            ..StepWork::default()
        };
        let plan = ResidencyPlan::new(&work, &[Tier::Host; 3], wake_from);
        PlanFollower::new(work, plan, 3, 3).unwrap()
    }

    const ASLEEP: LayerResidency = LayerResidency {
        bytes: 10,
        resident_bytes: 0,
        promised_bytes: 0,
        is_awake: false,
        is_leaving: false,
        is_in_file: false,
    };
    const AWAKE: LayerResidency = LayerResidency { resident_bytes: 10, is_awake: true, ..ASLEEP };

    #[test]
    fn the_trainers_marks_are_the_works_operations() {
        let mut follow = follow([0; 10], 0);
        let mut seen = Vec::new();
        let mut at = |follow: &PlanFollower| seen.push(follow.operation);
        for layer in 0..3 {
            follow.forward(layer);
            at(&follow);
        }
        follow.microbatch(1);
        at(&follow);
        follow.microbatch(0);
        at(&follow);
        // Of four gradients the first two are of the second part, the others of the third.
        for arrived in 1..=4 {
            follow.gradients(arrived, 4);
            at(&follow);
        }
        for layer in (0..3).rev() {
            follow.backward(layer);
            at(&follow);
        }
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6, 6, 6, 7, 8, 9]);
        follow.microbatch(7);
        assert_eq!(follow.operation, 9, "never back");
    }

    #[test]
    fn layers_sleep_in_the_order_in_which_they_are_due() {
        let mut follow = follow([30; 10], 4);
        follow.plan.groups[0].sleep_after = 3;
        let PlanFollower { work, plan, .. } = follow;
        let mut follow = PlanFollower::new(work, plan, 3, 3).unwrap();
        let due =
            |follow: &PlanFollower| follow.to_sleep().map(|(layer, _)| layer).collect::<Vec<_>>();
        follow.forward(2);
        assert_eq!(due(&follow), [0; 0], "layer 1 may leave when the forward of layer 2 has ended");
        follow.forward_ended(2);
        assert_eq!(due(&follow), [1, 2]);
        follow.microbatch(1);
        assert_eq!(due(&follow), [1, 2]);
        follow.microbatch(0);
        assert_eq!(due(&follow), [1, 2, 0]);
    }

    #[test]
    fn reclaimed_layers_of_a_plan_without_sleeps_wake_from_the_first_backward() {
        let PlanFollower { work, .. } = follow([30; 10], 0);
        let plan = ResidencyPlan::new(&work, &[Tier::Device; 3], 0);
        let mut follow = PlanFollower::new(work, plan, 3, 3).unwrap();
        follow.microbatch(0);
        follow.gradients(4, 4);
        assert_eq!(follow.to_wake(&[ASLEEP; 3]), [0; 0], "not yet");
        follow.backward(2);
        assert_eq!(follow.to_wake(&[ASLEEP; 3]), [2, 1, 0]);
    }

    #[test]
    fn layers_wake_in_the_order_of_need_as_room_lasts() {
        let rooms = [30, 30, 30, 10, 20, 20, 30, 20, 20, 20];
        let to_wake = |operation: usize, layers: [LayerResidency; 3]| {
            let mut follow = follow(rooms, 4);
            follow.reach(operation);
            follow.to_wake(&layers)
        };
        assert_eq!(to_wake(3, [ASLEEP; 3]), [0; 0], "not yet");
        assert_eq!(to_wake(4, [ASLEEP; 3]), [2, 1]);
        assert_eq!(to_wake(4, [ASLEEP, ASLEEP, AWAKE]), [1]);
        // Three fit beside the microbatch's last part, but not beside the backward of layer 2.
        assert_eq!(to_wake(6, [ASLEEP, AWAKE, AWAKE]), [0; 0]);
        assert_eq!(to_wake(8, [ASLEEP, AWAKE, LayerResidency::default()]), [0]);
        // One on its way out is called back, and counts once.
        let leaving = LayerResidency { is_awake: false, is_leaving: true, ..AWAKE };
        assert_eq!(to_wake(4, [ASLEEP, leaving, AWAKE]), [1]);
        // None passes one that has no room.
        let wide = LayerResidency { bytes: 30, ..ASLEEP };
        assert_eq!(to_wake(4, [ASLEEP, wide, AWAKE]), [0; 0]);
    }
}
