//! What can be recorded, and how an event is laid into five words of a ring slot.
//!
//! ```text
//!   word   slice                          instant             gauge
//!   0      kind | lane<<8 | name<<16      same                kind | gauge<<8
//!   1      start_ns                       at_ns               at_ns
//!   2      end_ns                         value               value_bytes
//!   3      bytes                          –                   previous_bytes
//!   4      flow                           –                   –
//! ```

use crate::names::NameId;

/// Words of payload in one ring slot.
pub(crate) const EVENT_WORDS: usize = 5;
/// Number of lanes.
pub(crate) const LANES: usize = 8;
/// Number of gauges.
pub(crate) const GAUGES: usize = 4;

const KIND_SLICE: u64 = 1;
const KIND_INSTANT: u64 = 2;
const KIND_GAUGE: u64 = 3;

/// Which row of the picture a mark belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Lane {
    /// Prefix forward, suffixes, prefix backward.
    Phase = 0,
    /// Forward or backward of one layer.
    Layer = 1,
    /// Compute waited for the runtime.
    Stall = 2,
    /// Copies from device memory to pinned host memory.
    DeviceToHost = 3,
    /// Copies from pinned host memory to device memory.
    HostToDevice = 4,
    /// Writes to the NVMe file.
    NvmeWrite = 5,
    /// Reads from the NVMe file.
    NvmeRead = 6,
    /// Things worth knowing that take no time: a full disk, a refusal, a retry.
    Notice = 7,
}

impl Lane {
    /// Every lane, in order of its number.
    pub const ALL: [Lane; LANES] = [
        Lane::Phase,
        Lane::Layer,
        Lane::Stall,
        Lane::DeviceToHost,
        Lane::HostToDevice,
        Lane::NvmeWrite,
        Lane::NvmeRead,
        Lane::Notice,
    ];

    /// What the pictures call it.
    pub fn title(self) -> &'static str {
        match self {
            Lane::Phase => "phases",
            Lane::Layer => "layers",
            Lane::Stall => "stalls",
            Lane::DeviceToHost => "device → host",
            Lane::HostToDevice => "host → device",
            Lane::NvmeWrite => "nvme write",
            Lane::NvmeRead => "nvme read",
            Lane::Notice => "notices",
        }
    }

    /// Whether slices of this lane copy bytes between tiers.
    pub fn is_copy(self) -> bool {
        self.is_outbound() || matches!(self, Lane::HostToDevice | Lane::NvmeRead)
    }

    /// Whether slices of this lane move bytes away from the device: falling asleep, not waking.
    pub fn is_outbound(self) -> bool {
        matches!(self, Lane::DeviceToHost | Lane::NvmeWrite)
    }

    fn from_code(code: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }
}

/// A level in bytes that is followed over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Gauge {
    /// Device bytes handed out and awake.
    DeviceAwake = 0,
    /// Device bytes with pages behind them: awake, cached and staged.
    DeviceMapped = 1,
    /// Bytes held in the pinned host tier.
    HostUsed = 2,
    /// Bytes held in the NVMe file.
    NvmeUsed = 3,
}

impl Gauge {
    /// Every gauge, in order of its number.
    pub const ALL: [Gauge; GAUGES] =
        [Gauge::DeviceAwake, Gauge::DeviceMapped, Gauge::HostUsed, Gauge::NvmeUsed];

    /// What the pictures call it.
    pub fn title(self) -> &'static str {
        match self {
            Gauge::DeviceAwake => "device awake",
            Gauge::DeviceMapped => "device mapped",
            Gauge::HostUsed => "host used",
            Gauge::NvmeUsed => "nvme used",
        }
    }

    fn from_code(code: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }
}

/// One thing that was recorded. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Something that took time.
    Slice {
        /// Where it is drawn.
        lane: Lane,
        /// What it was.
        name: NameId,
        /// When it began.
        start_ns: u64,
        /// When it ended, never before it began.
        end_ns: u64,
        /// Bytes it moved, or 0.
        bytes: u64,
        /// The region it moved, or 0 for none.
        flow: u64,
    },
    /// Something that took no time.
    Instant {
        /// Where it is drawn.
        lane: Lane,
        /// What it was.
        name: NameId,
        /// When it happened.
        at_ns: u64,
        /// A number that means what the name says.
        value: u64,
    },
    /// A level changed.
    Gauge {
        /// Which level.
        gauge: Gauge,
        /// When it changed.
        at_ns: u64,
        /// The level from then on.
        value_bytes: u64,
        /// The level up to then: what a picture whose beginning was lost starts from.
        previous_bytes: u64,
    },
}

impl Event {
    /// When it began.
    pub fn start_ns(&self) -> u64 {
        match *self {
            Event::Slice { start_ns, .. } => start_ns,
            Event::Instant { at_ns, .. } | Event::Gauge { at_ns, .. } => at_ns,
        }
    }

    /// When it was over.
    pub fn end_ns(&self) -> u64 {
        match *self {
            Event::Slice { end_ns, .. } => end_ns,
            Event::Instant { at_ns, .. } | Event::Gauge { at_ns, .. } => at_ns,
        }
    }

    #[inline]
    pub(crate) fn pack(self) -> [u64; EVENT_WORDS] {
        match self {
            Event::Slice { lane, name, start_ns, end_ns, bytes, flow } => {
                [head(KIND_SLICE, lane as u8, name), start_ns, end_ns, bytes, flow]
            }
            Event::Instant { lane, name, at_ns, value } => {
                [head(KIND_INSTANT, lane as u8, name), at_ns, value, 0, 0]
            }
            Event::Gauge { gauge, at_ns, value_bytes, previous_bytes } => {
                let head = head(KIND_GAUGE, gauge as u8, NameId::OTHER);
                [head, at_ns, value_bytes, previous_bytes, 0]
            }
        }
    }

    /// `None` for words that [`Event::pack`] never makes.
    pub(crate) fn unpack(words: [u64; EVENT_WORDS]) -> Option<Self> {
        let [head, first, second, third, fourth] = words;
        let code = (head >> 8) & 0xff;
        let name = NameId::from_index((head >> 16) as u16);
        match head & 0xff {
            KIND_SLICE => Some(Event::Slice {
                lane: Lane::from_code(code)?,
                name,
                start_ns: first,
                end_ns: second,
                bytes: third,
                flow: fourth,
            }),
            KIND_INSTANT => Some(Event::Instant {
                lane: Lane::from_code(code)?,
                name,
                at_ns: first,
                value: second,
            }),
            KIND_GAUGE => Some(Event::Gauge {
                gauge: Gauge::from_code(code)?,
                at_ns: first,
                value_bytes: second,
                previous_bytes: third,
            }),
            _ => None,
        }
    }
}

#[inline]
fn head(kind: u64, code: u8, name: NameId) -> u64 {
    kind | u64::from(code) << 8 | u64::from(name.index()) << 16
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_and_order_of_lanes_and_gauges_agree() {
        for (at, lane) in Lane::ALL.into_iter().enumerate() {
            assert_eq!(lane as usize, at);
        }
        for (at, gauge) in Gauge::ALL.into_iter().enumerate() {
            assert_eq!(gauge as usize, at);
        }
    }

    #[test]
    fn words_nobody_packs_are_refused() {
        assert_eq!(Event::unpack([0; EVENT_WORDS]), None);
        assert_eq!(Event::unpack([KIND_GAUGE + 1, 0, 0, 0, 0]), None);
        assert_eq!(Event::unpack([KIND_SLICE | (LANES as u64) << 8, 0, 0, 0, 0]), None);
        assert_eq!(Event::unpack([KIND_GAUGE | (GAUGES as u64) << 8, 0, 0, 0, 0]), None);
    }

    proptest! {
        #[test]
        fn every_event_survives_packing(
            kind in 0..3, code in 0usize..LANES, name: u16, a: u64, b: u64, c: u64, d: u64
        ) {
            let (lane, name) = (Lane::ALL[code], NameId::from_index(name));
            let event = match kind {
                0 => Event::Slice { lane, name, start_ns: a, end_ns: b, bytes: c, flow: d },
                1 => Event::Instant { lane, name, at_ns: a, value: b },
                _ => Event::Gauge {
                    gauge: Gauge::ALL[code % GAUGES], at_ns: a, value_bytes: b, previous_bytes: c
                },
            };
            prop_assert_eq!(Event::unpack(event.pack()), Some(event));
        }
    }
}
