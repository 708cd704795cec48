//! The reserved range of one host device: its pages, its counts, its part of the guard.

use super::guard;
use super::parked::Parked;
use super::{HostConfig, system};
use crate::accounts::Accounts;
use crate::page_states::{PageState, PageStates};
use crate::{AddressRange, DeviceError, Fill, Operation};

/// What a huge page of the system is on every machine we run on; a wrong guess costs time only.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// The space and all that is known of it. Staged pages keep it alive.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) range: AddressRange,
    pub(super) page_bytes: usize,
    pub(super) accounts: Accounts,
    pub(super) states: PageStates,
    pub(super) parked: Parked,
    /// The reservation as the system knows it: `range` and what aligning it left over.
    reservation: AddressRange,
}

impl Space {
    pub(super) fn new(config: &HostConfig) -> Result<Self, DeviceError> {
        config.validate()?;
        let align = HUGE_BYTES.max(config.page_bytes);
        let bytes = config.reserve_bytes.next_multiple_of(config.page_bytes);
        let reservation = system::reserve(bytes.saturating_add(align))?;
        let range = AddressRange::new(reservation.start.next_multiple_of(align), bytes);
        let built = PageStates::new(range, config.page_bytes).and_then(|states| {
            let parked = Parked::new(range, config.page_bytes)?;
            guard::add_space(range).map(|()| (states, parked))
        });
        match built {
            Ok((states, parked)) => Ok(Self {
                range,
                page_bytes: config.page_bytes,
                accounts: Accounts::new(config.capacity_bytes),
                states,
                parked,
                reservation,
            }),
            Err(error) => {
                // SAFETY: reserved above and handed to nobody.
                unsafe { system::release(reservation) };
                Err(error)
            }
        }
    }

    /// Checks that `range` is a non-empty run of whole pages of this space (I1).
    pub(super) fn check(
        &self,
        range: AddressRange,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        if range.is_pages_of(self.range, self.page_bytes) {
            return Ok(());
        }
        Err(DeviceError::bad_range(operation, range, self.page_bytes, self.range))
    }

    /// `Device::map`. Unmapped addresses have no pages but parked ones, so opening them is enough for
    /// zeroed memory, cannot map over anything foreign, and merges with its neighbours.
    ///
    /// No huge pages here: they halve the first touch (46 ms instead of 92 per 256 MiB measured),
    /// but a block that sleeps beside one that does not would share a huge page with it, and the
    /// kernel keeps such a page whole until memory runs short. Sleeping must give memory back.
    pub(super) fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Map;
        self.check(range, OPERATION)?;
        self.states.change(range, PageState::Unmapped, PageState::Busy, OPERATION)?;
        if let Err(error) = self.accounts.take(range.bytes, OPERATION) {
            self.states.change(range, PageState::Busy, PageState::Unmapped, OPERATION)?;
            return Err(error);
        }
        // SAFETY: I1, checked above; the range is Busy and ours, and was unmapped.
        if let Err(error) = unsafe { self.parked.fill(range, fill) } {
            // It has old bytes where there should be none: Busy for good, and never handed out.
            self.give(range.bytes);
            return Err(error);
        }
        // Before fresh pages can be touched (I5).
        self.parked.shrink(self.accounts.parking_bytes());
        // SAFETY: I1, checked above.
        let opened = unsafe { system::open(range, OPERATION) };
        if opened.is_err() {
            // A refusal may have opened a part.
            // SAFETY: I1; the range is Busy and ours, nobody has bytes in it.
            unsafe { system::clear(range) };
            self.give(range.bytes);
        }
        let now = if opened.is_ok() { PageState::Mapped } else { PageState::Unmapped };
        self.states.change(range, PageState::Busy, now, OPERATION)?;
        opened
    }

    /// `Device::unmap`.
    pub(super) fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Unmap;
        self.check(range, OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Busy, OPERATION)?;
        // SAFETY: I1; the caller gives the bytes up by calling this.
        let vacated = unsafe { self.parked.vacate(range, false, OPERATION) };
        if vacated.is_ok() {
            self.give(range.bytes);
        }
        let now = if vacated.is_ok() { PageState::Unmapped } else { PageState::Mapped };
        self.states.change(range, PageState::Busy, now, OPERATION)?;
        vacated
    }

    /// Gives the room of `bytes` back whose pages may be parked now.
    pub(super) fn give(&self, bytes: usize) {
        self.accounts.give(bytes);
        self.parked.shrink(self.accounts.parking_bytes());
    }

    /// `Device::limit_parked`.
    pub(super) fn limit_parked(&self, total_bytes: u64) {
        self.accounts.limit_parking(total_bytes);
        self.parked.shrink(self.accounts.parking_bytes());
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        guard::remove_space(self.range);
        // SAFETY: the device and everything staged of it are gone; whoever still holds an
        // address of it was told that it lives as long as the device.
        unsafe { system::release(self.reservation) };
    }
}
