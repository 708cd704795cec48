//! The profile of a step: times and memory, measured at the prefix's marks, and the work that the next step
//! is planned from. Pure but for [`Pending`]. The engine keeps profiles; a prefix records them.

mod clock;

use dormouse_device::Device;
use dormouse_timeline::Timeline;

use clock::Times;
pub(crate) use clock::{Clock, MarkPoint, MarkTime, before};
use dormouse_residency::LinkRates;
use dormouse_residency::plan::{DormantGroup, StepOperation, StepWork};

/// Parts of a plan's last microbatch: before its first gradient, and while gradients come in.
pub(crate) const LAST_MICROBATCH_PARTS: usize = 9;
/// Memory beside dormant bytes is sampled at marks only: this fraction more of it is kept free.
const UNSEEN_DIVISOR: u64 = 16;

/// Limit on microbatches that are measured separately; later ones count with the last of these.
pub(crate) const MICROBATCHES_MAX: usize = 1 << 12;

/// One finished step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    /// By layer.
    dormant_bytes: Vec<u64>,
    recorder: Recorder,
    times: Times,
}

/// A part of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Part {
    #[default]
    Forward,
    Microbatch,
    LastMicrobatch(usize),
    Backward,
}

/// One figure for each part of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PerPart {
    forward: u64,
    backward: u64,
    /// All microbatches but the last.
    microbatches: Vec<u64>,
    last_microbatch: [u64; LAST_MICROBATCH_PARTS],
}

impl PerPart {
    /// Adds the figure of a part that begins.
    fn begin(&mut self, part: Part) {
        if part == Part::Microbatch && self.microbatches.len() < MICROBATCHES_MAX {
            self.microbatches.push(0);
        }
    }

    fn of(&mut self, part: Part) -> Option<&mut u64> {
        match part {
            Part::Forward => Some(&mut self.forward),
            Part::Microbatch => self.microbatches.last_mut(),
            Part::LastMicrobatch(at) => self.last_microbatch.get_mut(at),
            Part::Backward => Some(&mut self.backward),
        }
    }
}

/// Records the peak of device memory in use beside dormant bytes in each part of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recorder {
    part: Part,
    /// Dormant bytes of the first layer when its forward ended.
    first_bytes: u64,
    hot_bytes: PerPart,
}

impl Recorder {
    /// Records device memory in use beside dormant bytes, now.
    pub(crate) fn hot(&mut self, bytes: u64) {
        if let Some(most) = self.hot_bytes.of(self.part) {
            *most = bytes.max(*most);
        }
    }

    /// Records the dormant bytes of the first layer at the end of its forward, when a plan is made. More
    /// can be declared later, and some can stop being dormant.
    pub(crate) const fn first_layer(&mut self, dormant_bytes: u64) {
        self.first_bytes = dormant_bytes;
    }

    /// Begins a part.
    pub(crate) fn begin(&mut self, part: Part) {
        self.hot_bytes.begin(part);
        self.part = part;
    }

    /// Returns the part that begins when `arrived` of `all` gradients of the last microbatch have arrived,
    /// if any.
    pub(crate) fn gradients(&self, arrived: usize, all: usize) -> Option<Part> {
        let part = Part::LastMicrobatch(1 + part_of(arrived, all, LAST_MICROBATCH_PARTS - 1));
        (self.part != part).then_some(part)
    }

    /// Returns the most memory in use beside dormant bytes in the backward.
    pub(crate) const fn hot_in_backward(&self) -> u64 {
        self.hot_bytes.backward
    }

    /// Returns true if a whole step was recorded, microbatches included.
    pub(crate) fn is_whole(&self) -> bool {
        self.part == Part::Backward && self.hot_bytes.last_microbatch[0] > 0
    }
}

/// A step whose end the trainer's stream may not have reached yet.
#[derive(Debug)]
pub(crate) struct Pending<D: Device> {
    pub(crate) recorder: Recorder,
    pub(crate) dormant_bytes: Vec<u64>,
    pub(crate) clock: Clock<D>,
}

impl<D: Device> Pending<D> {
    /// Returns the profile, once the stream has reached the step's end.
    pub(crate) fn finish(&mut self, device: &D, timeline: &Timeline) -> Option<Profile> {
        self.clock.settle(device, timeline);
        self.clock.is_settled().then(|| Profile {
            dormant_bytes: self.dormant_bytes.clone(),
            recorder: self.recorder.clone(),
            times: self.clock.times().clone(),
        })
    }
}

/// Resources for a step's memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Means {
    pub(crate) budget_bytes: u64,
    pub(crate) host_bytes: u64,
    pub(crate) nvme_bytes: u64,
    pub(crate) rates: LinkRates,
    pub(crate) is_direct: bool,
}

impl Profile {
    /// Returns the work of the next step, whose first layer has `first_bytes` dormant bytes at the end of its
    /// forward. Sizes and times of the prefix are scaled by that, those of the microbatches are not. `None`
    /// if one of the two is 0. Figures that overflow make a work that is not valid, and so has no plan.
    pub(crate) fn work(&self, first_bytes: u64, means: &Means) -> Option<StepWork> {
        let Self { dormant_bytes, recorder, times } = self;
        let (top, was_bytes) = (dormant_bytes.len().checked_sub(1)?, recorder.first_bytes);
        if was_bytes == 0 || first_bytes == 0 {
            return None;
        }
        let scaled = |figure: u64| {
            let scaled = u128::from(figure) * u128::from(first_bytes) / u128::from(was_bytes);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        let operation = |compute_ns: u64, hot_bytes: u64| {
            let kept_free = hot_bytes.saturating_add(hot_bytes / UNSEEN_DIVISOR);
            StepOperation { compute_ns, room_bytes: means.budget_bytes.saturating_sub(kept_free) }
        };
        let (hot, ns) = (&recorder.hot_bytes, &times.parts_ns);
        let (hot_a, hot_c) = (scaled(hot.forward), scaled(hot.backward));
        let forward = (0..=top).map(|at| operation(scaled(times.layer(at).forward_ns), hot_a));
        let microbatches = ns.microbatches.iter().zip(&hot.microbatches);
        let microbatches = microbatches.map(|(&ns, &hot)| operation(ns, hot));
        // A part of the last microbatch may need the memory that a later part was seen to need.
        let parts = ns.last_microbatch.iter().enumerate().map(|(at, &ns)| {
            let later = hot.last_microbatch.iter().skip(at).max();
            operation(ns, later.copied().unwrap_or_default())
        });
        let backward =
            (0..=top).rev().map(|at| operation(scaled(times.layer(at).backward_ns), hot_c));
        let operations: Vec<_> = forward.chain(microbatches).chain(parts).chain(backward).collect();
        let last = operations.len() - 1;
        let groups = dormant_bytes.iter().enumerate().map(|(layer, &bytes)| {
            let above = (layer + 1).min(top);
            let (bytes, freed) = (scaled(bytes), last - layer);
            DormantGroup { bytes, made: layer, leaves: above, needed: last - above, freed }
        });
        Some(StepWork {
            groups: groups.collect(),
            operations,
            links: means.rates,
            host_bytes: means.host_bytes,
            nvme_bytes: means.nvme_bytes,
            is_direct: means.is_direct,
        })
    }
}

/// Returns the part of the last microbatch, from 0 below `parts`, when `arrived` of `all` its gradients have
/// arrived.
pub(crate) fn part_of(arrived: usize, all: usize, parts: usize) -> usize {
    (arrived * parts / all.max(1)).min(parts.saturating_sub(1))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use dormouse_residency::plan;

    const MEANS: Means = Means {
        budget_bytes: 1700,
        host_bytes: 5000,
        nvme_bytes: 6000,
        rates: LinkRates {
            device_to_nvme_bytes_per_s: 1,
            nvme_to_device_bytes_per_s: 2,
            device_to_host_bytes_per_s: 3,
            host_to_device_bytes_per_s: 4,
        },
        is_direct: false,
    };

    const FORWARD: [u64; 2] = [10, 11];
    const BACKWARD: [u64; 2] = [20, 21];

    fn play(recorder: &mut Recorder, times: &mut Times, part: Part, ns: u64) {
        recorder.begin(part);
        times.came_to(MarkPoint::Began(part), ns);
    }

    /// A step whose microbatches use 1600, then 800 and ever less.
    fn recorded() -> Profile {
        let (mut recorder, mut times) = (Recorder::default(), Times::default());
        for layer in 0..2 {
            times.came_to(MarkPoint::ForwardBegin, 100);
            times.came_to(MarkPoint::ForwardEnd(layer), 100 + FORWARD[layer as usize]);
        }
        recorder.hot(160);
        recorder.first_layer(50);
        play(&mut recorder, &mut times, Part::Microbatch, 1000);
        recorder.hot(800);
        recorder.hot(1600);
        recorder.hot(16);
        play(&mut recorder, &mut times, Part::LastMicrobatch(0), 1300);
        recorder.hot(800);
        for arrived in 1..=4 {
            let part = recorder.gradients(arrived, 4).unwrap();
            play(&mut recorder, &mut times, part, 1400 + arrived as u64 * 10);
            recorder.hot(800 - arrived as u64 * 160);
            assert_eq!(recorder.gradients(arrived, 4), None, "it has begun");
        }
        assert!(!recorder.is_whole());
        play(&mut recorder, &mut times, Part::Backward, 1500);
        recorder.hot(320);
        for layer in [1, 0] {
            times.came_to(MarkPoint::BackwardBegin(layer), 2000);
            times.came_to(MarkPoint::BackwardEnd(layer), 2000 + BACKWARD[layer as usize]);
        }
        assert!(recorder.is_whole());
        Profile { dormant_bytes: vec![100, 101], recorder, times }
    }

    #[test]
    fn the_next_work_is_the_last_steps() {
        let work = recorded().work(50, &MEANS).unwrap();
        work.validate().unwrap();
        let times: Vec<u64> = work.operations.iter().map(|op| op.compute_ns).collect();
        // Forward, a microbatch, the last until its first gradient; gradients fall into every other
        // part; backward from the top.
        assert_eq!(times, [10, 11, 300, 110, 0, 0, 10, 0, 10, 0, 10, 60, 21, 20]);
        let rooms: Vec<u64> = work.operations.iter().map(|op| op.room_bytes).collect();
        // A sixteenth more than was seen is kept free; 1600 and 100 are all there is.
        assert_eq!(rooms[..4], [1530, 1530, 0, 850]);
        // What a part later needs it may need now.
        assert_eq!(rooms[4..12], [1020, 1020, 1020, 1190, 1190, 1360, 1360, 1530]);
        assert_eq!(rooms[12..], [1360, 1360]);
        let group =
            |bytes, made, needed, freed| DormantGroup { bytes, made, leaves: 1, needed, freed };
        assert_eq!(work.groups, [group(100, 0, 12, 13), group(101, 1, 12, 12)]);
        assert_eq!(
            (work.host_bytes, work.nvme_bytes, work.links.host_to_device_bytes_per_s),
            (5000, 6000, 4)
        );
    }

    #[test]
    fn a_longer_prefix_is_scaled_and_its_microbatches_are_not() {
        let work = recorded().work(100, &MEANS).unwrap();
        assert_eq!((work.groups[1].bytes, work.operations[0].compute_ns), (202, 20));
        assert_eq!(work.operations[0].room_bytes, 1700 - 340);
        assert_eq!(work.operations[2], StepOperation { compute_ns: 300, room_bytes: 0 });
    }

    #[test]
    fn figures_that_overflow_have_no_plan() {
        let work = recorded().work(u64::MAX, &MEANS).unwrap();
        assert_eq!(work.groups[1].bytes, u64::MAX);
        assert!(work.validate().is_err());
        assert_eq!(plan::choose(&work), None);
    }

    #[test]
    fn an_incomplete_profile_makes_no_work() {
        assert_eq!(recorded().work(0, &MEANS), None);
        let mut unmarked = Recorder::default();
        unmarked.begin(Part::Backward);
        assert!(!unmarked.is_whole(), "no microbatch was seen");
        let mut half = Recorder::default();
        half.begin(Part::LastMicrobatch(0));
        half.hot(10);
        assert!(!half.is_whole(), "it never came to its backward");
    }
}
