//! The reserved address range of a host device, with its pages and counts.

use super::end::End;
use super::guard;
use super::parked::Parked;
use super::{HostConfig, system};
use crate::accounts::Accounts;
use crate::page_states::{PageState, PageStates};
use crate::{AddressRange, DeviceError, Fill, Operation};

/// Size of a huge page; a wrong value costs only time.
const HUGE_BYTES: usize = 2 << 20;

/// The state of a device. Staged pages keep it alive.
///
/// One page more than its range is reserved: moves of parked pages need a mapped page after theirs.
#[derive(Debug)]
pub(super) struct Space {
    start: usize,
    end: End,
    pub(super) page_bytes: usize,
    pub(super) accounts: Accounts,
    pub(super) states: PageStates,
    pub(super) parked: Parked,
}

impl Space {
    pub(super) fn new(config: &HostConfig) -> Result<Self, DeviceError> {
        config.validate()?;
        let align = HUGE_BYTES.max(config.page_bytes);
        let bytes = config.reserve_bytes.next_multiple_of(config.page_bytes);
        let reservation = system::reserve(bytes.saturating_add(align))?;
        let range = AddressRange::new(reservation.start.next_multiple_of(align), bytes);
        let (before, rest) = reservation.split_at(range.start - reservation.start);
        let (reserved, after) = rest.split_at(bytes + system::os_page_bytes());
        // SAFETY: reserved above and unused.
        unsafe {
            system::release(before);
            system::release(after);
        }
        let built = PageStates::new(range, config.page_bytes).and_then(|states| {
            let parked = Parked::new(range, config.page_bytes)?;
            guard::add_space(range).map(|()| (states, parked))
        });
        match built {
            Ok((states, parked)) => Ok(Self {
                start: range.start,
                end: End::new(range.end()),
                page_bytes: config.page_bytes,
                accounts: Accounts::new(config.capacity_bytes),
                states,
                parked,
            }),
            Err(error) => {
                // SAFETY: reserved above and unused.
                unsafe { system::release(reserved) };
                Err(error)
            }
        }
    }

    pub(super) fn range(&self) -> AddressRange {
        AddressRange::new(self.start, self.end.get() - self.start)
    }

    /// `HostDevice::shrink`.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn shrink(&self, end: usize) {
        let (_, tail) = self.range().split_at(end.saturating_sub(self.start));
        if tail.bytes > 0 {
            // A parked piece would be moved from there later.
            self.parked.give_up_in(tail);
            // SAFETY: the caller's contract.
            unsafe { self.release_from(tail.start) };
        }
    }

    /// `HostDevice::shrink_in_child`.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn release_from(&self, end: usize) {
        guard::shrink_space(self.start, end);
        let left = self.end.lower(end.max(self.start));
        let after = AddressRange::new(left.start + system::os_page_bytes(), left.bytes);
        // SAFETY: the caller's contract. The page after the range moves down with its end; what left is ours alone
        // to release (`End::lower`), after every bound has fallen.
        unsafe { system::release(after) };
    }

    /// `Device::map`. Unmapped addresses have no pages except parked ones, so granting access is enough for
    /// zeroed memory, cannot map over foreign memory, and merges with its neighbours.
    ///
    /// No huge pages: they halve the time of the first touch (46 ms instead of 92 per 256 MiB), but a block
    /// that sleeps could share one with a block that does not, and the kernel keeps such a page whole
    /// until memory runs short.
    pub(super) fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Map;
        range.check_pages(self.range(), self.page_bytes, OPERATION)?;
        self.states.change(range, PageState::Unmapped, PageState::Busy, OPERATION)?;
        if let Err(error) = self.accounts.take(range.bytes, OPERATION) {
            self.states.change(range, PageState::Busy, PageState::Unmapped, OPERATION)?;
            return Err(error);
        }
        // SAFETY: I1, checked above; the range is Busy, and was unmapped.
        if let Err(error) = unsafe { self.parked.fill(range, fill) } {
            self.give(range.bytes);
            self.states.change(range, PageState::Busy, PageState::Unmapped, OPERATION)?;
            return Err(error);
        }
        // Before fresh pages can be touched (I5).
        self.parked.shrink(self.accounts.parking_bytes());
        // SAFETY: I1, checked above.
        let opened = unsafe { system::open(range, OPERATION) };
        if opened.is_err() {
            // A part may be accessible.
            // SAFETY: I1; the range is Busy and contains no data in use.
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
        range.check_pages(self.range(), self.page_bytes, OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Busy, OPERATION)?;
        // SAFETY: I1; the caller no longer needs the contents.
        let vacated = unsafe { self.parked.vacate(range, false, OPERATION) };
        if vacated.is_ok() {
            self.give(range.bytes);
        }
        let now = if vacated.is_ok() { PageState::Unmapped } else { PageState::Mapped };
        self.states.change(range, PageState::Busy, now, OPERATION)?;
        vacated
    }

    /// Returns the capacity of `bytes`, whose pages may be parked.
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
        let range = self.range();
        guard::remove_space(range);
        let reserved = AddressRange::new(range.start, range.bytes + system::os_page_bytes());
        // SAFETY: the device and its staged pages are gone, and addresses are valid only as long.
        unsafe { system::release(reserved) };
    }
}
