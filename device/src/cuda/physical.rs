//! Physical pages: driver handles, and the addresses at which each is mapped.
//!
//! Only whole handles can be unmapped, so a handle is one page or one large page. Unmapped handles are parked for
//! the next range: creating one costs far more than mapping it. The driver's documentation does not say whether
//! one call may unmap several adjacent handles, so this is tested once.
//!
//! - **P1** A handle is mapped at exactly one place, or parked, or held by one call.
//! - **P2** The lock of the handles is not held during driver calls.
//! - **P3** A large page is mapped at a multiple of its size.
//! - **P4** Every GPU in `users` has access to every mapped page.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use super::context::Gpu;
use super::error::Code;
use super::parked::Parked;
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

/// A handle, and its addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) range: AddressRange,
    pub(super) handle: u64,
}

/// All physical pages of one device.
#[derive(Debug)]
pub(super) struct Physical {
    page_bytes: usize,
    /// Bytes of a large page; those of a page if there are none.
    large_bytes: usize,
    /// Whether one call unmaps any number of adjacent handles.
    unmaps_runs: bool,
    /// The GPUs with access. Held for reading while pages are mapped or unmapped: another GPU gets access to all of them
    /// (P4).
    users: RwLock<Vec<i32>>,
    inner: Mutex<Inner>,
    /// Relaxed: a count.
    parked_bytes: AtomicU64,
}

#[derive(Debug)]
struct Inner {
    /// Handle and bytes, by first address.
    behind: HashMap<usize, (u64, usize)>,
    parked: Parked,
}

impl Physical {
    /// Nothing is mapped in `space` yet, which starts at a multiple of `large_bytes`. Its GPU is `device`.
    pub(super) fn new(
        gpu: &Gpu<'_>,
        device: i32,
        space: AddressRange,
        page_bytes: usize,
        large_bytes: usize,
    ) -> Self {
        let inner = Inner { behind: HashMap::new(), parked: Parked::new(page_bytes, large_bytes) };
        let unmaps_runs = unmaps_runs(gpu, space, page_bytes);
        let (inner, parked_bytes) = (Mutex::new(inner), AtomicU64::new(0));
        let users = RwLock::new(vec![device]);
        Self { page_bytes, large_bytes, unmaps_runs, users, inner, parked_bytes }
    }

    pub(super) fn parked_bytes(&self) -> u64 {
        self.parked_bytes.load(Ordering::Relaxed)
    }

    fn users(&self) -> RwLockReadGuard<'_, Vec<i32>> {
        self.users.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives GPU `peer` access to all pages. After an error it may have access to some.
    pub(super) fn add_peer(&self, gpu: &Gpu<'_>, peer: i32) -> Result<(), Code> {
        let mut users = self.users.write().unwrap_or_else(PoisonError::into_inner);
        if users.contains(&peer) {
            return Ok(());
        }
        let places: Vec<AddressRange> = self.inner.lock().places().collect();
        places.into_iter().try_for_each(|place| gpu.open(place, &[peer]))?;
        users.push(peer);
        Ok(())
    }

    /// Returns the places of handles that make up `range`: large pages where they lie wholly in `large`.
    fn places(&self, range: AddressRange, large: AddressRange) -> Vec<AddressRange> {
        let (mut places, mut start) = (Vec::new(), range.start);
        while start < range.end() {
            let is_large = start.is_multiple_of(self.large_bytes)
                && start >= large.start
                && start + self.large_bytes <= large.end().min(range.end());
            let bytes = if is_large { self.large_bytes } else { self.page_bytes };
            places.push(AddressRange::new(start, bytes));
            start += bytes;
        }
        places
    }

    /// Returns the pages of `place`.
    fn pages(&self, place: AddressRange) -> Vec<AddressRange> {
        self.places(place, AddressRange::default())
    }

    /// Returns the first unmapped page that overlaps `range`.
    pub(super) fn first_missing(&self, range: AddressRange) -> Option<usize> {
        let first = range.start / self.page_bytes * self.page_bytes;
        let inner = self.inner.lock();
        let is_missing = |at: &usize| {
            !inner.behind.contains_key(at) && inner.large_around(*at, self.large_bytes).is_none()
        };
        (first..range.end()).step_by(self.page_bytes).find(is_missing)
    }

    /// Returns the start of a large page that lies only partly in the mapped `range`.
    pub(super) fn first_split(&self, range: AddressRange) -> Option<usize> {
        let inner = self.inner.lock();
        let large = |at: usize| inner.large_around(at, self.large_bytes);
        let is_split =
            |start: &usize| *start < range.start || start + self.large_bytes > range.end();
        [range.start, range.end() - self.page_bytes].into_iter().filter_map(large).find(is_split)
    }

    /// Maps pages, parked ones first, at an unmapped `range`, with access. Releases further parked pages
    /// beyond `keep_parked_bytes`.
    pub(super) fn attach(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        large: AddressRange,
        keep_parked_bytes: u64,
    ) -> Result<(), Failed> {
        let (mut pieces, mut missing) = self.unpark(self.places(range, large));
        // Parked handles of the other size make way, so that all handles together stay as few as with one size.
        let missing_bytes: usize = missing.iter().map(|place| place.bytes).sum();
        let left_bytes = self.parked_bytes().saturating_sub(missing_bytes as u64);
        self.shrink(gpu, keep_parked_bytes.min(left_bytes));
        while let Some(place) = missing.pop() {
            match self.create(gpu, place.bytes) {
                Ok(handle) => pieces.push(Piece { range: place, handle }),
                // Memory may be left in smaller pieces.
                Err(_) if place.bytes > self.page_bytes => missing.extend(self.pages(place)),
                Err(code) => {
                    self.park(pieces);
                    return Err(Failed { code, is_undone: true });
                }
            }
        }
        let users = self.users();
        self.map_and_open(gpu, range, &pieces, &users)?;
        self.put(pieces);
        Ok(())
    }

    /// Creates a handle. If memory is out, parked handles of the other size are released for it.
    fn create(&self, gpu: &Gpu<'_>, bytes: usize) -> Result<u64, Code> {
        match gpu.create(bytes) {
            Err(Code::OUT_OF_MEMORY) if self.shrink(gpu, 0) > 0 => gpu.create(bytes),
            created => created,
        }
    }

    /// Maps `pieces`, which make up `range`, with access of `users`. After an error they are parked.
    fn map_and_open(
        &self,
        gpu: &Gpu<'_>,
        range: AddressRange,
        pieces: &[Piece],
        users: &[i32],
    ) -> Result<(), Failed> {
        let mut mapped = 0;
        let mut outcome = Ok(());
        for piece in pieces {
            outcome = gpu.map(piece.range, piece.handle);
            if outcome.is_err() {
                break;
            }
            mapped += 1;
        }
        let Err(code) = outcome.and_then(|()| gpu.open(range, users)) else { return Ok(()) };
        let mut free = pieces[mapped..].to_vec();
        let mut is_undone = true;
        for piece in &pieces[..mapped] {
            // SAFETY: mapped above, without access: no work can use it.
            match unsafe { gpu.unmap(piece.range) } {
                Ok(()) => free.push(*piece),
                Err(_) => is_undone = false,
            }
        }
        self.park(free);
        Err(Failed { code, is_undone })
    }

    /// Unmaps the pages of `range` and parks them. No large page lies partly in it.
    ///
    /// # Safety
    /// No work that uses `range` is queued or running, and its contents are no longer needed.
    pub(super) unsafe fn detach(&self, gpu: &Gpu<'_>, range: AddressRange) -> Result<(), Failed> {
        let users = self.users();
        let mut pieces = self.take(range);
        let runs: Vec<AddressRange> = if self.unmaps_runs {
            vec![range]
        } else {
            pieces.iter().map(|piece| piece.range).collect()
        };
        for (unmapped, run) in runs.into_iter().enumerate() {
            // SAFETY: the caller's contract; the run consists of mappings of ours.
            if let Err(code) = unsafe { gpu.unmap(run) } {
                let left = pieces.split_off(unmapped);
                return Err(self.attach_again(gpu, pieces, left, &users, code));
            }
        }
        self.park(pieces);
        Ok(())
    }

    /// After a refused `detach`, maps the pieces that were unmapped again. The others are still mapped.
    fn attach_again(
        &self,
        gpu: &Gpu<'_>,
        unmapped: Vec<Piece>,
        left: Vec<Piece>,
        users: &[i32],
        code: Code,
    ) -> Failed {
        self.put(left);
        let again = match (unmapped.first(), unmapped.last()) {
            (Some(first), Some(last)) => {
                let bytes = last.range.end() - first.range.start;
                self.map_and_open(
                    gpu,
                    AddressRange::new(first.range.start, bytes),
                    &unmapped,
                    users,
                )
            }
            _ => Ok(()),
        };
        let (count, is_undone) = (unmapped.len(), again.is_ok());
        if is_undone {
            self.put(unmapped);
        }
        tracing::warn!(target: "device", ?code, unmapped = count, is_undone, "unmapping refused");
        Failed { code, is_undone }
    }

    /// Releases parked pages beyond `keep_bytes`. Returns the released bytes.
    pub(super) fn shrink(&self, gpu: &Gpu<'_>, keep_bytes: u64) -> u64 {
        let keep = usize::try_from(keep_bytes.min(PARKED_BYTES_MAX)).unwrap_or(usize::MAX);
        let (released, bytes) = {
            let mut inner = self.inner.lock();
            let released = inner.parked.take_beyond(keep);
            self.count(&inner);
            released
        };
        for handle in released {
            // Refused only if the driver is gone, and the memory with it.
            let _ = gpu.release(handle);
        }
        bytes as u64
    }

    /// Takes all handles, and the addresses at which some are mapped.
    pub(super) fn take_all(&self) -> (Vec<AddressRange>, Vec<u64>) {
        let mut inner = self.inner.lock();
        let (mut handles, _) = inner.parked.take_beyond(0);
        let places = inner.places().collect();
        handles.extend(std::mem::take(&mut inner.behind).values().map(|(handle, _)| handle));
        (places, handles)
    }

    /// Records what is mapped.
    fn put(&self, pieces: Vec<Piece>) {
        let entry = |Piece { range, handle }| (range.start, (handle, range.bytes));
        self.inner.lock().behind.extend(pieces.into_iter().map(entry));
    }

    /// Takes the pieces that make up `range`, in order of their addresses.
    fn take(&self, range: AddressRange) -> Vec<Piece> {
        let mut inner = self.inner.lock();
        let (mut pieces, mut start) = (Vec::new(), range.start);
        while start < range.end() {
            let Some((handle, bytes)) = inner.behind.remove(&start) else { break };
            pieces.push(Piece { range: AddressRange::new(start, bytes), handle });
            start += bytes;
        }
        debug_assert_eq!(start, range.end(), "a page without a handle, or half of a large one");
        pieces
    }

    fn park(&self, pieces: Vec<Piece>) {
        let mut inner = self.inner.lock();
        pieces.into_iter().for_each(|piece| inner.parked.put(piece));
        self.count(&inner);
    }

    /// Takes parked handles for `places`. Returns them, and the places without one.
    fn unpark(&self, places: Vec<AddressRange>) -> (Vec<Piece>, Vec<AddressRange>) {
        let mut inner = self.inner.lock();
        let (mut pieces, mut missing) = (Vec::new(), Vec::new());
        for range in places {
            match inner.parked.take(range.bytes) {
                Some(handle) => pieces.push(Piece { range, handle }),
                None => missing.push(range),
            }
        }
        self.count(&inner);
        (pieces, missing)
    }

    fn count(&self, inner: &Inner) {
        self.parked_bytes.store(inner.parked.bytes() as u64, Ordering::Relaxed);
    }
}

impl Inner {
    /// Returns the addresses of all mapped handles.
    fn places(&self) -> impl Iterator<Item = AddressRange> {
        self.behind.iter().map(|(at, (_, bytes))| AddressRange::new(*at, *bytes))
    }

    /// Returns the start of the large page around page `at`.
    fn large_around(&self, at: usize, large_bytes: usize) -> Option<usize> {
        let start = at / large_bytes * large_bytes;
        self.behind.get(&start).is_some_and(|(_, bytes)| *bytes == large_bytes).then_some(start)
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
