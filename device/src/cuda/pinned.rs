//! Pinned memory: mapped, placed on the GPU's NUMA node, touched by several threads, and registered.
//!
//! The driver's allocation does this on one thread, most of it zeroing pages: 435 ms for a GiB, against
//! 132 ms with 16 threads (measured by RMM). It is the fallback if registration is refused.

use std::collections::BTreeSet;
use std::ffi::c_void;

use super::context::Context;
use super::error::Code;
use crate::host::system::{fresh, release};
use crate::sync::Mutex;
use crate::{AddressRange, DeviceError, Operation, numa, with_signals_blocked};

/// Unit of pinned memory: a page of the system.
const ALIGN_BYTES: usize = 4096;
/// Limit of the threads that touch pages.
const TOUCH_THREADS_MAX: usize = 16;
/// Least bytes for which a thread pays off.
const TOUCH_SHARE_BYTES_MIN: usize = 32 << 20;

/// Pinned memory of a GPU.
#[derive(Debug)]
pub(super) struct PinnedPages {
    /// Mask of its NUMA node, if the machine has several.
    node_mask: Option<u64>,
    /// Start addresses of the driver's own allocations.
    of_driver: Mutex<BTreeSet<usize>>,
}

impl PinnedPages {
    pub(super) fn new(context: &Context) -> Self {
        let node_mask = numa::mask_of(context.host_node());
        Self { node_mask, of_driver: Mutex::default() }
    }

    /// Allocates at least `bytes`, in whole pages.
    pub(super) fn allocate(
        &self,
        context: &Context,
        bytes: usize,
    ) -> Result<AddressRange, DeviceError> {
        let rounded = bytes.max(1).checked_next_multiple_of(ALIGN_BYTES).unwrap_or(usize::MAX);
        if let Some(range) = self.map_and_register(context, rounded)? {
            return Ok(range);
        }
        tracing::debug!(target: "device", bytes = rounded, "memory not registered; the driver allocates it");
        let gpu = context.enter(Operation::Pin)?;
        let refused = |code| context.error(code, Operation::Pin, AddressRange::new(0, rounded));
        let range = gpu.allocate_host(rounded).map_err(refused)?;
        self.of_driver.lock().insert(range.start);
        Ok(range)
    }

    /// Maps and registers memory. `None` if the driver refuses to register it.
    fn map_and_register(
        &self,
        context: &Context,
        bytes: usize,
    ) -> Result<Option<AddressRange>, DeviceError> {
        let range = fresh(bytes, Operation::Pin)?;
        self.prepare(range);
        let registered = context.enter(Operation::Pin).map(|gpu| gpu.register_host(range));
        if registered == Ok(Ok(())) {
            return Ok(Some(range));
        }
        // SAFETY: mapped above, and unused.
        unsafe { release(range) };
        match registered? {
            Err(code @ Code::OUT_OF_MEMORY) => Err(context.error(code, Operation::Pin, range)),
            _ => Ok(None),
        }
    }

    /// Faults in the pages of fresh memory on its node, with several threads.
    fn prepare(&self, range: AddressRange) {
        let (start, bytes) = (range.start as *mut c_void, range.bytes);
        // A refusal here costs only speed, or memory of a child.
        // SAFETY: the range is an unused mapping of ours; the mask outlives the call, which reads
        // `NODES_MAX` bits of it. (It takes the number of bits plus one.)
        unsafe {
            // The kernel would copy all pages that a device may write to at each fork.
            libc::madvise(start, bytes, libc::MADV_DONTFORK);
            libc::madvise(start, bytes, libc::MADV_HUGEPAGE);
            if let Some(mask) = self.node_mask {
                // Preferred, not bound: with a bound policy the kernel kills the process if the node
                // is full.
                let (policy, bits) = (libc::MPOL_PREFERRED, u64::from(numa::NODES_MAX) + 1);
                libc::syscall(libc::SYS_mbind, start, bytes, policy, &raw const mask, bits, 0);
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        touch_all(range, touch_threads(range.bytes, cores));
    }

    /// Frees memory of `allocate`.
    ///
    /// # Safety
    /// It is from `allocate`, is freed once, and nothing uses it.
    pub(super) unsafe fn free(&self, context: &Context, range: AddressRange) {
        let Ok(gpu) = context.enter(Operation::Pin) else { return };
        let is_drivers = self.of_driver.lock().remove(&range.start);
        if is_drivers {
            // It fails only if the driver is gone, and the memory with it.
            // SAFETY: the caller's contract.
            let _ = unsafe { gpu.free_host(range.start) };
            return;
        }
        // SAFETY: the caller's contract.
        let unregistered = unsafe { gpu.unregister_host(range.start) };
        if unregistered.is_ok() {
            // SAFETY: the caller's contract; the GPU no longer has it. (Otherwise the pages stay.)
            unsafe { release(range) };
        }
    }
}

/// Returns the number of threads that touch `bytes`, the caller included.
fn touch_threads(bytes: usize, cores: usize) -> usize {
    // Half of the cores are left to the trainer's threads.
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
            let spawned =
                with_signals_blocked(|| builder.spawn_scoped(scope, move || touch(share)));
            if spawned.is_err() {
                touch(share);
            }
        }
        touch(rest);
    });
}

/// Faults in each page.
fn touch(range: AddressRange) {
    for address in (range.start..range.end()).step_by(ALIGN_BYTES) {
        // SAFETY: fresh writable memory of ours that no other thread uses.
        unsafe { (address as *mut u8).write_volatile(0) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn touch_threads_are_limited_by_bytes_and_cores() {
        for (bytes, cores, threads) in
            [(1, 64, 1), (96 << 20, 64, 3), (8 << 30, 64, 16), (8 << 30, 6, 3), (8 << 30, 1, 1)]
        {
            assert_eq!(touch_threads(bytes, cores), threads, "{bytes} bytes, {cores} cores");
        }
    }

    #[test]
    fn all_pages_are_touched_with_any_number_of_threads() {
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
