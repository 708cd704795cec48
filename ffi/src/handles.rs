//! Handles: numbers that look like pointers.
//!
//! ```text
//!   63            32 31         8 7      1 0
//!  ┌────────────────┬────────────┬────────┬─┐
//!  │   generation   │   index    │  kind  │1│   odd: never an aligned pointer
//!  └────────────────┴────────────┴────────┴─┘
//! ```
//! - **H1** A handle is looked up, never dereferenced.
//! - **H2** Each slot uses a generation once, so a destroyed handle stays destroyed. A slot without
//!   unused generations is retired.
//! - **H3** At most one thread is inside an [`Exclusive`]; a second one is refused, not queued.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::fault::Fault;
use crate::status;

/// Maximum number of live handles of one kind.
const HANDLES_MAX: usize = 1 << 20;

/// Type of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Runtime = 1,
    Tag = 2,
    Plan = 3,
    Prefix = 4,
    Forest = 5,
    History = 6,
    Dialogue = 7,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::Tag => "tag",
            Self::Plan => "plan",
            Self::Prefix => "prefix",
            Self::Forest => "forest",
            Self::History => "history",
            Self::Dialogue => "dialogue history",
        }
    }

    pub(crate) fn stale(self) -> Fault {
        let kind = self.name();
        Fault::new(
            status::DORMOUSE_ERR_STALE,
            format!("this {kind} was destroyed; accepted: a live {kind}"),
        )
    }
}

#[derive(Debug)]
struct Slot<T> {
    /// Generation of the current or latest value; 0: never used.
    generation: u32,
    value: Option<Arc<T>>,
}

#[derive(Debug)]
struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

/// Every live handle of one kind. Any-thread.
#[derive(Debug)]
pub(crate) struct Table<T> {
    kind: Kind,
    slots: Mutex<Slots<T>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(kind: Kind) -> Self {
        Self { kind, slots: Mutex::new(Slots { slots: Vec::new(), free: Vec::new() }) }
    }

    /// Creates a handle for `value`; `P` is the incomplete type of the header.
    pub(crate) fn insert<P>(&self, value: Arc<T>) -> Result<*mut P, Fault> {
        let Slots { slots, free } = &mut *self.slots.lock();
        let index = free.pop().unwrap_or(slots.len() as u32);
        if index as usize == slots.len() {
            if slots.len() >= HANDLES_MAX {
                return Err(Fault::new(
                    status::DORMOUSE_ERR_LIMIT,
                    format!("{} handle limit reached ({HANDLES_MAX})", self.kind.name()),
                ));
            }
            slots.push(Slot { generation: 0, value: None });
        }
        let slot = &mut slots[index as usize];
        slot.generation += 1;
        slot.value = Some(value);
        let low = u64::from(index) << 8 | u64::from(self.kind as u8) << 1 | 1;
        let handle = u64::from(slot.generation) << 32 | low;
        Ok(std::ptr::without_provenance_mut(handle as usize))
    }

    /// Returns the value of `handle`.
    pub(crate) fn get<P>(&self, handle: *mut P) -> Result<Arc<T>, Fault> {
        Ok(Arc::clone(self.find(&self.slots.lock().slots, handle)?.1))
    }

    /// Removes `handle` from the table. Of two concurrent calls, one fails.
    pub(crate) fn remove<P>(&self, handle: *mut P) -> Result<Arc<T>, Fault> {
        let Slots { slots, free } = &mut *self.slots.lock();
        let (index, value) = self.find(slots, handle)?;
        let value = Arc::clone(value);
        slots[index].value = None;
        if slots[index].generation < u32::MAX {
            free.push(index as u32);
        }
        Ok(value)
    }

    /// Removes `handle`, unless it is NULL. Threads that have its value go on; the last one drops it.
    pub(crate) fn discard<P>(&self, handle: *mut P) -> Result<(), Fault> {
        if handle.is_null() { Ok(()) } else { self.remove(handle).map(drop) }
    }

    /// Returns every live value, in table order.
    pub(crate) fn live(&self) -> Vec<Arc<T>> {
        self.slots.lock().slots.iter().filter_map(|slot| slot.value.clone()).collect()
    }

    fn find<'a, P>(
        &self,
        slots: &'a [Slot<T>],
        handle: *mut P,
    ) -> Result<(usize, &'a Arc<T>), Fault> {
        let kind = self.kind.name();
        if handle.is_null() {
            return Err(Fault::null(kind));
        }
        let bits = handle.addr() as u64;
        let (generation, low) = ((bits >> 32) as u32, bits as u32);
        let index = (low >> 8) as usize;
        let slot = (low & 0xff == (self.kind as u32) << 1 | 1).then(|| slots.get(index)).flatten();
        match slot {
            Some(Slot { generation: latest, value: Some(value) }) if generation == *latest => {
                Ok((index, value))
            }
            Some(slot) if (1..=slot.generation).contains(&generation) => Err(self.kind.stale()),
            _ => Err(Fault::new(
                status::DORMOUSE_ERR_HANDLE,
                format!("{bits:#x} is no {kind} handle; accepted: one from dormouse_{kind}_create"),
            )),
        }
    }
}

/// Handles whose values one thread at a time can use.
impl<T> Table<Exclusive<T>> {
    pub(crate) fn insert_exclusive<P>(&self, value: T) -> Result<*mut P, Fault> {
        self.insert(Arc::new(Exclusive::new(self.kind, value)))
    }

    /// Runs `work` on the value of `handle`.
    pub(crate) fn with<P, R>(
        &self,
        handle: *mut P,
        work: impl FnOnce(&mut T) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        self.get(handle)?.with(work)
    }

    /// Destroys the value of `handle`. NULL is a no-op.
    pub(crate) fn destroy<P>(&self, handle: *mut P) -> Result<(), Fault> {
        if !handle.is_null() {
            // First, so that a thread inside keeps the handle valid.
            drop(self.get(handle)?.take()?);
            self.remove(handle)?;
        }
        Ok(())
    }
}

/// A value that one thread at a time can use (H3).
#[derive(Debug)]
pub(crate) struct Exclusive<T> {
    kind: Kind,
    /// `None` after [`Exclusive::take`].
    value: Mutex<Option<T>>,
    /// Set while a thread is inside, and for good by a panic there.
    is_inside: AtomicBool,
}

impl<T> Exclusive<T> {
    pub(crate) fn new(kind: Kind, value: T) -> Self {
        Self { kind, value: Mutex::new(Some(value)), is_inside: AtomicBool::new(false) }
    }

    /// Runs `work` on the value. Fails if another thread is inside or a panic left it inconsistent.
    pub(crate) fn with<R>(
        &self,
        work: impl FnOnce(&mut T) -> Result<R, Fault>,
    ) -> Result<R, Fault> {
        let mut guard = self.try_lock()?;
        let value = guard.as_mut().ok_or_else(|| self.kind.stale())?;
        // Relaxed, here and below: under the lock.
        if self.is_inside.swap(true, Ordering::Relaxed) {
            let kind = self.kind.name();
            return Err(Fault::new(
                status::DORMOUSE_ERR_STATE,
                format!("an internal error left this {kind} inconsistent; accepted: destroy"),
            ));
        }
        let result = work(value);
        self.is_inside.store(false, Ordering::Relaxed);
        result
    }

    /// Takes the value out for good, also after a panic.
    pub(crate) fn take(&self) -> Result<T, Fault> {
        self.try_lock()?.take().ok_or_else(|| self.kind.stale())
    }

    fn try_lock(&self) -> Result<MutexGuard<'_, Option<T>>, Fault> {
        self.value.try_lock().ok_or_else(|| {
            let kind = self.kind.name();
            Fault::new(
                status::DORMOUSE_ERR_BUSY,
                format!("another thread uses this {kind}; accepted: one thread at a time"),
            )
        })
    }
}

#[cfg(test)]
mod tests;
