//! Checks of an allocator, and queries of its structure, for tests.

mod replay;

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::history::{MappedRange, RangeUse};
use crate::state::ReleaseSubject;
use crate::stats::{PoolStats, Stats};
use crate::types::Request;
use dormouse_device::{AddressRange, Device};

impl<D: Device> Allocator<D> {
    /// Returns the address range and pool number of all segments, in no particular order.
    #[must_use]
    pub fn segments(&self) -> Vec<(AddressRange, u32)> {
        self.state.lock().state.segments()
    }

    /// Returns the numbers of the existing pools that are searched before `request` is refused.
    ///
    /// # Errors
    /// `BadRequest`.
    pub fn pools(&self, request: &Request) -> Result<Vec<u32>, AllocError> {
        let need = self.need(request)?;
        Ok(self.state.lock().state.pools_of_last_resort(request, need.fit))
    }

    /// Checks the invariants and every statistic. Slow. With a thread cache no other thread may allocate or
    /// free during the call.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn check(&self) -> Result<(), String> {
        let mut locked = self.state.lock();
        locked.state.settle_thread_cache();
        locked.state.check()?;
        Self::check_reading(&locked)?;
        Self::check_kinds(&mut locked)?;
        Self::check_pending(&locked)
    }

    /// Checks that a reading has all mapped bytes but staged ones, and that its events can be undone.
    fn check_reading(locked: &Locked<D>) -> Result<(), String> {
        let reading = locked.state.unrecorded_reading(true);
        let found: u64 = reading.ranges.iter().map(|it| it.range.bytes as u64).sum();
        let Stats { mapped_bytes, staged_bytes, .. } = locked.state.stats;
        if found != mapped_bytes.current - staged_bytes.current {
            return Err(format!("{found} bytes in ranges, {mapped_bytes:?}, {staged_bytes:?}"));
        }
        replay::check_reading(&reading)
    }

    /// Checks that the statistics of small and of large blocks are those of a reading, and their parts of the whole.
    fn check_kinds(locked: &mut Locked<D>) -> Result<(), String> {
        let ranges = locked.state.unrecorded_reading(false).ranges;
        let blocks = locked.state.live_by_kind();
        let (stats, [small, large]) = locked.state.stats_by_kind();
        let staged = [0, stats.staged_bytes.current];
        for (at, kind) in [&small, &large].into_iter().enumerate() {
            let of_kind = |it: &&MappedRange| it.is_small == (at == 0);
            let sum = |uses: &[RangeUse]| -> u64 {
                let used = ranges.iter().filter(of_kind).filter(|it| uses.contains(&it.usage));
                used.map(|it| it.range.bytes as u64).sum()
            };
            let active = sum(&[RangeUse::Allocated, RangeUse::PendingFree]);
            let allocated = sum(&[RangeUse::Allocated]);
            let mapped = active + sum(&[RangeUse::Free]) + staged[at];
            let found = (allocated, active, mapped, blocks[at]);
            let PoolStats { allocated_bytes, active_bytes, mapped_bytes, .. } = *kind;
            let blocks = (kind.allocations, kind.requested_bytes);
            let told = (allocated_bytes, active_bytes, mapped_bytes, blocks);
            if told != found {
                return Err(format!("kind {at}: {told:?} told, {found:?} found"));
            }
        }
        for (name, all, parts) in [
            ("split", stats.inactive_split_bytes, [small, large].map(|it| it.inactive_split_bytes)),
            ("pending", stats.pending_blocks, [small, large].map(|it| it.pending_blocks)),
            ("segments", stats.segments, [small, large].map(|it| it.segments)),
        ] {
            if parts.iter().sum::<u64>() != all.current {
                return Err(format!("{name}: {parts:?} of {all:?}"));
            }
        }
        Ok(())
    }

    /// Checks that pending releases are listed once. (They are not listed during their queries.)
    fn check_pending(locked: &Locked<D>) -> Result<(), String> {
        let pending = &locked.pending;
        let mut listed: Vec<_> = pending.iter().map(|it| it.release.subject).collect();
        listed.sort_unstable();
        listed.dedup();
        let mut blocks = 0;
        let are_pending = listed.iter().all(|subject| match *subject {
            ReleaseSubject::Block(index) => {
                blocks += 1;
                locked.state.is_pending(index)
            }
            // It may be gone, if its last blocks left it without pages.
            ReleaseSubject::Arena(arena) => !locked.state.is_open(arena),
        });
        let count = locked.state.stats.pending_blocks.current;
        if !are_pending || listed.len() != pending.len() || blocks > count {
            return Err(format!("{count} blocks are pending, listed: {listed:?}"));
        }
        Ok(())
    }
}
