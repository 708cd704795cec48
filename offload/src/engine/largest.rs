//! What a timeline dump is told beside its events: the largest live blocks, the budget, the rates.
//!
//! Where memory runs out, the moment of the dump is the one that matters. A dump between two steps finds nothing of
//! what the step held: so marks of a prefix keep the largest blocks of their moment when much more is in use than at the
//! last such moment. So does the end of a tag: Python destroys tags and runtime before the exit of the process.

use dormouse_alloc::{Allocator, BlockInfo};
use dormouse_device::Device;
use dormouse_timeline::{BLOCKS_MAX, Facts, Gauge, Lane, LiveBlock, now_ns};

use super::{Engine, TagId};
use crate::ids::{RegionId, Role, layer_of, name_of};
use dormouse_storage::sync::lock;

/// Marks keep the largest blocks of their moment if this part more is in use than when they were kept last: at
/// most 120 times from 64 MiB to 80 GiB, each O(blocks).
const KEPT_STEP_DIVISOR: u64 = 16;

/// The largest live blocks of a moment.
#[derive(Debug, Default)]
pub(super) struct LargestBlocks {
    at_ns: u64,
    /// Allocated bytes of the moment.
    level_bytes: u64,
    blocks: Vec<LiveBlock>,
    /// Number and bytes of all.
    total: (u64, u64),
}

impl<D: Device> Engine<D> {
    /// Keeps the largest live blocks if `allocated_bytes`, what is in use now, is much more than when they were
    /// kept last.
    pub(crate) fn note_level(&self, allocated_bytes: u64) {
        let kept_bytes = lock(&self.largest).level_bytes;
        if allocated_bytes > kept_bytes + kept_bytes / KEPT_STEP_DIVISOR {
            let now = self.largest_blocks(allocated_bytes);
            *lock(&self.largest) = now;
        }
    }

    /// As [`Engine::note_level`], of this moment.
    pub(super) fn note_level_now(&self) {
        self.note_level(self.allocator.stats().allocated_bytes.current);
    }

    /// Forgets the largest blocks kept: peaks begin anew.
    pub(super) fn forget_largest(&self) {
        *lock(&self.largest) = LargestBlocks::default();
    }

    /// Returns what a dump is told, with the largest blocks of this moment or, if more was in use then, of a mark.
    /// Takes time proportional to the number of blocks, under the allocator's lock.
    #[must_use]
    pub fn facts(&self) -> Facts {
        let stats = self.allocator.stats();
        let now = self.largest_blocks(stats.allocated_bytes.current);
        let kept = lock(&self.largest);
        // At equal levels the kept ones: what has closed since then had a name.
        let largest = if kept.level_bytes >= now.level_bytes { &*kept } else { &now };
        let rates = self.best_rates();
        let mut bytes_per_s = [0; Lane::ALL.len()];
        for (lane, rate) in [
            (Lane::DeviceToHost, rates.device_to_host_bytes_per_s),
            (Lane::HostToDevice, rates.host_to_device_bytes_per_s),
            (Lane::NvmeWrite, rates.device_to_nvme_bytes_per_s),
            (Lane::NvmeRead, rates.nvme_to_device_bytes_per_s),
        ] {
            bytes_per_s[lane as usize] = rate;
        }
        Facts {
            reason: String::new(),
            budget_bytes: stats.budget_bytes,
            peak_bytes: stats.active_bytes.peak,
            bytes_per_s,
            blocks_at_ns: largest.at_ns,
            blocks: largest.blocks.clone(),
            blocks_total: largest.total,
        }
    }

    /// Returns the largest awake blocks of this moment.
    fn largest_blocks(&self, level_bytes: u64) -> LargestBlocks {
        let at_ns = self.timeline.now_ns();
        let (blocks, total) = largest_awake(&self.allocator);
        let blocks = blocks.iter().map(|block| self.describe(block)).collect();
        LargestBlocks { at_ns, level_bytes, blocks, total }
    }

    fn describe(&self, block: &BlockInfo) -> LiveBlock {
        let region = block.claimed.and_then(RegionId::from_key);
        let info = region.and_then(|id| self.region_info(id).ok());
        let (role, tag, layer) = match info {
            Some(info) => {
                let role = match info.role {
                    Role::Boundary => Gauge::DeviceBoundary,
                    Role::BoundaryGrad => Gauge::DeviceBoundaryGrad,
                    Role::Dormant => Gauge::DeviceDormant,
                    Role::Tagged => Gauge::DeviceTagged,
                };
                (role.title(), name_of(&info.label), layer_of(&info.label))
            }
            None => (
                "other",
                self.tag_name(TagId(block.tag)).unwrap_or_default(),
                scope_layer(block.scope),
            ),
        };
        LiveBlock { role: role.to_owned(), tag, layer, ..plain(block) }
    }
}

/// Returns what a dump is told of an allocator without an engine: its budget, and the largest live blocks of this
/// moment. Takes time proportional to the number of blocks, under the allocator's lock.
#[must_use]
pub fn allocator_facts<D: Device>(allocator: &Allocator<D>) -> Facts {
    let (blocks, blocks_total) = largest_awake(allocator);
    let stats = allocator.stats();
    Facts {
        budget_bytes: stats.budget_bytes,
        peak_bytes: stats.active_bytes.peak,
        blocks_at_ns: now_ns(),
        blocks: blocks.iter().map(plain).collect(),
        blocks_total,
        ..Facts::default()
    }
}

/// Returns the largest awake blocks, the number of all and their bytes.
fn largest_awake<D: Device>(allocator: &Allocator<D>) -> (Vec<BlockInfo>, (u64, u64)) {
    let mut blocks = allocator.blocks();
    blocks.retain(|block| !block.asleep);
    let total_bytes = blocks.iter().map(|block| block.range.bytes as u64).sum();
    let total = (blocks.len() as u64, total_bytes);
    // Stable by address where sizes are equal.
    blocks.sort_unstable_by_key(|block| (std::cmp::Reverse(block.range.bytes), block.range.start));
    blocks.truncate(BLOCKS_MAX);
    (blocks, total)
}

/// Describes a block as its allocator knows it. A tag without a name is its number.
fn plain(block: &BlockInfo) -> LiveBlock {
    LiveBlock {
        address: block.range.start as u64,
        bytes: block.range.bytes as u64,
        role: "other".to_owned(),
        tag: if block.tag == 0 { String::new() } else { format!("number {}", block.tag) },
        layer: scope_layer(block.scope),
        stream: block.stream,
    }
}

/// Returns the layer of a block that was allocated in a layer's window (`Prefix::scope`).
const fn scope_layer(scope: u64) -> Option<u32> {
    if scope == 0 { None } else { Some(scope as u32) }
}
