//! Pinned memory: mapped, placed on the GPU's node, touched by many threads, and registered.
//!
//! The driver's own call does all of that on one thread, most of it zeroing pages: 435 ms for a GiB
//! against 132 ms this way with 16 threads, as RMM measured. It is what we fall back on where
//! memory of ours is not to be registered.

use std::collections::BTreeSet;
use std::ffi::c_void;

use super::context::{Context, Gpu};
use super::error::Code;
use crate::host::system::{fresh, release};
use crate::sync::Mutex;
use crate::{AddressRange, DeviceError, Operation, numa};

/// Pinned memory comes in whole pages of the system.
pub(super) const ALIGN_BYTES: usize = 4096;
/// The most threads that touch pages at a time.
const TOUCH_THREADS_MAX: usize = 16;
/// A thread costs more than it brings below this.
const TOUCH_SHARE_BYTES_MIN: usize = 32 << 20;

/// Pinned memory of one GPU.
#[derive(Debug)]
pub(super) struct PinnedPages {
    /// The mask of the node it lies on, where that matters.
    node_mask: Option<u64>,
    /// Where what the driver itself allocated starts.
    of_driver: Mutex<BTreeSet<usize>>,
}

impl PinnedPages {
    pub(super) fn new(context: &Context) -> Self {
        let node_mask = numa::mask_of(context.host_node());
        Self { node_mask, of_driver: Mutex::default() }
    }

    /// At least `bytes`, in whole pages.
    pub(super) fn allocate(
        &self,
        context: &Context,
        bytes: usize,
    ) -> Result<AddressRange, DeviceError> {
        const OPERATION: Operation = Operation::Pin;
        let rounded = bytes.max(1).checked_next_multiple_of(ALIGN_BYTES).unwrap_or(usize::MAX);
        if let Some(range) = self.map_and_register(context, rounded)? {
            return Ok(range);
        }
        tracing::debug!(target: "device", bytes = rounded, "memory not registered; the driver allocates it");
        let gpu = context.enter(OPERATION)?;
        let refused = |code| context.error(code, OPERATION, AddressRange::new(0, rounded));
        let range = gpu.allocate_host(rounded).map_err(refused)?;
        self.of_driver.lock().insert(range.start);
        Ok(range)
    }

    /// Memory of ours, registered. `None` where the driver does not register it.
    fn map_and_register(
        &self,
        context: &Context,
        bytes: usize,
    ) -> Result<Option<AddressRange>, DeviceError> {
        let range = fresh(bytes, Operation::Pin)?;
        self.prepare(range);
        let registered = context.enter(Operation::Pin).map(|gpu| gpu.register_host(range));
        match registered {
            Ok(Ok(())) => Ok(Some(range)),
            not => {
                // SAFETY: mapped above, and known to nobody.
                unsafe { release(range) };
                match not {
                    Ok(Err(Code::OUT_OF_MEMORY)) => {
                        Err(context.error(Code::OUT_OF_MEMORY, Operation::Pin, range))
                    }
                    Ok(_) => Ok(None),
                    Err(lost) => Err(lost),
                }
            }
        }
    }

    /// Puts pages behind fresh memory, where they should be, on many threads.
    fn prepare(&self, range: AddressRange) {
        // What the kernel refuses here costs speed, or a child memory: no more.
        // SAFETY: the range is a mapping of ours that nobody uses yet; the mask outlives the call,
        // which reads `NODES_MAX` bits of it. (It takes the number of bits and one.)
        unsafe {
            let start = range.start as *mut c_void;
            // Pages that a device may write to are copied for a child at the fork, all of them; and
            // a child has no use for them.
            libc::madvise(start, range.bytes, libc::MADV_DONTFORK);
            libc::madvise(start, range.bytes, libc::MADV_HUGEPAGE);
            if let Some(mask) = self.node_mask {
                // Preferred, not bound: where the node is full, memory of another is slower, but
                // it is memory; bound, the kernel would kill the process.
                let bits = u64::from(numa::NODES_MAX) + 1;
                let policy = libc::MPOL_PREFERRED;
                libc::syscall(
                    libc::SYS_mbind,
                    start,
                    range.bytes,
                    policy,
                    &raw const mask,
                    bits,
                    0,
                );
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        touch_all(range, touch_threads(range.bytes, cores));
    }

    /// Frees what `allocate` gave.
    ///
    /// # Safety
    /// It came from there, is freed once, and nothing uses it.
    pub(super) unsafe fn free(&self, context: &Context, range: AddressRange) {
        let Ok(gpu) = context.enter(Operation::Pin) else { return };
        let is_drivers = self.of_driver.lock().remove(&range.start);
        if is_drivers {
            // Fails only where the driver is gone, and the memory with it.
            // SAFETY: the caller's.
            let _ = unsafe { gpu.free_host(range.start) };
        } else if unregister(&gpu, range).is_ok() {
            // SAFETY: the caller's; the GPU knows it no more. (Where it still does, the pages stay.)
            unsafe { release(range) };
        }
    }
}

fn unregister(gpu: &Gpu<'_>, range: AddressRange) -> Result<(), Code> {
    // SAFETY: `free`'s caller's: nothing uses it.
    unsafe { gpu.unregister_host(range.start) }
}

/// How many of so many cores touch so much, the caller's included.
fn touch_threads(bytes: usize, cores: usize) -> usize {
    // A trainer's own threads go on meanwhile.
    (bytes / TOUCH_SHARE_BYTES_MIN).clamp(1, TOUCH_THREADS_MAX.min(cores.div_ceil(2)))
}

fn touch_all(range: AddressRange, threads: usize) {
    let share_bytes = range.bytes.div_ceil(threads).next_multiple_of(ALIGN_BYTES);
    std::thread::scope(|scope| {
        let mut rest = range;
        while rest.bytes > share_bytes {
            let (share, after) = rest.split_at(share_bytes);
            rest = after;
            let builder = std::thread::Builder::new().name("dormouse-touch".to_owned());
            if builder.spawn_scoped(scope, move || touch(share)).is_err() {
                touch(share);
            }
        }
        touch(rest);
    });
}

/// Has the kernel put a page behind each address, zeroed.
fn touch(range: AddressRange) {
    for address in (range.start..range.end()).step_by(ALIGN_BYTES) {
        // SAFETY: fresh memory of ours, writable, that no other thread touches.
        unsafe { (address as *mut u8).write_volatile(0) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn threads_are_few_and_worth_it() {
        for (bytes, cores, threads) in
            [(1, 64, 1), (96 << 20, 64, 3), (8 << 30, 64, 16), (8 << 30, 6, 3), (8 << 30, 1, 1)]
        {
            assert_eq!(touch_threads(bytes, cores), threads, "{bytes} bytes, {cores} cores");
        }
    }

    #[test]
    fn every_page_is_touched_by_however_many() {
        for (pages, threads) in [(1, 1), (1, 4), (7, 3), (64, 16), (65, 16)] {
            let range = fresh(pages * ALIGN_BYTES, Operation::Pin).unwrap();
            touch_all(range, threads);
            let mut there = vec![0_u8; pages];
            // SAFETY: it writes one byte for each page of the range.
            let status = unsafe {
                libc::mincore(range.start as *mut c_void, range.bytes, there.as_mut_ptr())
            };
            assert_eq!(status, 0);
            assert!(there.iter().all(|page| page & 1 != 0), "{pages} pages, {threads} threads");
            // SAFETY: mapped above, and used no more.
            unsafe { release(range) };
        }
    }
}
