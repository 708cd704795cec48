//! Events, and their encoding in the seven words of a ring slot: with its sequence, one cache line.
//!
//! ```text
//!   word   slice                                    instant             gauge
//!   0      kind | lane<<8 | name<<16 | layer<<32    same, no layer      kind | gauge<<8 | name<<16
//!   1      start_ns                                 at_ns               at_ns
//!   2      end_ns                                   value               value_bytes
//!   3      bytes                                    –                   previous_bytes
//!   4      flow                                     –                   –
//!   5      asked_ns                                 –                   –
//!   6      queued_ns                                –                   –
//! ```
//! A layer is stored plus one; 0 is none.

use crate::names::{NameId, Names};

/// Words of payload in one ring slot.
pub(crate) const EVENT_WORDS: usize = 7;
/// Number of lanes.
pub(crate) const LANES: usize = 9;
/// Number of gauges.
pub(crate) const GAUGES: usize = 8;

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
    /// Responses that run in one packed row.
    Microbatch = 8,
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
        Lane::Microbatch,
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
            Lane::Microbatch => "microbatches",
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
    /// The part of [`Gauge::DeviceAwake`] in boundary tensors: K and V.
    DeviceBoundary = 4,
    /// The part in accumulators of their gradients.
    DeviceBoundaryGrad = 5,
    /// The part in saved activations of the prefix.
    DeviceDormant = 6,
    /// The part under a tag; one level by tag ([`crate::Timeline::tag_gauge`]).
    DeviceTagged = 7,
}

impl Gauge {
    /// All gauges, by number.
    pub const ALL: [Gauge; GAUGES] = [
        Gauge::DeviceAwake,
        Gauge::DeviceMapped,
        Gauge::HostUsed,
        Gauge::NvmeUsed,
        Gauge::DeviceBoundary,
        Gauge::DeviceBoundaryGrad,
        Gauge::DeviceDormant,
        Gauge::DeviceTagged,
    ];
    /// Levels of whole tiers. The others are parts of the first.
    pub const TIERS: [Gauge; 4] =
        [Gauge::DeviceAwake, Gauge::DeviceMapped, Gauge::HostUsed, Gauge::NvmeUsed];

    /// Returns the title shown in dumps.
    pub fn title(self) -> &'static str {
        match self {
            Gauge::DeviceAwake => "device awake",
            Gauge::DeviceMapped => "device mapped",
            Gauge::HostUsed => "host used",
            Gauge::NvmeUsed => "nvme used",
            Gauge::DeviceBoundary => "K and V",
            Gauge::DeviceBoundaryGrad => "accumulators",
            Gauge::DeviceDormant => "saved activations",
            Gauge::DeviceTagged => "tagged",
        }
    }
}

/// An interval. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// Its lane.
    pub lane: Lane,
    /// Its name.
    pub name: NameId,
    /// The layer it belongs to, if any, or the number of a microbatch, from 1; below `u32::MAX`.
    pub layer: Option<u32>,
    /// When a copy was asked for; at most `queued_ns`. Between the two it waited for memory to copy into.
    pub asked_ns: u64,
    /// When it was queued; at most `start_ns`. Between the two it waited behind others.
    pub queued_ns: u64,
    /// Start time.
    pub start_ns: u64,
    /// End time, not before the start.
    pub end_ns: u64,
    /// Bytes moved, or 0.
    pub bytes: u64,
    /// Id of the region moved, or 0.
    pub flow: u64,
}

impl Slice {
    /// Returns a slice that moves nothing and waited for nothing.
    #[inline]
    pub fn new(lane: Lane, name: NameId, start_ns: u64, end_ns: u64) -> Self {
        let (asked_ns, queued_ns) = (start_ns, start_ns);
        Self { lane, name, layer: None, asked_ns, queued_ns, start_ns, end_ns, bytes: 0, flow: 0 }
    }

    /// Returns its duration.
    pub fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }

    /// Returns its name with its layer or number: "L11 read", "microbatch 2".
    pub fn title(&self, names: &Names) -> String {
        let name = names.get(self.name);
        match (self.layer, self.lane) {
            (None, _) => name.to_owned(),
            (Some(number), Lane::Microbatch) => format!("{name} {number}"),
            (Some(layer), _) => format!("L{layer} {name}"),
        }
    }

    /// Puts its times in order. An end before the start counts as the start.
    #[inline]
    pub(crate) fn in_order(mut self) -> Self {
        self.end_ns = self.end_ns.max(self.start_ns);
        self.queued_ns = self.queued_ns.min(self.start_ns);
        self.asked_ns = self.asked_ns.min(self.queued_ns);
        self
    }
}

/// A recorded event. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// An interval.
    Slice(Slice),
    /// A moment. On the lanes of phases, microbatches and layers: the moment, on the thread of the trainer, at
    /// which one begins; its slice follows when it has ended.
    Instant {
        /// Its lane.
        lane: Lane,
        /// Its name.
        name: NameId,
        /// Time.
        at_ns: u64,
        /// A number whose meaning depends on the name; of a layer or microbatch that begins, its number.
        value: u64,
    },
    /// A change of a gauge.
    Gauge {
        /// The gauge.
        gauge: Gauge,
        /// The tag of [`Gauge::DeviceTagged`]; else [`NameId::OTHER`].
        tag: NameId,
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
            Event::Slice(Slice { start_ns, .. }) => start_ns,
            Event::Instant { at_ns, .. } | Event::Gauge { at_ns, .. } => at_ns,
        }
    }

    /// Returns the end time.
    pub fn end_ns(&self) -> u64 {
        match *self {
            Event::Slice(Slice { end_ns, .. }) => end_ns,
            Event::Instant { at_ns, .. } | Event::Gauge { at_ns, .. } => at_ns,
        }
    }

    #[inline]
    pub(crate) fn pack(self) -> [u64; EVENT_WORDS] {
        match self {
            Event::Slice(slice) => {
                let Slice { lane, name, layer, .. } = slice;
                let layer = u64::from(layer.map_or(0, |layer| layer.saturating_add(1)));
                let head = head(KIND_SLICE, lane as u8, name) | layer << 32;
                let Slice { asked_ns, queued_ns, start_ns, end_ns, bytes, flow, .. } = slice;
                [head, start_ns, end_ns, bytes, flow, asked_ns, queued_ns]
            }
            Event::Instant { lane, name, at_ns, value } => {
                [head(KIND_INSTANT, lane as u8, name), at_ns, value, 0, 0, 0, 0]
            }
            Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes } => {
                let head = head(KIND_GAUGE, gauge as u8, tag);
                [head, at_ns, value_bytes, previous_bytes, 0, 0, 0]
            }
        }
    }

    /// Returns `None` for words that [`Event::pack`] never produces.
    pub(crate) fn unpack(words: [u64; EVENT_WORDS]) -> Option<Self> {
        let [head, first, second, third, fourth, asked_ns, queued_ns] = words;
        let code = (head >> 8 & 0xff) as usize;
        let name = NameId::from_index((head >> 16) as u16);
        match head & 0xff {
            KIND_SLICE => Some(Event::Slice(Slice {
                lane: *Lane::ALL.get(code)?,
                name,
                layer: ((head >> 32) as u32).checked_sub(1),
                asked_ns,
                queued_ns,
                start_ns: first,
                end_ns: second,
                bytes: third,
                flow: fourth,
            })),
            KIND_INSTANT => Some(Event::Instant {
                lane: *Lane::ALL.get(code)?,
                name,
                at_ns: first,
                value: second,
            }),
            KIND_GAUGE => Some(Event::Gauge {
                gauge: *Gauge::ALL.get(code)?,
                tag: name,
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
        for head in
            [KIND_GAUGE + 1, KIND_SLICE | (LANES as u64) << 8, KIND_GAUGE | (GAUGES as u64) << 8]
        {
            assert_eq!(Event::unpack([head, 0, 0, 0, 0, 0, 0]), None);
        }
    }

    proptest! {
        #[test]
        fn every_event_survives_packing(
            kind in 0..3, code in 0usize..LANES, name: u16, a: u64, b: u64, c: u64, d: u64,
            asked_ns: u64, queued_ns: u64, layer in proptest::option::of(0..u32::MAX)
        ) {
            let (lane, name) = (Lane::ALL[code], NameId::from_index(name));
            let event = match kind {
                0 => Event::Slice(Slice {
                    lane, name, layer, asked_ns, queued_ns, start_ns: a, end_ns: b, bytes: c, flow: d
                }),
                1 => Event::Instant { lane, name, at_ns: a, value: b },
                _ => Event::Gauge {
                    gauge: Gauge::ALL[code % GAUGES], tag: name, at_ns: a, value_bytes: b, previous_bytes: c
                },
            };
            prop_assert_eq!(Event::unpack(event.pack()), Some(event));
        }
    }
}
