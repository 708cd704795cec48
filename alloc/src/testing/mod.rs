//! Checks of an allocator, and queries of its structure, for tests.

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::state::ReleaseSubject;
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
        Self::check_pending(&locked)
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
