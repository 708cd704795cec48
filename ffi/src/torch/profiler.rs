//! Reports to PyTorch's profiler (`profile_memory=True`), as PyTorch's own allocator makes them.
//!
//! PyTorch decides by thread whether it records a report. Requests load whether a profiler runs
//! together with what they load anyhow ([`request_flags`]); only then is anything here called.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use dormouse_alloc::Stats;

use super::library::Library;
use super::request_flags;
use crate::heap::Heap;
use crate::stderr::guarded;

/// `c10::Device`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TorchDevice {
    kind: i8,
    index: i8,
}

/// `c10::DeviceType::CUDA`.
const CUDA: i8 = 1;

/// Address, change in bytes, allocated bytes, reserved bytes, device.
type ReportUsage = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, TorchDevice);
/// Requested bytes, allocated bytes, reserved bytes, device.
type ReportOutOfMemory = unsafe extern "C-unwind" fn(i64, usize, usize, TorchDevice);

/// `scripts/check-torch-exports` looks for both in each version's wheel.
const REPORT_USAGE: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
const REPORT_OUT_OF_MEMORY: &CStr = c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE";

/// The functions of the loaded PyTorch; set before [`request_flags::Needs::profile`] can be true.
static REPORTS: OnceLock<Reports> = OnceLock::new();

struct Reports {
    usage: ReportUsage,
    out_of_memory: ReportOutOfMemory,
}

impl Reports {
    /// `None` if PyTorch is not loaded, or does not export them.
    fn of_loaded_torch() -> Option<Self> {
        let torch = Library::loaded(c"libc10.so")?;
        // SAFETY: the mangled names of functions with these parameters; a `c10::Device` of two bytes is
        // passed by value.
        unsafe {
            Some(Self {
                usage: torch.function(REPORT_USAGE)?,
                out_of_memory: torch.function(REPORT_OUT_OF_MEMORY)?,
            })
        }
    }
}

/// `dormouse_torch_set_profiled`. Returns whether the loaded PyTorch has the functions.
pub(crate) fn set_profiled(is_profiled: bool) -> bool {
    if REPORTS.get().is_none()
        && let Some(reports) = Reports::of_loaded_torch()
    {
        // Another thread may have set the same.
        let _ = REPORTS.set(reports);
    }
    let is_available = REPORTS.get().is_some();
    request_flags::set_profiled(is_profiled && is_available);
    is_available
}

/// Returns the bytes of the block at `pointer`, 0 if there is none.
pub(super) fn bytes_of(pointer: *mut c_void) -> i64 {
    let mut bytes = 0;
    guarded("profiler", || {
        let block = Heap::gpu_around(pointer.addr())
            .and_then(|heap| heap.allocator().lookup(pointer.addr()));
        bytes = block.map_or(0, |block| block.range.bytes);
        Ok(())
    });
    bytes.try_into().unwrap_or(i64::MAX)
}

/// Reports a block that was allocated (`bytes` > 0) or freed (< 0).
///
/// # Safety
/// The caller, a C function, can be unwound by a C++ exception.
pub(super) unsafe fn report_usage(pointer: *mut c_void, bytes: i64, device: i32) {
    let (Some(reports), true) = (REPORTS.get(), bytes != 0) else { return };
    if let Some((allocated, reserved, device)) = figures(device) {
        // SAFETY: the function's type, and the caller's contract. No lock is held.
        unsafe { (reports.usage)(pointer, bytes, allocated, reserved, device) };
    }
}

/// Reports a request that failed for want of memory.
///
/// # Safety
/// As [`report_usage`].
pub(super) unsafe fn report_out_of_memory(bytes: isize, device: i32) {
    let Some(reports) = REPORTS.get() else { return };
    if let Some((allocated, reserved, device)) = figures(device) {
        // SAFETY: as in `report_usage`.
        unsafe { (reports.out_of_memory)(bytes as i64, allocated, reserved, device) };
    }
}

/// Returns the allocated and the reserved bytes of GPU `device`, and its name in PyTorch.
fn figures(device: i32) -> Option<(usize, usize, TorchDevice)> {
    let index = device.try_into().ok()?;
    let mut stats = None;
    guarded("profiler", || {
        stats = Some(Heap::existing_gpu(device)?.allocator().stats());
        Ok(())
    });
    let Stats { allocated_bytes, mapped_bytes, .. } = stats?;
    let whole = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let device = TorchDevice { kind: CUDA, index };
    Some((whole(allocated_bytes.current), whole(mapped_bytes.current), device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_torch_has_no_profiler() {
        assert!(!set_profiled(true));
        assert!(!request_flags::Needs::of(0).profile());
    }
}
