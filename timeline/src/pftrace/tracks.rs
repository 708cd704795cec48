//! The tracks of a trace: which exist, under whom, in which order.

use super::wire::Message;
use crate::event::{GAUGES, Gauge, LANES, Lane};
use crate::lanes::{self, Place};
use crate::snapshot::{Process, Slice, Snapshot};

/// Children are shown in the order of their ranks.
const ORDER_EXPLICIT: u64 = 3;
const UNIT_BYTES: u64 = 3;
/// Counters that share this key share a scale, so that areas of two tiers can be compared.
const SCALE: &str = "bytes";
/// Room for the sub-tracks of one lane among the track numbers.
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

#[derive(Clone, Debug)]
enum Kind {
    Process { pid: u32, name: String },
    Group,
    Counter,
    Marks,
}

/// One track of the trace.
#[derive(Clone, Debug)]
pub(super) struct Track {
    uuid: u64,
    parent_uuid: Option<u64>,
    rank: u64,
    name: String,
    description: &'static str,
    kind: Kind,
}

/// Every track of a snapshot, and where each slice goes.
#[derive(Debug)]
pub(super) struct Tracks {
    base: u64,
    tracks: Vec<Track>,
    lanes: [Vec<(Slice, Place)>; LANES],
}

/// Track numbers within a process: unique, and the same in every trace.
#[derive(Clone, Copy, Debug)]
enum Local {
    Process,
    Memory,
    Transfers,
    Schedule,
    Gauge(Gauge),
    Lane(Lane, usize),
}

impl Local {
    fn number(self) -> u64 {
        match self {
            Local::Process => 0,
            Local::Memory => 1,
            Local::Transfers => 2,
            Local::Schedule => 3,
            Local::Gauge(gauge) => 8 + gauge as u64,
            Local::Lane(lane, sub) => 8 + GAUGES as u64 + lane as u64 * LANE_STRIDE + sub as u64,
        }
    }
}

impl Tracks {
    pub(super) fn plan(snapshot: &Snapshot, process: &Process) -> Self {
        let mut plan = Self {
            base: identity(process),
            tracks: Vec::new(),
            lanes: std::array::from_fn(|_| Vec::new()),
        };
        let kind = Kind::Process { pid: process.pid, name: process.title() };
        plan.add(Local::Process, None, process.title(), "", kind);
        plan.add(Local::Memory, Some(Local::Process), "memory", "Bytes by tier.", Kind::Group);
        for gauge in Gauge::ALL {
            let about = about_gauge(gauge);
            plan.add(Local::Gauge(gauge), Some(Local::Memory), gauge.title(), about, Kind::Counter);
        }
        let (transfers, schedule) = (Some(Local::Transfers), Some(Local::Schedule));
        plan.add(Local::Transfers, Some(Local::Process), "transfers", "Copies.", Kind::Group);
        for lane in Lane::ALL.into_iter().filter(|lane| lane.is_copy()) {
            plan.add_lane(snapshot, lane, transfers);
        }
        plan.add_lane(snapshot, Lane::Stall, Some(Local::Process));
        plan.add(Local::Schedule, Some(Local::Process), "schedule", "The step.", Kind::Group);
        plan.add_lane(snapshot, Lane::Phase, schedule);
        plan.add_lane(snapshot, Lane::Layer, schedule);
        plan.add_lane(snapshot, Lane::Notice, Some(Local::Process));
        plan
    }

    pub(super) fn descriptors(&self) -> &[Track] {
        &self.tracks
    }

    /// The slices of `lane` by their starts, each with its place.
    pub(super) fn slices(&self, lane: Lane) -> &[(Slice, Place)] {
        self.lanes.get(lane as usize).map_or(&[], Vec::as_slice)
    }

    pub(super) fn lane_uuid(&self, lane: Lane, sub: usize) -> u64 {
        self.uuid(Local::Lane(lane, sub))
    }

    pub(super) fn gauge_uuid(&self, gauge: Gauge) -> u64 {
        self.uuid(Local::Gauge(gauge))
    }

    /// The trace-wide id of a region's flow: regions of different processes must not meet when
    /// their traces are opened together.
    pub(super) fn flow_id(&self, flow: u64) -> u64 {
        mix(self.base ^ mix(flow)).max(1)
    }

    fn uuid(&self, local: Local) -> u64 {
        self.base.wrapping_add(local.number())
    }

    fn add(
        &mut self,
        local: Local,
        parent: Option<Local>,
        name: impl Into<String>,
        description: &'static str,
        kind: Kind,
    ) {
        let track = Track {
            uuid: self.uuid(local),
            parent_uuid: parent.map(|parent| self.uuid(parent)),
            rank: self.tracks.len() as u64,
            name: name.into(),
            description,
            kind,
        };
        self.tracks.push(track);
    }

    /// A track for `lane`, and one more for each slice that overlaps another.
    fn add_lane(&mut self, snapshot: &Snapshot, lane: Lane, parent: Option<Local>) {
        let slices = snapshot.slices(lane);
        let (places, tracks) = lanes::place(&slices);
        for sub in 0..tracks.max(1) {
            // Siblings of one name would be merged by the viewer.
            let name = match sub {
                0 => lane.title().to_owned(),
                _ => format!("{} ({})", lane.title(), sub + 1),
            };
            self.add(Local::Lane(lane, sub), parent, name, about_lane(lane), Kind::Marks);
        }
        if let Some(of_lane) = self.lanes.get_mut(lane as usize) {
            *of_lane = slices.into_iter().zip(places).collect();
        }
    }
}

impl Track {
    /// Fills a `TrackDescriptor`.
    pub(super) fn describe(&self, body: &mut Message) {
        body.unsigned(field::UUID, self.uuid);
        body.text(field::NAME, &self.name);
        if let Some(parent_uuid) = self.parent_uuid {
            body.unsigned(field::PARENT_UUID, parent_uuid);
            body.unsigned(field::SIBLING_ORDER_RANK, self.rank);
        }
        match &self.kind {
            Kind::Process { pid, name } => {
                body.message(field::PROCESS, |process| {
                    process.unsigned(1, u64::from(*pid));
                    process.text(6, name);
                });
                body.unsigned(field::CHILD_ORDERING, ORDER_EXPLICIT);
            }
            Kind::Group => body.unsigned(field::CHILD_ORDERING, ORDER_EXPLICIT),
            Kind::Counter => body.message(field::COUNTER, |counter| {
                counter.unsigned(3, UNIT_BYTES);
                counter.text(7, SCALE);
            }),
            Kind::Marks => {}
        }
        if !self.description.is_empty() {
            body.text(field::DESCRIPTION, self.description);
        }
    }
}

fn about_gauge(gauge: Gauge) -> &'static str {
    match gauge {
        Gauge::DeviceAwake => "Device bytes handed out and awake.",
        Gauge::DeviceMapped => "Device bytes with pages behind them: awake, cached and staged.",
        Gauge::HostUsed => "Bytes held in the pinned host tier.",
        Gauge::NvmeUsed => "Bytes held in the NVMe file.",
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
        Lane::Notice => "Things worth knowing that take no time.",
    }
}

/// Where the ids of a process begin: far from those of any other process of the job.
fn identity(process: &Process) -> u64 {
    mix(u64::from(process.pid) << 32 | u64::from(process.rank)) & !0xffff
}

/// A bijection of 64-bit numbers whose outputs look unrelated (Stafford's finaliser).
fn mix(mut value: u64) -> u64 {
    value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
