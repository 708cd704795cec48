//! The tracks of a trace: their hierarchy, order and descriptors.

use super::wire::Message;
use crate::event::{GAUGES, Gauge, LANES, Lane, Slice};
use crate::lanes;
use crate::levels::Levels;
use crate::names::NameId;
use crate::snapshot::{Process, Snapshot};

/// Children are shown in the order of `SIBLING_ORDER_RANK`.
const ORDER_EXPLICIT: u64 = 3;
const UNIT_BYTES: u64 = 3;
/// Counters with the same key share a scale.
const SCALE: &str = "bytes";
/// Track numbers reserved for the sub-tracks of a lane.
const LANE_STRIDE: u64 = lanes::SUBTRACKS_MAX as u64;

/// Field numbers of `TrackDescriptor`.
mod field {
    pub(super) const UUID: u32 = 1;
    pub(super) const NAME: u32 = 2;
    pub(super) const PROCESS: u32 = 3;
    pub(super) const PARENT_UUID: u32 = 5;
    pub(super) const COUNTER: u32 = 8;
    pub(super) const CHILD_ORDERING: u32 = 11;
    pub(super) const SIBLING_ORDER_RANK: u32 = 12;
    pub(super) const DESCRIPTION: u32 = 14;
}

/// Track numbers within a process: unique, and the same in every trace.
const PROCESS: u64 = 0;
const MEMORY: u64 = 1;
const TRANSFERS: u64 = 2;
const SCHEDULE: u64 = 3;
const FIRST_GAUGE: u64 = 8;
const FIRST_LANE: u64 = FIRST_GAUGE + GAUGES as u64;
/// Behind every lane.
const FIRST_TAG: u64 = 2048;
const _: () = assert!(FIRST_LANE + LANES as u64 * LANE_STRIDE <= FIRST_TAG);

/// The slices of a lane by start, each with its sub-track.
type PlacedSlices = Vec<(Slice, Option<usize>)>;

/// The tracks of a snapshot, and the sub-track of each slice.
#[derive(Debug)]
pub(super) struct Tracks {
    /// First track id of the process.
    base: u64,
    /// An encoded `TrackDescriptor` for each track.
    descriptors: Vec<Message>,
    lanes: [PlacedSlices; LANES],
}

impl Tracks {
    pub(super) fn plan(snapshot: &Snapshot, levels: &Levels, process: &Process) -> Self {
        let base = mix(u64::from(process.pid) << 32 | u64::from(process.rank)) & !0xffff;
        let mut plan =
            Self { base, descriptors: Vec::new(), lanes: std::array::from_fn(|_| Vec::new()) };
        let title = process.title();
        plan.add(PROCESS, None, &title, "", |body| {
            body.message(field::PROCESS, |body| {
                body.unsigned(1, process.pid.into());
                body.text(6, &title);
            });
            body.unsigned(field::CHILD_ORDERING, ORDER_EXPLICIT);
        });
        plan.add_group(MEMORY, "memory", "Bytes by tier.");
        for gauge in Gauge::ALL.into_iter().filter(|gauge| *gauge != Gauge::DeviceTagged) {
            plan.add_counter(FIRST_GAUGE + gauge as u64, gauge.title(), about_gauge(gauge));
        }
        for (tag, _) in levels.tags() {
            let title = format!("tag {}", snapshot.names.get(*tag));
            plan.add_counter(tag_number(*tag), &title, about_gauge(Gauge::DeviceTagged));
        }
        plan.add_group(TRANSFERS, "transfers", "Copies.");
        for lane in Lane::ALL.into_iter().filter(|lane| lane.is_copy()) {
            plan.add_lane(snapshot, lane, TRANSFERS);
        }
        plan.add_lane(snapshot, Lane::Stall, PROCESS);
        plan.add_group(SCHEDULE, "schedule", "The step.");
        plan.add_lane(snapshot, Lane::Phase, SCHEDULE);
        plan.add_lane(snapshot, Lane::Microbatch, SCHEDULE);
        plan.add_lane(snapshot, Lane::Layer, SCHEDULE);
        plan.add_lane(snapshot, Lane::Notice, PROCESS);
        plan
    }

    pub(super) fn descriptors(&self) -> &[Message] {
        &self.descriptors
    }

    pub(super) fn slices(&self, lane: Lane) -> &[(Slice, Option<usize>)] {
        &self.lanes[lane as usize]
    }

    pub(super) fn lane_uuid(&self, lane: Lane, sub: usize) -> u64 {
        self.base.wrapping_add(FIRST_LANE + lane as u64 * LANE_STRIDE + sub as u64)
    }

    pub(super) fn gauge_uuid(&self, gauge: Gauge) -> u64 {
        self.base.wrapping_add(FIRST_GAUGE + gauge as u64)
    }

    pub(super) fn tag_uuid(&self, tag: NameId) -> u64 {
        self.base.wrapping_add(tag_number(tag))
    }

    /// Returns the trace-wide id of a region's flow. It differs between processes, whose traces may be
    /// opened together.
    pub(super) fn flow_id(&self, flow: u64) -> u64 {
        mix(self.base ^ mix(flow)).max(1)
    }

    /// Adds a track with this number and the fields that `fill` adds.
    fn add(
        &mut self,
        number: u64,
        parent: Option<u64>,
        name: &str,
        description: &str,
        fill: impl FnOnce(&mut Message),
    ) {
        let rank = self.descriptors.len() as u64;
        let mut body = Message::default();
        body.unsigned(field::UUID, self.base.wrapping_add(number));
        body.text(field::NAME, name);
        if let Some(parent) = parent {
            body.unsigned(field::PARENT_UUID, self.base.wrapping_add(parent));
            body.unsigned(field::SIBLING_ORDER_RANK, rank);
        }
        fill(&mut body);
        if !description.is_empty() {
            body.text(field::DESCRIPTION, description);
        }
        self.descriptors.push(body);
    }

    fn add_counter(&mut self, number: u64, title: &str, about: &str) {
        self.add(number, Some(MEMORY), title, about, |body| {
            body.message(field::COUNTER, |counter| {
                counter.unsigned(3, UNIT_BYTES);
                counter.text(7, SCALE);
            });
        });
    }

    fn add_group(&mut self, number: u64, name: &str, description: &str) {
        self.add(number, Some(PROCESS), name, description, |body| {
            body.unsigned(field::CHILD_ORDERING, ORDER_EXPLICIT);
        });
    }

    /// Adds the sub-tracks of `lane`, at least one.
    fn add_lane(&mut self, snapshot: &Snapshot, lane: Lane, parent: u64) {
        let slices = snapshot.slices(lane);
        let (places, tracks) = lanes::place(&slices);
        for sub in 0..tracks.max(1) {
            // The viewer merges siblings of the same name.
            let name = match sub {
                0 => lane.title().to_owned(),
                _ => format!("{} ({})", lane.title(), sub + 1),
            };
            let number = FIRST_LANE + lane as u64 * LANE_STRIDE + sub as u64;
            self.add(number, Some(parent), &name, about_lane(lane), |_| {});
        }
        self.lanes[lane as usize] = slices.into_iter().zip(places).collect();
    }
}

fn about_gauge(gauge: Gauge) -> &'static str {
    match gauge {
        Gauge::DeviceAwake => "Device bytes handed out and awake.",
        Gauge::DeviceMapped => "Device bytes with pages behind them: awake, cached and staged.",
        Gauge::HostUsed => "Bytes held in the pinned host tier.",
        Gauge::NvmeUsed => "Bytes held in the NVMe file.",
        Gauge::DeviceBoundary => "Awake device bytes of boundary tensors.",
        Gauge::DeviceBoundaryGrad => "Awake device bytes of their gradients' accumulators.",
        Gauge::DeviceDormant => "Awake device bytes of the prefix's saved activations.",
        Gauge::DeviceTagged => "Awake device bytes under this tag.",
    }
}

fn about_lane(lane: Lane) -> &'static str {
    match lane {
        Lane::Phase => "Prefix forward, suffixes, prefix backward.",
        Lane::Layer => "Forward or backward of one layer.",
        Lane::Stall => "Compute waited for the runtime.",
        Lane::DeviceToHost => "Copies from device memory to pinned host memory.",
        Lane::HostToDevice => "Copies from pinned host memory to device memory.",
        Lane::NvmeWrite => "Writes to the NVMe file.",
        Lane::NvmeRead => "Reads from the NVMe file.",
        Lane::Notice => "Events without duration: a full disk, a refusal, a retry.",
        Lane::Microbatch => "Responses that run in one packed row.",
    }
}

fn tag_number(tag: NameId) -> u64 {
    FIRST_TAG + u64::from(tag.index())
}

/// Mixes the bits of a 64-bit number; a bijection (Stafford's finaliser).
fn mix(mut value: u64) -> u64 {
    value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
