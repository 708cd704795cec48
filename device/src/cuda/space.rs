//! The reserved range of one GPU: its pages and its counts.

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

/// How often a wait for zeroes is tried.
const AWAIT_ATTEMPTS_MAX: u32 = 3;

/// The space and all that is known of it. Streams, events and staged pages keep it alive.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) range: AddressRange,
    pub(super) page_bytes: usize,
    pub(super) accounts: Accounts,
    pub(super) states: PageStates,
    pub(super) physical: Physical,
    pub(super) spans: Mutex<Spans>,
    pub(super) events: EventPool,
    pub(super) pinned: PinnedPages,
    /// Where nothing is ever left to be done: pages are zeroed there, and what time it is.
    pub(super) idle_stream: Handle,
    pub(super) context: Context,
}

impl Space {
    pub(super) fn new(config: &CudaConfig) -> Result<Self, Unavailable> {
        const OPERATION: Operation = Operation::Reserve;
        let context = Context::retain(config.ordinal, &config.peers)?;
        let gpu = context.enter(OPERATION)?;
        let refused = |code| context.error(code, OPERATION, AddressRange::default());
        let granularity_bytes = gpu.granularity_bytes().map_err(refused)?;
        let page_bytes = config.page_bytes(granularity_bytes)?;
        let capacity_bytes = match config.capacity_bytes {
            0 => gpu.total_memory_bytes().map_err(refused)?,
            bytes => bytes,
        };
        let bytes = config.reserve_bytes(page_bytes, capacity_bytes)?;
        let idle_stream = stream::create(&context).map_err(refused)?;
        let range = gpu.reserve(bytes, page_bytes).map_err(|code| {
            // SAFETY: created above and used for nothing.
            unsafe { (context.entries.stream_destroy)(idle_stream) };
            context.error(code, OPERATION, AddressRange::new(0, bytes))
        })?;
        let states = PageStates::new(range, page_bytes).inspect_err(|_| {
            // SAFETY: created above and used for nothing.
            unsafe { (context.entries.stream_destroy)(idle_stream) };
            let _ = gpu.unreserve(range);
        })?;
        let physical = Physical::new(&gpu, range, page_bytes);
        drop(gpu);
        Ok(Self {
            range,
            page_bytes,
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

    /// `Device::map`.
    pub(super) fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Map;
        self.check(range, OPERATION)?;
        let gpu = match fill {
            Fill::Any => self.context.enter_paging(OPERATION)?,
            Fill::Zero => self.context.enter(OPERATION)?,
        };
        self.states.change(range, PageState::Unmapped, PageState::Busy, OPERATION)?;
        let attached = self.attach(&gpu, range, fill, OPERATION);
        self.settle_pages(range, attached, PageState::Mapped, PageState::Unmapped, OPERATION)
    }

    /// `Device::unmap`.
    pub(super) fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Unmap;
        self.check(range, OPERATION)?;
        let gpu = self.context.enter_paging(OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Busy, OPERATION)?;
        // SAFETY: whoever unmaps has waited for the last use.
        let detached = unsafe { self.detach(&gpu, range, OPERATION) };
        self.settle_pages(range, detached, PageState::Unmapped, PageState::Mapped, OPERATION)
    }

    /// Says what busy pages are now: `after`, or as they were `before`. Where a refusal cannot be
    /// undone they stay busy, for nobody may use them.
    fn settle_pages(
        &self,
        range: AddressRange,
        outcome: Result<(), Refused>,
        after: PageState,
        before: PageState,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        let (now, result) = match outcome {
            Ok(()) => (Some(after), Ok(())),
            Err(refused) => (refused.is_undone.then_some(before), Err(refused.error)),
        };
        if let Some(now) = now {
            self.states.change(range, PageState::Busy, now, operation)?;
        }
        result
    }

    /// Room and pages for an empty `range` of the caller's, that hold `fill`.
    pub(super) fn attach(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        fill: Fill,
        operation: Operation,
    ) -> Result<(), Refused> {
        self.accounts.take(range.bytes, operation).map_err(Refused::clean)?;
        if let Err(failed) = self.physical.attach(gpu, range, self.accounts.parking_bytes()) {
            let refused = self.give_up(range, failed, operation);
            // What came before the refusal is parked; others may be short of it.
            self.physical.shrink(gpu, self.accounts.parking_bytes());
            return Err(refused);
        }
        if fill == Fill::Any {
            return Ok(());
        }
        if let Err(code) = self.queue_zeroes(range) {
            let error = self.context.error(code, operation, range);
            // SAFETY: nobody but us knows the range, and nothing is queued there.
            let detached = unsafe { self.detach(gpu, range, operation) };
            return Err(Refused { error, is_undone: detached.is_ok() });
        }
        if let Err(code) = self.await_zeroes() {
            // They may still be on their way: the pages can not be taken from under them.
            let error = self.context.error(code, operation, range);
            return Err(Refused { error, is_undone: false });
        }
        Ok(())
    }

    /// Takes the pages of `range` away and their room.
    ///
    /// # Safety
    /// As [`Physical::detach`].
    pub(super) unsafe fn detach(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        operation: Operation,
    ) -> Result<(), Refused> {
        // SAFETY: the caller's.
        match unsafe { self.physical.detach(gpu, range) } {
            Ok(()) => {
                // Parked before their room is anybody's, so that the two never pass the capacity.
                self.accounts.give(range.bytes);
                self.physical.shrink(gpu, self.accounts.parking_bytes());
                Ok(())
            }
            Err(failed) => {
                let error = self.context.error(failed.code, operation, range);
                Err(Refused { error, is_undone: failed.is_undone })
            }
        }
    }

    /// The room of pages that did not come; kept where they came and cannot go.
    fn give_up(&self, range: AddressRange, failed: Failed, operation: Operation) -> Refused {
        if failed.is_undone {
            self.accounts.give(range.bytes);
        }
        let info = self.accounts.info(self.physical.parked_bytes());
        let error = if failed.code == Code::OUT_OF_MEMORY {
            // Somebody else has it: ours is within the capacity.
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

    /// Starts zeroing pages that nobody uses yet.
    fn queue_zeroes(&self, range: AddressRange) -> Result<(), Code> {
        // SAFETY: attached just now, and the caller's alone.
        check(unsafe {
            let zero = self.context.entries.set_bytes;
            zero(range.start as u64, 0, range.bytes, self.idle_stream)
        })
    }

    /// Waits for it, again where the driver refuses.
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

    /// `Device::limit_parked`, and what a change of it asks for.
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

/// Why something was refused, and whether all is as before.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) error: DeviceError,
    pub(super) is_undone: bool,
}

impl Refused {
    /// Nothing had been done yet.
    pub(super) const fn clean(error: DeviceError) -> Self {
        Self { error, is_undone: true }
    }
}

impl Drop for Space {
    /// Nothing here fails but where the driver is gone already (`DEINITIALIZED`), and everything
    /// with it.
    fn drop(&mut self) {
        let Ok(gpu) = self.context.enter(Operation::Unmap) else { return };
        let entries = self.context.entries;
        for event in self.events.take_all() {
            // SAFETY: in nobody's hands any more.
            unsafe { (entries.event_destroy)(event) };
        }
        // Zeroes whose end nobody could wait for may still be on their way.
        let are_zeroes_over = self.await_zeroes().is_ok();
        // SAFETY: ours; what is queued there runs all the same.
        unsafe { (entries.stream_destroy)(self.idle_stream) };
        if !are_zeroes_over {
            // To unmap pages under them would cost the context, which is not ours alone.
            return;
        }
        let (pages, handles) = self.physical.take_all();
        for page in pages {
            // SAFETY: streams are gone; whoever still uses an address of the device was told
            // that it lives as long as the device.
            let _ = unsafe { gpu.unmap(page) };
        }
        for handle in handles {
            let _ = gpu.release(handle);
        }
        let _ = gpu.unreserve(self.range);
    }
}
