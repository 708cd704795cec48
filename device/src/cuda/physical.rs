//! Physical pages: driver handles, and the page of the space at which each is mapped.
//!
//! Only whole handles can be unmapped, so a handle is one page. Unmapped handles are parked for the next
//! range: creating one costs far more than mapping it. The driver's documentation does not say whether
//! one call may unmap several adjacent handles, so this is tested once.
//!
//! - **P1** A handle is mapped at exactly one page, or parked, or held by one call.
//! - **P2** The lock is not held during driver calls.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::context::Gpu;
use super::error::Code;
use crate::AddressRange;
use crate::sync::Mutex;

/// Limit of the parked bytes, a few layers' worth. The driver reports them as used.
const PARKED_BYTES_MAX: u64 = 1 << 30;

/// The error of an attach or a detach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failed {
    pub(super) code: Code,
    /// Whether the range is unchanged. Otherwise it must not be used again.
    pub(super) is_undone: bool,
}

/// All physical pages of one device.
#[derive(Debug)]
pub(super) struct Physical {
    page_bytes: usize,
    /// Whether one call unmaps any number of adjacent pages.
    unmaps_runs: bool,
    inner: Mutex<Inner>,
    /// Relaxed: a count.
    parked_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    /// By address of the page.
    behind: HashMap<usize, u64>,
    parked: Vec<u64>,
}

impl Physical {
    /// Nothing is mapped in `space` yet.
    pub(super) fn new(gpu: &Gpu<'_>, space: AddressRange, page_bytes: usize) -> Self {
        let inner = Mutex::new(Inner::default());
        let unmaps_runs = unmaps_runs(gpu, space, page_bytes);
        Self { page_bytes, unmaps_runs, inner, parked_bytes: AtomicU64::new(0) }
    }

    pub(super) fn parked_bytes(&self) -> u64 {
        self.parked_bytes.load(Ordering::Relaxed)
    }

    fn pages(&self, range: AddressRange) -> impl Iterator<Item = AddressRange> + use<> {
        let page_bytes = self.page_bytes;
        (range.start..range.end())
            .step_by(page_bytes)
            .map(move |at| AddressRange::new(at, page_bytes))
    }

    /// Returns the first unmapped page that overlaps `range`.
    pub(super) fn first_missing(&self, range: AddressRange) -> Option<usize> {
        let first = range.start / self.page_bytes * self.page_bytes;
        let inner = self.inner.lock();
        (first..range.end()).step_by(self.page_bytes).find(|at| !inner.behind.contains_key(at))
    }

    /// Maps pages, parked ones first, at an unmapped `range`, with access. Releases further parked pages
    /// beyond `keep_parked_bytes`.
    pub(super) fn attach(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        keep_parked_bytes: u64,
    ) -> Result<(), Failed> {
        let undone = |code| Failed { code, is_undone: true };
        let count = range.bytes / self.page_bytes;
        let mut handles = self.unpark(count);
        self.shrink(gpu, keep_parked_bytes);
        while handles.len() < count {
            match gpu.create(self.page_bytes) {
                Ok(handle) => handles.push(handle),
                Err(code) => {
                    self.park(handles);
                    return Err(undone(code));
                }
            }
        }
        self.map_and_open(gpu, range, &handles)?;
        self.inner.lock().behind.extend(self.pages(range).map(|page| page.start).zip(handles));
        Ok(())
    }

    /// Maps `handles` at `range` with access. After an error they are parked.
    fn map_and_open(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        handles: &[u64],
    ) -> Result<(), Failed> {
        let mut mapped = 0;
        let mut outcome = Ok(());
        for (page, handle) in self.pages(range).zip(handles) {
            outcome = gpu.map(page, *handle);
            if outcome.is_err() {
                break;
            }
            mapped += 1;
        }
        let Err(code) = outcome.and_then(|()| gpu.open(range)) else { return Ok(()) };
        let mut free = handles[mapped..].to_vec();
        let mut is_undone = true;
        for (page, handle) in self.pages(range).zip(&handles[..mapped]) {
            // SAFETY: mapped above, without access: no work can use it.
            match unsafe { gpu.unmap(page) } {
                Ok(()) => free.push(*handle),
                Err(_) => is_undone = false,
            }
        }
        self.park(free);
        Err(Failed { code, is_undone })
    }

    /// Unmaps the pages of `range` and parks them.
    ///
    /// # Safety
    /// No work that uses `range` is queued or running, and its contents are no longer needed.
    pub(super) unsafe fn detach(&self, gpu: &Gpu<'_>, range: AddressRange) -> Result<(), Failed> {
        let handles: Vec<u64> = {
            let mut inner = self.inner.lock();
            self.pages(range).filter_map(|page| inner.behind.remove(&page.start)).collect()
        };
        debug_assert_eq!(handles.len(), range.bytes / self.page_bytes, "a page without a handle");
        let step_bytes = if self.unmaps_runs { range.bytes } else { self.page_bytes };
        for start in (range.start..range.end()).step_by(step_bytes) {
            // SAFETY: the caller's contract; the pages are mappings of ours.
            if let Err(code) = unsafe { gpu.unmap(AddressRange::new(start, step_bytes)) } {
                let unmapped = (start - range.start) / self.page_bytes;
                return Err(self.attach_again(gpu, range, unmapped, handles, code));
            }
        }
        self.park(handles);
        Ok(())
    }

    /// After a refused `detach`, maps the first `unmapped` pages of `range` again.
    fn attach_again(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        unmapped: usize,
        mut handles: Vec<u64>,
        code: Code,
    ) -> Failed {
        let (lost, left) = range.split_at(unmapped * self.page_bytes);
        let left_handles = handles.split_off(unmapped);
        let again = if unmapped == 0 { Ok(()) } else { self.map_and_open(gpu, lost, &handles) };
        let mut inner = self.inner.lock();
        inner.behind.extend(self.pages(left).map(|page| page.start).zip(left_handles));
        if again.is_ok() {
            inner.behind.extend(self.pages(lost).map(|page| page.start).zip(handles));
        }
        drop(inner);
        tracing::warn!(target: "device", ?code, unmapped, is_undone = again.is_ok(), "unmapping refused");
        Failed { code, is_undone: again.is_ok() }
    }

    /// Releases parked pages beyond `keep_bytes`. Returns the released bytes.
    pub(super) fn shrink(&self, gpu: &Gpu<'_>, keep_bytes: u64) -> u64 {
        let keep = usize::try_from(keep_bytes.min(PARKED_BYTES_MAX)).unwrap_or(usize::MAX);
        let released = {
            let mut inner = self.inner.lock();
            let keep = (keep / self.page_bytes).min(inner.parked.len());
            let released = inner.parked.split_off(keep);
            self.count(&inner);
            released
        };
        for handle in &released {
            // Refused only if the driver is gone, and the memory with it.
            let _ = gpu.release(*handle);
        }
        (released.len() * self.page_bytes) as u64
    }

    /// Takes all handles, and the addresses at which some are mapped.
    pub(super) fn take_all(&self) -> (Vec<AddressRange>, Vec<u64>) {
        let mut inner = self.inner.lock();
        let behind = std::mem::take(&mut inner.behind);
        let mut handles = std::mem::take(&mut inner.parked);
        handles.extend(behind.values());
        let pages = behind.keys().map(|at| AddressRange::new(*at, self.page_bytes)).collect();
        (pages, handles)
    }

    fn park(&self, handles: Vec<u64>) {
        let mut inner = self.inner.lock();
        inner.parked.extend(handles);
        self.count(&inner);
    }

    fn unpark(&self, count: usize) -> Vec<u64> {
        let mut inner = self.inner.lock();
        let kept = inner.parked.len().saturating_sub(count);
        let handles = inner.parked.split_off(kept);
        self.count(&inner);
        handles
    }

    fn count(&self, inner: &Inner) {
        let bytes = inner.parked.len() * self.page_bytes;
        self.parked_bytes.store(bytes as u64, Ordering::Relaxed);
    }
}

/// Whether one call unmaps several adjacent handles: tested with two, in the first pages of an unmapped
/// `space`. False if the test is impossible.
fn unmaps_runs(gpu: &Gpu<'_>, space: AddressRange, page_bytes: usize) -> bool {
    let page = |at: usize| AddressRange::new(space.start + at * page_bytes, page_bytes);
    let both = AddressRange::new(space.start, 2 * page_bytes);
    if both.bytes > space.bytes {
        return false;
    }
    let handles = [gpu.create(page_bytes), gpu.create(page_bytes)];
    let mut unmaps_both = false;
    if let [Ok(first), Ok(second)] = handles {
        let mut mapped = [gpu.map(page(0), first).is_ok(), gpu.map(page(1), second).is_ok()];
        // SAFETY: mapped here, without access.
        if mapped == [true; 2] && unsafe { gpu.unmap(both) }.is_ok() {
            // Trusted only if the second page can be mapped again: otherwise it is still mapped.
            unmaps_both = gpu.map(page(1), first).is_ok();
            mapped = [false, true];
        }
        for at in (0..mapped.len()).filter(|&at| mapped[at]) {
            // SAFETY: as above.
            let _ = unsafe { gpu.unmap(page(at)) };
        }
    }
    for handle in handles.into_iter().flatten() {
        // Refused only if the driver is gone, and the memory with it.
        let _ = gpu.release(handle);
    }
    unmaps_both
}
