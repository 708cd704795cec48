//! What a step took, and the work that the next one like it will be. Pure.

use super::follow::part_of;
use crate::engine::LinkRates;
use crate::plan::{Group, Links, Operation, Work};

/// Parts of a plan's last wave: before its first gradient, and while gradients come in.
pub(super) const LAST_WAVE_PARTS: usize = 9;
/// Waves that are told apart; later ones count with the last of these.
const WAVES_MAX: usize = 1 << 12;
/// What is not dormant is seen at marks only: this part more of it is kept free.
const UNSEEN_DIVISOR: u64 = 16;

/// One operation: how long, and the most device memory seen beside dormant bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    ns: u64,
    hot_bytes: u64,
}

/// One layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerTimes {
    pub(super) dormant_bytes: u64,
    pub(super) forward_ns: u64,
    pub(super) backward_ns: u64,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    layers: Vec<LayerTimes>,
    forward_hot_bytes: u64,
    backward_hot_bytes: u64,
    /// All but the last.
    waves: Vec<Seen>,
    last_wave: [Seen; LAST_WAVE_PARTS],
}

/// A profile while its step runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Recorder {
    profile: Profile,
    now: At,
    began_ns: u64,
}

/// Where the step is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    #[default]
    Forward,
    Wave,
    LastWave(usize),
    Backward,
}

impl Recorder {
    /// Device memory in use beside dormant bytes, now.
    pub(super) fn hot(&mut self, bytes: u64) {
        let most = match self.now {
            At::Forward => &mut self.profile.forward_hot_bytes,
            At::Backward => &mut self.profile.backward_hot_bytes,
            At::LastWave(part) => &mut self.profile.last_wave[part].hot_bytes,
            At::Wave => match self.profile.waves.last_mut() {
                Some(wave) => &mut wave.hot_bytes,
                None => return,
            },
        };
        *most = bytes.max(*most);
    }

    /// A wave begins.
    pub(super) fn wave(&mut self, is_last: bool, now_ns: u64) {
        self.end(now_ns);
        self.now = if is_last { At::LastWave(0) } else { At::Wave };
        if !is_last && self.profile.waves.len() < WAVES_MAX {
            self.profile.waves.push(Seen::default());
        }
    }

    /// Of the last wave's gradients `arrived` have, of `all`.
    pub(super) fn gradients(&mut self, arrived: usize, all: usize, now_ns: u64) {
        let part = 1 + part_of(arrived, all, LAST_WAVE_PARTS - 1);
        if self.now != At::LastWave(part) {
            self.end(now_ns);
            self.now = At::LastWave(part);
        }
    }

    /// Phase C begins.
    pub(super) fn backward(&mut self, now_ns: u64) {
        self.end(now_ns);
        self.now = At::Backward;
    }

    fn end(&mut self, now_ns: u64) {
        let ns = now_ns.saturating_sub(self.began_ns);
        self.began_ns = now_ns;
        match self.now {
            At::LastWave(part) => self.profile.last_wave[part].ns += ns,
            At::Wave => {
                if let Some(wave) = self.profile.waves.last_mut() {
                    wave.ns += ns;
                }
            }
            At::Forward | At::Backward => {}
        }
    }

    /// The whole step's, if its waves were marked.
    pub(super) fn finish(self, layers: Vec<LayerTimes>) -> Option<Profile> {
        let is_whole = self.now == At::Backward && self.profile.last_wave[0].hot_bytes > 0;
        is_whole.then_some(Profile { layers, ..self.profile })
    }
}

/// What there is for a step's memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Means {
    pub(crate) budget_bytes: u64,
    pub(crate) host_bytes: u64,
    pub(crate) nvme_bytes: u64,
    pub(crate) rates: LinkRates,
    pub(crate) is_direct: bool,
}

impl Profile {
    /// The next step's work, whose first layer has `first_bytes` to sleep: sizes and times of the
    /// prefix go with that, those of the waves stay. `None` where nothing is known to go by.
    pub(super) fn work(&self, first_bytes: u64, means: &Means) -> Option<Work> {
        let layers = self.layers.len();
        let was_bytes = self.layers.first()?.dormant_bytes;
        if was_bytes == 0 || first_bytes == 0 {
            return None;
        }
        let scaled = |figure: u64| {
            let scaled = u128::from(figure) * u128::from(first_bytes) / u128::from(was_bytes);
            u64::try_from(scaled).unwrap_or(u64::MAX)
        };
        let operation = |compute_ns: u64, hot_bytes: u64| {
            let kept_free = hot_bytes.saturating_add(hot_bytes / UNSEEN_DIVISOR);
            Operation { compute_ns, room_bytes: means.budget_bytes.saturating_sub(kept_free) }
        };
        let (hot_a, hot_c) = (scaled(self.forward_hot_bytes), scaled(self.backward_hot_bytes));
        let forward = self.layers.iter().map(|l| operation(scaled(l.forward_ns), hot_a));
        let waves = self.waves.iter().map(|wave| operation(wave.ns, wave.hot_bytes));
        // What comes later in the last wave may need what it needs, whenever that was seen.
        let parts = self.last_wave.iter().enumerate().map(|(at, part)| {
            let later = self.last_wave.iter().skip(at).map(|part| part.hot_bytes).max();
            operation(part.ns, later.unwrap_or_default())
        });
        let backward = self.layers.iter().rev().map(|l| operation(scaled(l.backward_ns), hot_c));
        let operations: Vec<_> = forward.chain(waves).chain(parts).chain(backward).collect();
        let (top, last) = (layers - 1, operations.len() - 1);
        let groups = self.layers.iter().enumerate().map(|(layer, times)| {
            let above = (layer + 1).min(top);
            let (bytes, freed) = (scaled(times.dormant_bytes), last - layer);
            Group { bytes, made: layer, leaves: above, needed: last - above, freed }
        });
        Some(Work {
            groups: groups.collect(),
            operations,
            links: Links {
                out_bytes_per_s: means.rates.device_to_host_bytes_per_s,
                in_bytes_per_s: means.rates.host_to_device_bytes_per_s,
                write_bytes_per_s: means.rates.device_to_nvme_bytes_per_s,
                read_bytes_per_s: means.rates.nvme_to_device_bytes_per_s,
            },
            host_bytes: means.host_bytes,
            nvme_bytes: means.nvme_bytes,
            is_direct: means.is_direct,
        })
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

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

    fn layers() -> Vec<LayerTimes> {
        let layer = |at: u64| LayerTimes {
            dormant_bytes: 100 + at,
            forward_ns: 10 + at,
            backward_ns: 20 + at,
        };
        (0..2).map(layer).collect()
    }

    /// A step whose waves use 1600, then 800 and ever less.
    fn recorded() -> Option<Profile> {
        let mut recorder = Recorder::default();
        recorder.hot(160);
        recorder.wave(false, 1000);
        recorder.hot(800);
        recorder.hot(1600);
        recorder.hot(16);
        recorder.wave(true, 1300);
        recorder.hot(800);
        for arrived in 1..=4 {
            recorder.gradients(arrived, 4, 1400 + arrived as u64 * 10);
            recorder.hot(800 - arrived as u64 * 160);
        }
        recorder.backward(1500);
        recorder.hot(320);
        recorder.finish(layers())
    }

    #[test]
    fn the_next_work_is_the_last_steps() {
        let work = recorded().unwrap().work(100, &MEANS).unwrap();
        work.validate().unwrap();
        let times: Vec<u64> = work.operations.iter().map(|op| op.compute_ns).collect();
        // Forward, a wave, the last until its first gradient; gradients fall into every other
        // part; backward from the top.
        assert_eq!(times, [10, 11, 300, 110, 0, 0, 10, 0, 10, 0, 10, 60, 21, 20]);
        let rooms: Vec<u64> = work.operations.iter().map(|op| op.room_bytes).collect();
        // A sixteenth more than was seen is kept free; 1600 and 100 are all there is.
        assert_eq!(rooms[..4], [1530, 1530, 0, 850]);
        // What a part later needs it may need now.
        assert_eq!(rooms[4..12], [1020, 1020, 1020, 1190, 1190, 1360, 1360, 1530]);
        assert_eq!(rooms[12..], [1360, 1360]);
        let group = |bytes, made, needed, freed| Group { bytes, made, leaves: 1, needed, freed };
        assert_eq!(work.groups, [group(100, 0, 12, 13), group(101, 1, 12, 12)]);
        assert_eq!((work.host_bytes, work.nvme_bytes, work.links.in_bytes_per_s), (5000, 6000, 4));
    }

    #[test]
    fn a_longer_prefix_is_scaled_and_its_waves_are_not() {
        let work = recorded().unwrap().work(200, &MEANS).unwrap();
        assert_eq!((work.groups[1].bytes, work.operations[0].compute_ns), (202, 20));
        assert_eq!(work.operations[0].room_bytes, 1700 - 340);
        assert_eq!(work.operations[2], Operation { compute_ns: 300, room_bytes: 0 });
    }

    #[test]
    fn what_is_not_known_makes_no_work() {
        assert_eq!(recorded().unwrap().work(0, &MEANS), None);
        let mut unmarked = Recorder::default();
        unmarked.backward(5);
        assert_eq!(unmarked.finish(layers()), None, "no wave was seen");
        let mut half = Recorder::default();
        half.wave(true, 5);
        half.hot(10);
        assert_eq!(half.finish(layers()), None, "it never came to its backward");
    }
}
