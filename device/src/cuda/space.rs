//! The reserved address range of a GPU, with its pages and counts.

use super::context::{Context, Gpu};
use super::entries::{Handle, check};
use super::error::{Code, Unavailable};
use super::event::EventPool;
use super::physical::{Failed, Physical};
use super::pinned::PinnedPages;
use super::spans::Spans;
use super::{CudaConfig, stream};
use crate::accounts::Accounts;
use crate::page_states::{PageState, PageStates};
use crate::sync::Mutex;
use crate::{AddressRange, DeviceError, Fill, Operation};

/// Limit of the attempts to wait for zeroing.
const AWAIT_ATTEMPTS_MAX: u32 = 3;

/// The state of a device. Streams, events and staged pages keep it alive.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) range: AddressRange,
    pub(super) page_bytes: usize,
    pub(super) large_page_bytes: usize,
    pub(super) accounts: Accounts,
    pub(super) states: PageStates,
    pub(super) physical: Physical,
    pub(super) spans: Mutex<Spans>,
    pub(super) events: EventPool,
    pub(super) pinned: PinnedPages,
    /// A stream that is usually idle, for zeroing pages and reading the time.
    pub(super) idle_stream: Handle,
    pub(super) context: Context,
}

impl Space {
    pub(super) fn new(config: &CudaConfig) -> Result<Self, Unavailable> {
        const OPERATION: Operation = Operation::Reserve;
        let context = Context::retain(config.ordinal)?;
        let gpu = context.enter(OPERATION)?;
        let refused = |code| context.error(code, OPERATION, AddressRange::default());
        let granularity_bytes = gpu.granularity_bytes().map_err(refused)?;
        let page_bytes = config.page_bytes(granularity_bytes)?;
        let large_page_bytes = config.large_page_bytes(page_bytes)?;
        let capacity_bytes = match config.capacity_bytes {
            0 => gpu.total_memory_bytes().map_err(refused)?,
            bytes => bytes,
        };
        let bytes = config.reserve_bytes(page_bytes, capacity_bytes)?;
        let idle_stream = stream::create(context.entries).map_err(refused)?;
        // SAFETY: created above and unused.
        let destroy_stream = || unsafe { (context.entries.stream_destroy)(idle_stream) };
        let range = gpu.reserve(bytes, large_page_bytes).map_err(|code| {
            destroy_stream();
            context.error(code, OPERATION, AddressRange::new(0, bytes))
        })?;
        let states = PageStates::new(range, page_bytes).inspect_err(|_| {
            destroy_stream();
            let _ = gpu.unreserve(range);
        })?;
        let physical = Physical::new(&gpu, context.device, range, page_bytes, large_page_bytes);
        drop(gpu);
        Ok(Self {
            range,
            page_bytes,
            large_page_bytes,
            accounts: Accounts::new(capacity_bytes),
            states,
            physical,
            spans: Mutex::default(),
            events: EventPool::default(),
            pinned: PinnedPages::new(&context),
            idle_stream,
            context,
        })
    }

    /// `Device::map` and `Device::map_large`.
    pub(super) fn map(
        &self,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
    ) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Map;
        range.check_pages(self.range, self.page_bytes, OPERATION)?;
        let gpu = match fill {
            Fill::Any => self.context.enter_paging(OPERATION)?,
            Fill::Zero => self.context.enter(OPERATION)?,
        };
        self.states.change(range, PageState::Unmapped, PageState::Busy, OPERATION)?;
        Refused::settle(self.attach(&gpu, range, large, fill, OPERATION), |is_mapped| {
            let now = if is_mapped { PageState::Mapped } else { PageState::Unmapped };
            self.states.change(range, PageState::Busy, now, OPERATION)
        })
    }

    /// `Device::unmap`.
    pub(super) fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Unmap;
        range.check_pages(self.range, self.page_bytes, OPERATION)?;
        let gpu = self.context.enter_paging(OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Busy, OPERATION)?;
        // SAFETY: the caller of `unmap` has waited for the last use.
        let detached = unsafe { self.detach(&gpu, range, OPERATION) };
        Refused::settle(detached, |is_unmapped| {
            let now = if is_unmapped { PageState::Unmapped } else { PageState::Mapped };
            self.states.change(range, PageState::Busy, now, OPERATION)
        })
    }

    /// Maps pages with contents `fill` at an unmapped `range`, within the capacity; large ones in `large`.
    pub(super) fn attach(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
        operation: Operation,
    ) -> Result<(), Refused> {
        self.accounts.take(range.bytes, operation).map_err(Refused::clean)?;
        if let Err(failed) = self.physical.attach(gpu, range, large, self.accounts.parking_bytes())
        {
            let refused = self.give_up(range, failed, operation);
            // Handles created before the error are parked; they may exceed the limit.
            self.physical.shrink(gpu, self.accounts.parking_bytes());
            return Err(refused);
        }
        if fill == Fill::Any {
            return Ok(());
        }
        if let Err(code) = self.queue_zeroes(range) {
            let error = self.context.error(code, operation, range);
            // SAFETY: the range is in use by this call only, and nothing is queued.
            let detached = unsafe { self.detach(gpu, range, operation) };
            return Err(Refused { error, is_undone: detached.is_ok() });
        }
        if let Err(code) = self.await_zeroes() {
            // Zeroing may still be running: the pages cannot be unmapped.
            let error = self.context.error(code, operation, range);
            return Err(Refused { error, is_undone: false });
        }
        Ok(())
    }

    /// Unmaps the pages of `range` and returns their capacity.
    ///
    /// # Safety
    /// As [`Physical::detach`].
    pub(super) unsafe fn detach(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        operation: Operation,
    ) -> Result<(), Refused> {
        self.check_whole(range, operation).map_err(Refused::clean)?;
        // SAFETY: the caller's contract.
        unsafe { self.physical.detach(gpu, range) }.map_err(|Failed { code, is_undone }| {
            Refused { error: self.context.error(code, operation, range), is_undone }
        })?;
        // After the parking, so that mapped and parked bytes never exceed the capacity.
        self.accounts.give(range.bytes);
        self.physical.shrink(gpu, self.accounts.parking_bytes());
        Ok(())
    }

    /// Refuses a mapped range with a part of a large page.
    pub(super) fn check_whole(
        &self,
        range: AddressRange,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        let Some(start) = self.physical.first_split(range) else { return Ok(()) };
        let (state, needed) = ("a large page of which a part is meant", "wholly in the range");
        Err(DeviceError::WrongPages { operation, start, state, needed })
    }

    /// Returns the capacity of pages that were not mapped, unless some cannot be unmapped.
    fn give_up(&self, range: AddressRange, failed: Failed, operation: Operation) -> Refused {
        if failed.is_undone {
            self.accounts.give(range.bytes);
        }
        let info = self.accounts.info(self.physical.parked_bytes());
        let error = if failed.code == Code::OUT_OF_MEMORY {
            // Used by others: our own use is within the capacity.
            DeviceError::OutOfMemory {
                operation,
                asked_bytes: range.bytes as u64,
                mapped_bytes: info.mapped_bytes,
                capacity_bytes: info.capacity_bytes,
            }
        } else {
            self.context.error(failed.code, operation, range)
        };
        Refused { error, is_undone: failed.is_undone }
    }

    /// Queues the zeroing of unused pages.
    fn queue_zeroes(&self, range: AddressRange) -> Result<(), Code> {
        let zero = self.context.entries.set_bytes;
        // SAFETY: just mapped, and used by the caller only.
        check(unsafe { zero(range.start as u64, 0, range.bytes, self.idle_stream) })
    }

    /// Waits for the zeroing; repeats a refused wait.
    fn await_zeroes(&self) -> Result<(), Code> {
        let mut refused = Ok(());
        for _ in 0..AWAIT_ATTEMPTS_MAX {
            // SAFETY: a live stream of ours.
            refused = check(unsafe { (self.context.entries.stream_synchronize)(self.idle_stream) });
            if refused.is_ok() {
                break;
            }
        }
        refused
    }

    /// `CudaDevice::add_peer`.
    pub(super) fn add_peer(&self, peer: i32) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Map;
        let gpu = self.context.enter_paging(OPERATION)?;
        let added = match self.context.is_accessible_from(peer) {
            Ok(true) => self.physical.add_peer(&gpu, peer),
            Ok(false) => Err(Code::PEER_ACCESS_UNSUPPORTED),
            Err(code) => Err(code),
        };
        added.map_err(|code| self.context.error(code, OPERATION, self.range))
    }

    /// `Device::limit_parked`.
    pub(super) fn limit_parked(&self, total_bytes: u64) {
        self.accounts.limit_parking(total_bytes);
        if let Ok(gpu) = self.context.enter(Operation::Unmap) {
            self.physical.shrink(&gpu, self.accounts.parking_bytes());
        }
    }

    /// `Device::release_parked`.
    pub(super) fn release_parked(&self) -> u64 {
        let gpu = self.context.enter(Operation::Unmap);
        gpu.map_or(0, |gpu| self.physical.shrink(&gpu, 0))
    }
}

/// An error, and whether the state is unchanged.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) error: DeviceError,
    pub(super) is_undone: bool,
}

impl Refused {
    /// An error before any change.
    pub(super) const fn clean(error: DeviceError) -> Self {
        Self { error, is_undone: true }
    }

    /// Ends a call on busy pages or a busy span: `change` sets the state after a success (`true`), or the
    /// state before (`false`). After an error that could not be undone they stay busy: they must not be used.
    pub(super) fn settle(
        outcome: Result<(), Self>,
        change: impl FnOnce(bool) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        match outcome {
            Ok(()) => change(true),
            Err(Self { error, is_undone: true }) => change(false).and(Err(error)),
            Err(Self { error, is_undone: false }) => Err(error),
        }
    }
}

impl Drop for Space {
    /// Calls fail only if the driver is gone (`DEINITIALIZED`), and everything with it.
    fn drop(&mut self) {
        let Ok(gpu) = self.context.enter(Operation::Unmap) else { return };
        let entries = self.context.entries;
        for event in self.events.take_all() {
            // SAFETY: unused.
            unsafe { (entries.event_destroy)(event) };
        }
        // Zeroing that could not be waited for may still be running.
        let are_zeroes_over = self.await_zeroes().is_ok();
        // SAFETY: ours; queued work still runs.
        unsafe { (entries.stream_destroy)(self.idle_stream) };
        if !are_zeroes_over {
            // Unmapping pages under it would lose the context, which the process shares.
            return;
        }
        let (pages, handles) = self.physical.take_all();
        for page in pages {
            // SAFETY: the streams are gone, and addresses are valid only as long as the device.
            let _ = unsafe { gpu.unmap(page) };
        }
        for handle in handles {
            let _ = gpu.release(handle);
        }
        let _ = gpu.unreserve(self.range);
    }
}
