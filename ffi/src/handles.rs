//! Handles: numbers that look like pointers.
//!
//! ```text
//!   63            32 31         8 7      1 0
//!  ┌────────────────┬────────────┬────────┬─┐
//!  │   generation   │   index    │  kind  │1│   odd: no aligned pointer is ever taken for one
//!  └────────────────┴────────────┴────────┴─┘
//! ```
//! - **H1** A handle is looked up, never dereferenced.
//! - **H2** A generation is given out once per slot, so a destroyed handle stays destroyed; a slot
//!   whose generations are used up is retired.
//! - **H3** Inside an [`Exclusive`] there is at most one thread; a second is turned away, not
//!   queued.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::fault::Fault;
use crate::status;

/// Most live handles of one kind.
const HANDLES_MAX: usize = 1 << 20;

/// What a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Runtime = 1,
    Tag = 2,
    Plan = 3,
    Prefix = 4,
    Forest = 5,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::Tag => "tag",
            Self::Plan => "plan",
            Self::Prefix => "prefix",
            Self::Forest => "forest",
        }
    }
}

#[derive(Debug)]
struct Slot<T> {
    /// Of the value it holds, or of the last it held. 0: never used.
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
    /// An empty table.
    pub(crate) const fn new(kind: Kind) -> Self {
        Self { kind, slots: Mutex::new(Slots { slots: Vec::new(), free: Vec::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Slots<T>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `value` a handle; `P` is the incomplete type C sees.
    pub(crate) fn insert<P>(&self, value: Arc<T>) -> Result<*mut P, Fault> {
        let mut slots = self.lock();
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                let index = slots.slots.len();
                if index >= HANDLES_MAX {
                    return Err(Fault::new(
                        status::DORMOUSE_ERR_LIMIT,
                        format!("{HANDLES_MAX} {} handles are live, the most", self.kind.name()),
                    ));
                }
                slots.slots.push(Slot { generation: 0, value: None });
                index as u32
            }
        };
        let Some(slot) = slots.slots.get_mut(index as usize) else {
            return Err(Fault::new(status::DORMOUSE_ERR_PANIC, "the handle table lost a slot"));
        };
        slot.generation += 1;
        slot.value = Some(value);
        let low = u64::from(index) << 8 | u64::from(self.kind as u8) << 1 | 1;
        let handle = u64::from(slot.generation) << 32 | low;
        Ok(std::ptr::without_provenance_mut(handle as usize))
    }

    /// What `handle` names.
    pub(crate) fn get<P>(&self, handle: *mut P) -> Result<Arc<T>, Fault> {
        let (index, generation) = self.decode(handle)?;
        let slots = self.lock();
        let slot = self.slot(slots.slots.get(index), generation, handle.addr())?;
        slot.value.clone().ok_or_else(|| self.stale(handle.addr()))
    }

    /// Takes `handle` out of the table if `allow` agrees, so that two destroys cannot both win.
    pub(crate) fn remove<P>(
        &self,
        handle: *mut P,
        allow: impl FnOnce(&Arc<T>) -> Result<(), Fault>,
    ) -> Result<Arc<T>, Fault> {
        let (index, generation) = self.decode(handle)?;
        let mut slots = self.lock();
        let slot = self.slot(slots.slots.get(index), generation, handle.addr())?;
        allow(slot.value.as_ref().ok_or_else(|| self.stale(handle.addr()))?)?;
        let retired = slot.generation == u32::MAX;
        let value = slots.slots.get_mut(index).and_then(|slot| slot.value.take());
        if !retired {
            slots.free.push(index as u32);
        }
        value.ok_or_else(|| self.stale(handle.addr()))
    }

    /// Everything live, in table order.
    pub(crate) fn live(&self) -> Vec<Arc<T>> {
        self.lock().slots.iter().filter_map(|slot| slot.value.clone()).collect()
    }

    fn decode<P>(&self, handle: *mut P) -> Result<(usize, u32), Fault> {
        if handle.is_null() {
            return Err(Fault::null(self.kind.name()));
        }
        let bits = handle.addr() as u64;
        let (generation, low) = ((bits >> 32) as u32, bits as u32);
        if low & 1 == 0 || low >> 1 & 0x7f != self.kind as u32 || generation == 0 {
            return Err(self.foreign(handle.addr()));
        }
        Ok(((low >> 8) as usize, generation))
    }

    fn slot<'a>(
        &self,
        slot: Option<&'a Slot<T>>,
        generation: u32,
        seen: usize,
    ) -> Result<&'a Slot<T>, Fault> {
        match slot {
            None => Err(self.foreign(seen)),
            Some(slot) if generation > slot.generation => Err(self.foreign(seen)),
            Some(slot) if generation < slot.generation => Err(self.stale(seen)),
            Some(slot) => Ok(slot),
        }
    }

    fn foreign(&self, seen: usize) -> Fault {
        let kind = self.kind.name();
        Fault::new(
            status::DORMOUSE_ERR_HANDLE,
            format!("{seen:#x} is no {kind} handle; one from dormouse_{kind}_create is accepted"),
        )
    }

    fn stale(&self, seen: usize) -> Fault {
        let kind = self.kind.name();
        Fault::new(
            status::DORMOUSE_ERR_STALE,
            format!("{kind} {seen:#x} was destroyed; a live {kind} is accepted"),
        )
    }
}

/// A value one thread at a time may be inside of (H3).
#[derive(Debug)]
pub(crate) struct Exclusive<T> {
    kind: Kind,
    value: Mutex<Option<T>>,
}

impl<T> Exclusive<T> {
    /// Holds `value`.
    pub(crate) fn new(kind: Kind, value: T) -> Self {
        Self { kind, value: Mutex::new(Some(value)) }
    }

    /// Goes in, or says why not: another thread is inside, or a panic left it half changed.
    pub(crate) fn enter(&self) -> Result<Inside<'_, T>, Fault> {
        let kind = self.kind.name();
        match self.value.try_lock() {
            Ok(guard) if guard.is_some() => Ok(Inside(guard)),
            Ok(_) => Err(Fault::new(
                status::DORMOUSE_ERR_STALE,
                format!("this {kind} was destroyed by another thread; a live {kind} is accepted"),
            )),
            Err(TryLockError::WouldBlock) => Err(Fault::new(
                status::DORMOUSE_ERR_BUSY,
                format!("another thread is inside this {kind}; one at a time is accepted"),
            )),
            Err(TryLockError::Poisoned(_)) => Err(Fault::new(
                status::DORMOUSE_ERR_STATE,
                format!("a defect left this {kind} half changed; only destroy is accepted"),
            )),
        }
    }

    /// Takes the value out for good, also after a panic inside.
    pub(crate) fn take(&self) -> Result<T, Fault> {
        let mut guard = match self.value.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(self.enter().map(drop).err().unwrap_or_else(|| {
                    Fault::new(status::DORMOUSE_ERR_BUSY, "another thread was inside; try again")
                }));
            }
        };
        guard.take().ok_or_else(|| {
            Fault::new(
                status::DORMOUSE_ERR_STALE,
                format!("this {} was destroyed by another thread", self.kind.name()),
            )
        })
    }
}

/// Being inside an [`Exclusive`].
#[derive(Debug)]
pub(crate) struct Inside<'a, T>(MutexGuard<'a, Option<T>>);

impl<T> Inside<'_, T> {
    /// The value. `Err` cannot happen: `enter` looked.
    pub(crate) fn value(&mut self) -> Result<&mut T, Fault> {
        self.0.as_mut().ok_or_else(|| {
            Fault::new(status::DORMOUSE_ERR_PANIC, "an exclusive handle lost its value")
        })
    }
}

#[cfg(test)]
mod tests;
