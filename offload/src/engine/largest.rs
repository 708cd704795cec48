//! What a timeline dump is told beside its events: the largest live blocks, the budget, the rates.

use dormouse_alloc::BlockInfo;
use dormouse_device::Device;
use dormouse_timeline::{BLOCKS_MAX, Facts, Gauge, Lane, LiveBlock};

use super::{Engine, TagId};
use crate::ids::{RegionId, Role, layer_of, name_of};

impl<D: Device> Engine<D> {
    /// Returns what a dump of this moment is told. Takes time proportional to the number of blocks, under the
    /// allocator's lock.
    #[must_use]
    pub fn facts(&self) -> Facts {
        let (blocks, blocks_total) = self.largest_blocks();
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
            budget_bytes: self.allocator.stats().budget_bytes,
            bytes_per_s,
            blocks_at_ns: self.timeline.now_ns(),
            blocks,
            blocks_total,
        }
    }

    /// Returns the largest awake blocks, and the number and bytes of all of them.
    fn largest_blocks(&self) -> (Vec<LiveBlock>, (u64, u64)) {
        let mut blocks = self.allocator.blocks();
        blocks.retain(|block| !block.asleep);
        let total_bytes = blocks.iter().map(|block| block.range.bytes as u64).sum();
        let total = (blocks.len() as u64, total_bytes);
        // Stable by address where sizes are equal.
        blocks.sort_unstable_by_key(|block| {
            (std::cmp::Reverse(block.range.bytes), block.range.start)
        });
        blocks.truncate(BLOCKS_MAX);
        (blocks.iter().map(|block| self.describe(block)).collect(), total)
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
            None => ("other", self.tag_name(TagId(block.tag)).unwrap_or_default(), scope_layer(block.scope)),
        };
        let (address, bytes) = (block.range.start as u64, block.range.bytes as u64);
        LiveBlock { address, bytes, role: role.to_owned(), tag, layer }
    }
}

/// Returns the layer of a block that was allocated in a layer's window (`Prefix::scope`).
const fn scope_layer(scope: u64) -> Option<u32> {
    if scope == 0 { None } else { Some(scope as u32) }
}
