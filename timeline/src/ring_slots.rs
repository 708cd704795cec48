//! The memory of a ring: slots of zeros.

use crate::ring::Slot;

/// A page is allocated when its first slot is written: a process that records few events takes little
/// memory and starts sooner.
#[cfg(not(loom))]
pub(crate) struct Slots<const WORDS: usize> {
    /// `None`: the system refused the memory, and there are no slots.
    mapping: Option<memmap2::MmapRaw>,
    count: usize,
}

#[cfg(not(loom))]
impl<const WORDS: usize> Slots<WORDS> {
    /// Maps `count` slots, or none if the system refuses them.
    pub(crate) fn zeroed(count: usize) -> Self {
        let bytes = count.saturating_mul(size_of::<Slot<WORDS>>());
        let mapping = memmap2::MmapMut::map_anon(bytes).ok().map(memmap2::MmapRaw::from);
        let count = if mapping.is_some() { count } else { 0 };
        Self { mapping, count }
    }

    #[inline]
    pub(crate) fn all(&self) -> &[Slot<WORDS>] {
        let Some(mapping) = &self.mapping else { return &[] };
        #[expect(unsafe_code, reason = "a mapping used as slots")]
        // SAFETY: the mapping holds `count` slots, begins at a page, whose alignment is a multiple of
        // a slot's, and lives as long as `self`. A slot is atomic words: any bytes are valid, and all
        // threads may change them.
        unsafe {
            std::slice::from_raw_parts(mapping.as_ptr().cast(), self.count)
        }
    }
}

/// Loom's atomics are objects of its own.
#[cfg(loom)]
pub(crate) struct Slots<const WORDS: usize>(Box<[Slot<WORDS>]>);

#[cfg(loom)]
impl<const WORDS: usize> Slots<WORDS> {
    pub(crate) fn zeroed(count: usize) -> Self {
        Self((0..count).map(|_| Slot::empty()).collect())
    }

    pub(crate) fn all(&self) -> &[Slot<WORDS>] {
        &self.0
    }
}
