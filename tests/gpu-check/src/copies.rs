//! Our copies against plain pinned ones of the same size, in one run, turn and turn about.

use std::time::Instant;

use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::{AddressRange, Device, Fill};
use serde_json::{Value, json};

use crate::plain::Plain;
use crate::{Options, median};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const ROUNDS: usize = 7;
/// Bytes of one measurement: enough copies of a small size that a clock sees them.
const ROUND_BYTES: usize = 512 * MIB;
/// Copies of one measurement at most.
const COPIES_MAX: usize = 2000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Out,
    In,
    Both,
}

/// Two ends of copies each way, on two streams, and what queues them.
trait Copier {
    fn queue(&self, way: Way, bytes: usize);
    fn finish(&self);
}

struct Ours {
    device: CudaDevice,
    memory: [AddressRange; 2],
    pinned: [AddressRange; 2],
    streams: [<CudaDevice as Device>::Stream; 2],
}

impl Ours {
    fn new(bytes: usize) -> Self {
        let device = CudaDevice::new(&CudaConfig::default()).unwrap();
        let whole = bytes.next_multiple_of(device.page_bytes());
        let space = device.address_space().start;
        let memory = [0, 1].map(|at| AddressRange::new(space + at * whole, whole));
        memory.iter().for_each(|range| device.map(*range, Fill::Zero).unwrap());
        let pinned = [0, 1].map(|_| device.allocate_pinned(bytes).unwrap());
        let streams = ["out", "in"].map(|name| device.create_stream(name).unwrap());
        Self { device, memory, pinned, streams }
    }
}

impl Copier for Ours {
    fn queue(&self, way: Way, bytes: usize) {
        // SAFETY: all four are ours for the life of the process, and at least that long.
        unsafe {
            if way != Way::In {
                let (to, from) = (self.pinned[0].start, self.memory[0].start);
                self.device.copy(to, from, bytes, &self.streams[0]).unwrap();
            }
            if way != Way::Out {
                let (to, from) = (self.memory[1].start, self.pinned[1].start);
                self.device.copy(to, from, bytes, &self.streams[1]).unwrap();
            }
        }
    }

    fn finish(&self) {
        for stream in &self.streams {
            let reached = self.device.record(stream).unwrap();
            self.device.synchronize(&reached).unwrap();
        }
    }
}

struct Theirs {
    plain: Plain,
    memory: [usize; 2],
    pinned: [usize; 2],
    streams: [usize; 2],
}

impl Theirs {
    fn new(bytes: usize) -> Self {
        let plain = Plain::open();
        let memory = [0, 1].map(|_| plain.device_memory(bytes));
        let pinned = [0, 1].map(|_| plain.pinned_memory(bytes));
        let streams = [0, 1].map(|_| plain.stream());
        // Pages that were never written may be cheaper to read than ours.
        for to in memory {
            plain.copy(to, pinned[0], bytes, streams[0]);
        }
        plain.synchronize(streams[0]);
        Self { plain, memory, pinned, streams }
    }
}

impl Copier for Theirs {
    fn queue(&self, way: Way, bytes: usize) {
        if way != Way::In {
            self.plain.copy(self.pinned[0], self.memory[0], bytes, self.streams[0]);
        }
        if way != Way::Out {
            self.plain.copy(self.memory[1], self.pinned[1], bytes, self.streams[1]);
        }
    }

    fn finish(&self) {
        self.streams.iter().for_each(|stream| self.plain.synchronize(*stream));
    }
}

/// Gigabytes per second, both directions added up where both are used.
fn rate(copier: &dyn Copier, way: Way, bytes: usize) -> f64 {
    let count = (ROUND_BYTES / bytes).clamp(1, COPIES_MAX);
    let start = Instant::now();
    for _ in 0..count {
        copier.queue(way, bytes);
    }
    copier.finish();
    let moved = (count * bytes) as f64 * if way == Way::Both { 2.0 } else { 1.0 };
    moved / start.elapsed().as_secs_f64() / 1e9
}

/// `most_mib`: the largest copy (1024).
pub(crate) fn measure(options: &Options) -> Value {
    let most = options.number("most_mib", 1024) * MIB;
    let (ours, theirs) = (Ours::new(most), Theirs::new(most));
    let mut rows = Vec::new();
    for (way, name) in [(Way::Out, "out"), (Way::In, "in"), (Way::Both, "both")] {
        let sizes = std::iter::successors(Some(64 * KIB), |bytes| bytes.checked_mul(4));
        for bytes in sizes.take_while(|bytes| *bytes <= most) {
            rate(&ours, way, bytes);
            rate(&theirs, way, bytes);
            let (mut own, mut peer, mut ratio) = (vec![], vec![], vec![]);
            for _ in 0..ROUNDS {
                let (one, other) = (rate(&ours, way, bytes), rate(&theirs, way, bytes));
                own.push(one);
                peer.push(other);
                ratio.push(one / other);
            }
            rows.push(json!({
                "way": name,
                "bytes": bytes,
                "ours_gb_per_s": median(own),
                "plain_gb_per_s": median(peer),
                "ratio": median(ratio),
            }));
        }
    }
    json!({ "rows": rows })
}
