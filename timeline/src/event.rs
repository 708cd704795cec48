//! Events, and their encoding in the five words of a ring slot.
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

/// The row on which a mark is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Lane {
    /// Prefix forward, suffixes, prefix backward.
    Phase = 0,
    /// Forward or backward of one layer.
    Layer = 1,
    /// Time in which compute waited for the runtime.
    Stall = 2,
    /// Copies from device memory to pinned host memory.
    DeviceToHost = 3,
    /// Copies from pinned host memory to device memory.
    HostToDevice = 4,
    /// Writes to the NVMe file.
    NvmeWrite = 5,
    /// Reads from the NVMe file.
    NvmeRead = 6,
    /// Events without duration: a full disk, a refusal, a retry.
    Notice = 7,
}

impl Lane {
    /// All lanes, by number.
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

    /// Returns the title shown in dumps.
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

    /// Returns whether slices of this lane copy bytes between tiers.
    pub fn is_copy(self) -> bool {
        self.is_outbound() || matches!(self, Lane::HostToDevice | Lane::NvmeRead)
    }

    /// Returns whether slices of this lane move bytes away from the device.
    pub fn is_outbound(self) -> bool {
        matches!(self, Lane::DeviceToHost | Lane::NvmeWrite)
    }
}

/// A value in bytes that is recorded at each change.
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
    /// All gauges, by number.
    pub const ALL: [Gauge; GAUGES] =
        [Gauge::DeviceAwake, Gauge::DeviceMapped, Gauge::HostUsed, Gauge::NvmeUsed];

    /// Returns the title shown in dumps.
    pub fn title(self) -> &'static str {
        match self {
            Gauge::DeviceAwake => "device awake",
            Gauge::DeviceMapped => "device mapped",
            Gauge::HostUsed => "host used",
            Gauge::NvmeUsed => "nvme used",
        }
    }
}

/// A recorded event. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// An interval.
    Slice {
        /// Its lane.
        lane: Lane,
        /// Its name.
        name: NameId,
        /// Start time.
        start_ns: u64,
        /// End time, not before the start.
        end_ns: u64,
        /// Bytes moved, or 0.
        bytes: u64,
        /// Id of the region moved, or 0.
        flow: u64,
    },
    /// A moment.
    Instant {
        /// Its lane.
        lane: Lane,
        /// Its name.
        name: NameId,
        /// Time.
        at_ns: u64,
        /// A number whose meaning depends on the name.
        value: u64,
    },
    /// A change of a gauge.
    Gauge {
        /// The gauge.
        gauge: Gauge,
        /// Time of the change.
        at_ns: u64,
        /// The new value.
        value_bytes: u64,
        /// The previous value: the initial value if older events are lost.
        previous_bytes: u64,
    },
}

impl Event {
    /// Returns the start time.
    pub fn start_ns(&self) -> u64 {
        match *self {
            Event::Slice { start_ns, .. } => start_ns,
            Event::Instant { at_ns, .. } | Event::Gauge { at_ns, .. } => at_ns,
        }
    }

    /// Returns the end time.
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

    /// Returns `None` for words that [`Event::pack`] never produces.
    pub(crate) fn unpack(words: [u64; EVENT_WORDS]) -> Option<Self> {
        let [head, first, second, third, fourth] = words;
        let code = (head >> 8 & 0xff) as usize;
        let name = NameId::from_index((head >> 16) as u16);
        match head & 0xff {
            KIND_SLICE => Some(Event::Slice {
                lane: *Lane::ALL.get(code)?,
                name,
                start_ns: first,
                end_ns: second,
                bytes: third,
                flow: fourth,
            }),
            KIND_INSTANT => Some(Event::Instant {
                lane: *Lane::ALL.get(code)?,
                name,
                at_ns: first,
                value: second,
            }),
            KIND_GAUGE => Some(Event::Gauge {
                gauge: *Gauge::ALL.get(code)?,
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
    fn unpack_refuses_invalid_words() {
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
