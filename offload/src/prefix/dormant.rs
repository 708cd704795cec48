//! The decision which blocks may sleep. A wrong answer corrupts memory.
//!
//! A block is dormant only if its storage was allocated in this layer's window on the marking thread (its
//! scope says so) *and* the trainer found it saved in the prefix graph (it is named here) *and* no other
//! region has claimed it. Every other block stays awake.

use dormouse_device::Device;

use super::Prefix;
use crate::engine::{Adopted, REGION_BLOCKS_MAX};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, label};
use crate::places::Phase;

/// The reason a named address stays awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedReason {
    /// Not memory of this allocator.
    #[error("not in a live block of this allocator")]
    NotOurs,
    /// Allocated outside this layer's window.
    #[error("not allocated inside this layer")]
    OtherScope,
    /// The block holds a boundary tensor.
    #[error("the block holds a boundary tensor")]
    Boundary,
    /// The block belongs to another region.
    #[error("the block belongs to another region")]
    Claimed,
    /// The block is too small to be worth a copy.
    #[error("the block is below the size floor")]
    Small,
    /// The region limit is reached.
    #[error("region limit reached")]
    TooMany,
}

/// One refused address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The address given.
    pub address: usize,
    /// Why.
    pub reason: RefusedReason,
}

/// The result of naming addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named {
    /// Blocks that will sleep with the layer.
    pub accepted: u32,
    /// Bytes of those blocks.
    pub accepted_bytes: u64,
    /// Addresses that stay awake. An address in a block accepted earlier is counted in neither list.
    pub refused: Vec<Refused>,
}

/// A block that may sleep.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// The address given.
    address: usize,
    start: usize,
    requested_bytes: u64,
}

impl<D: Device> Prefix<D> {
    /// Names storages that the prefix graph saved in `layer`, each by any address in its block. An address may
    /// occur twice. Only in phase A.
    ///
    /// # Errors
    /// `Argument` for the layer; `Order` outside phase A.
    pub fn dormant(&mut self, layer: u32, addresses: &[usize]) -> Result<Named, OffloadError> {
        self.order.check_layer(layer)?;
        if self.order.phase() != Some(Phase::A) {
            let seen = format!("phase {:?}", self.order.phase());
            let expected = "phase A".to_owned();
            return Err(OffloadError::Order { what: "naming dormant memory", seen, expected });
        }
        let mut named = Named::default();
        let (mut regions, mut small) = (Vec::new(), Vec::<Candidate>::new());
        let coalesced_bytes_max = self.engine.coalesced_bytes_max();
        for &address in addresses {
            match self.consider(layer, address) {
                Ok(None) => {}
                Ok(Some(it)) if small.iter().any(|known| known.start == it.start) => {}
                Ok(Some(it)) if it.requested_bytes < coalesced_bytes_max => small.push(it),
                Ok(Some(it)) => regions.extend(self.adopt(layer, &[it], &mut named)),
                Err(reason) => named.refused.push(Refused { address, reason }),
            }
        }
        for together in small.chunks(REGION_BLOCKS_MAX) {
            regions.extend(self.adopt(layer, together, &mut named));
        }
        if let Some(found) = self.layers.get_mut(layer as usize) {
            found.regions.extend(regions);
            found.is_settled = false;
            found.report.dormant_bytes += named.accepted_bytes;
            self.held_bytes += named.accepted_bytes;
        }
        Ok(named)
    }

    /// Returns the block around `address` if it may sleep with the layer; `None` if it is dormant in this
    /// layer already.
    fn consider(&self, layer: u32, address: usize) -> Result<Option<Candidate>, RefusedReason> {
        let allocator = self.engine.allocator();
        let block = allocator.lookup(address).ok_or(RefusedReason::NotOurs)?;
        let owner = block.claimed.and_then(RegionId::from_key);
        if block.claimed.is_some() {
            let info = owner.and_then(|id| self.engine.region_info(id).ok());
            return match info {
                // Named before, by the layer that allocated it. No other layer may name it.
                Some(i) if i.role == Role::Dormant && block.scope == self.scope_of(layer) => {
                    Ok(None)
                }
                Some(i) if matches!(i.role, Role::Boundary | Role::BoundaryGrad) => {
                    Err(RefusedReason::Boundary)
                }
                _ => Err(RefusedReason::Claimed),
            };
        }
        if block.scope != self.scope_of(layer) {
            return Err(RefusedReason::OtherScope);
        }
        let bytes = block.pages.bytes as u64;
        if bytes < self.engine.config().size_floor_bytes {
            return Err(RefusedReason::Small);
        }
        let (start, requested_bytes) = (block.range.start, block.requested_bytes as u64);
        Ok(Some(Candidate { address, start, requested_bytes }))
    }

    /// Makes these blocks one region.
    fn adopt(&self, layer: u32, these: &[Candidate], named: &mut Named) -> Option<RegionId> {
        let starts: Vec<usize> = these.iter().map(|it| it.start).collect();
        let label = label(&self.label, Some(layer));
        let owner = Some(std::sync::Arc::clone(&self.account));
        let adopted = self.engine.adopt_together(&starts, Role::Dormant, label, owner);
        let Adopted { id, refused } = adopted.unwrap_or_else(|e| {
            // One error for all of them.
            let refused = starts.iter().map(|&start| (start, e.clone())).collect();
            Adopted { id: None, refused }
        });
        named.refused.extend(refused.iter().map(|(address, error)| {
            let reason = match error {
                OffloadError::TooMany { .. } => RefusedReason::TooMany,
                OffloadError::Claimed { .. } => RefusedReason::Claimed,
                OffloadError::NoWholePage { .. } => RefusedReason::Small,
                // Freed between the lookup and the claim.
                _ => RefusedReason::NotOurs,
            };
            let given = these.iter().find(|it| it.start == *address);
            Refused { address: given.map_or(*address, |it| it.address), reason }
        }));
        // Stale if all of it was freed meanwhile.
        let bytes = id.and_then(|id| self.engine.region_info(id).ok()).map_or(0, |it| it.bytes);
        named.accepted_bytes += bytes;
        if id.is_some() {
            named.accepted += (starts.len() - refused.len()) as u32;
        }
        id
    }
}
