//! What PyTorch's users have called when device memory runs out (`torch._C._cuda_attach_out_of_memory_observer`).

use std::ffi::c_int;

use dormouse_alloc::Stats;
use dormouse_device::sync::Mutex;

use crate::heap::Heap;
use crate::stderr::guarded;

/// Device, requested bytes, limit of the mapped bytes, bytes of it that are left.
pub(crate) type Observer = extern "C" fn(c_int, u64, u64, u64);

static OBSERVER: Mutex<Option<Observer>> = Mutex::new(None);

/// `dormouse_torch_set_out_of_memory_observer`.
pub(crate) fn set(observer: Option<Observer>) {
    *OBSERVER.lock() = observer;
}

/// Tells the observer of a request of `bytes` that found no memory. Called without a lock: the observer may wait for
/// any, allocate, and read memory.
pub(super) fn tell(device: c_int, bytes: isize) {
    let observer = *OBSERVER.lock();
    let Some(observer) = observer else { return };
    guarded("out_of_memory_observer", || {
        let Stats { budget_bytes, mapped_bytes, .. } =
            Heap::existing_gpu(device)?.allocator().stats();
        let left_bytes = budget_bytes.saturating_sub(mapped_bytes.current);
        observer(device, bytes.unsigned_abs() as u64, budget_bytes, left_bytes);
        Ok(())
    });
}
