//! The device's memory: what is reserved, created, mapped, allocated and pinned.
//!
//! All of it is behind one lock, which a copy holds for reading while it touches memory (D1).

use std::collections::BTreeMap;

use crate::arena::Arena;
use crate::backing::Backing;
use crate::code::Code;
use crate::device_info::DEVICES_MAX;
use crate::runs::{self, Runs};
use crate::system;

/// What the device may do with a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    None,
    Read,
    ReadWrite,
}

/// Physical memory.
#[derive(Clone, Copy)]
pub(crate) struct Handle {
    place: i64,
    pub(crate) bytes: usize,
    /// Creation and retains that were not released.
    references: u32,
    /// Addresses it is mapped at.
    mappings: u32,
    pub(crate) traits: Traits,
}

/// What a handle was created to be good for.
#[derive(Clone, Copy)]
pub(crate) struct Traits {
    pub(crate) device: usize,
    pub(crate) is_rdma_capable: bool,
    /// `CUmemAllocationHandleType`: how other processes were to get it.
    pub(crate) handle_types: u32,
}

/// A handle at an address.
#[derive(Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) bytes: usize,
    pub(crate) handle: u64,
    /// Of each device.
    pub(crate) access: [Access; DEVICES_MAX],
}

/// Host memory the device knows.
#[derive(Clone, Copy)]
pub(crate) struct Pinned {
    pub(crate) bytes: usize,
    /// Whether it is ours to free, or the caller's, registered.
    pub(crate) is_ours: bool,
}

/// The device's memory.
pub(crate) struct Space {
    pub(crate) arena: Arena,
    backing: Backing,
    granularity: usize,
    total_bytes: usize,
    in_use_bytes: usize,
    /// The most that was ever in use.
    peak_bytes: usize,
    next_handle: u64,
    pub(crate) handles: BTreeMap<u64, Handle>,
    /// Bytes by first address, as those below.
    pub(crate) reservations: BTreeMap<usize, usize>,
    pub(crate) mappings: BTreeMap<usize, Mapping>,
    pub(crate) allocations: BTreeMap<usize, usize>,
    pub(crate) pinned: BTreeMap<usize, Pinned>,
}

/// The entry that `address` lies in, of those kept by first address.
pub(crate) fn around<T: Copy>(
    entries: &BTreeMap<usize, T>,
    address: usize,
    bytes: impl Fn(&T) -> usize,
) -> Option<(usize, T)> {
    let (start, entry) = entries.range(..=address).next_back()?;
    (address - start < bytes(entry)).then_some((*start, *entry))
}

impl Space {
    pub(crate) fn new(
        granularity: usize,
        total_bytes: usize,
        is_backed: bool,
    ) -> Result<Self, Code> {
        Ok(Self {
            arena: if is_backed { Arena::new()? } else { Arena::of_numbers() },
            backing: if is_backed { Backing::new()? } else { Backing::none() },
            granularity,
            total_bytes,
            in_use_bytes: 0,
            peak_bytes: 0,
            next_handle: 0x1000,
            handles: BTreeMap::new(),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            allocations: BTreeMap::new(),
            pinned: BTreeMap::new(),
        })
    }

    pub(crate) fn free_bytes(&self) -> usize {
        self.total_bytes - self.in_use_bytes
    }

    /// The most bytes that were in use at once: handles held or mapped, and allocations.
    pub(crate) fn peak_bytes(&self) -> usize {
        self.peak_bytes
    }

    /// Refuses what is not a positive number of granules.
    pub(crate) fn check_granules(&self, start: usize, bytes: usize) -> Result<(), Code> {
        let is_whole = start.is_multiple_of(self.granularity)
            && bytes.is_multiple_of(self.granularity)
            && bytes > 0
            && start.checked_add(bytes).is_some();
        if is_whole { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    fn take_bytes(&mut self, bytes: usize) -> Result<(), Code> {
        if bytes > self.free_bytes() {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.in_use_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.in_use_bytes);
        Ok(())
    }

    pub(crate) fn reserve(
        &mut self,
        bytes: usize,
        align: usize,
        hint: usize,
    ) -> Result<usize, Code> {
        self.check_granules(0, bytes)?;
        if align != 0 && !align.is_power_of_two() {
            return Err(Code::INVALID_VALUE);
        }
        let start = self.arena.take(bytes, align.max(self.granularity), hint)?;
        self.reservations.insert(start, bytes);
        Ok(start)
    }

    pub(crate) fn unreserve(&mut self, start: usize, bytes: usize) -> Result<(), Code> {
        let is_one = self.reservations.get(&start) == Some(&bytes);
        if !is_one || self.mappings.range(start..start + bytes).next().is_some() {
            return Err(Code::INVALID_VALUE);
        }
        self.reservations.remove(&start);
        self.arena.give(start);
        Ok(())
    }

    pub(crate) fn create(&mut self, bytes: usize, traits: Traits) -> Result<u64, Code> {
        self.check_granules(0, bytes)?;
        self.take_bytes(bytes)?;
        let place = self.backing.take(bytes)?;
        self.next_handle += 1;
        let handle = Handle { place, bytes, references: 1, mappings: 0, traits };
        self.handles.insert(self.next_handle, handle);
        Ok(self.next_handle)
    }

    /// A handle that its users still hold.
    fn held(&mut self, handle: u64) -> Result<&mut Handle, Code> {
        self.handles
            .get_mut(&handle)
            .filter(|known| known.references > 0)
            .ok_or(Code::INVALID_VALUE)
    }

    /// What a held handle was created to be good for.
    pub(crate) fn traits(&mut self, handle: u64) -> Result<Traits, Code> {
        self.held(handle).map(|known| known.traits)
    }

    pub(crate) fn release(&mut self, handle: u64) -> Result<(), Code> {
        self.held(handle)?.references -= 1;
        self.drop_unused(handle);
        Ok(())
    }

    /// The handle mapped at `address`, held once more.
    pub(crate) fn retain(&mut self, address: usize) -> Result<u64, Code> {
        let (_, mapping) = self.mapping_around(address).ok_or(Code::INVALID_VALUE)?;
        let handle = self.handles.get_mut(&mapping.handle).ok_or(Code::INVALID_VALUE)?;
        handle.references += 1;
        Ok(mapping.handle)
    }

    /// Gives the memory of a handle back that is neither held nor mapped.
    fn drop_unused(&mut self, handle: u64) {
        let is_unused = |known: &&Handle| known.references == 0 && known.mappings == 0;
        if let Some(known) = self.handles.get(&handle).filter(is_unused).copied() {
            self.handles.remove(&handle);
            self.backing.give(known.place, known.bytes);
            self.in_use_bytes -= known.bytes;
        }
    }

    pub(crate) fn map(&mut self, start: usize, bytes: usize, handle: u64) -> Result<(), Code> {
        self.check_granules(start, bytes)?;
        let place = match self.held(handle)? {
            known if known.bytes == bytes => known.place,
            _ => return Err(Code::INVALID_VALUE),
        };
        let (reserved, reserved_bytes) =
            around(&self.reservations, start, |bytes| *bytes).ok_or(Code::INVALID_VALUE)?;
        let is_taken = self.mapping_around(start).is_some()
            || self.mappings.range(start..start + bytes).next().is_some();
        if start + bytes > reserved + reserved_bytes || is_taken {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the range lies in a reservation, where nothing is mapped.
        unsafe { self.backing.map(start, bytes, place)? };
        self.held(handle)?.mappings += 1;
        self.mappings.insert(start, Mapping { bytes, handle, access: [Access::None; DEVICES_MAX] });
        Ok(())
    }

    pub(crate) fn unmap(&mut self, start: usize, bytes: usize) -> Result<(), Code> {
        let mut starts = self.whole_mappings(start, bytes)?;
        let first_bytes = self.mappings.get(&start).map_or(bytes, |mapping| mapping.bytes);
        let bytes = match runs::way() {
            Runs::Refused if starts.len() > 1 => return Err(Code::INVALID_VALUE),
            Runs::First => {
                starts.truncate(1);
                first_bytes
            }
            Runs::Whole | Runs::Refused => bytes,
        };
        // SAFETY: the range is whole mappings of the arena, and copies hold the lock for reading.
        unsafe { self.backing.clear(start, bytes, libc::PROT_NONE)? };
        for start in starts {
            let Some(mapping) = self.mappings.remove(&start) else { continue };
            if let Some(handle) = self.handles.get_mut(&mapping.handle) {
                handle.mappings -= 1;
            }
            self.drop_unused(mapping.handle);
        }
        Ok(())
    }

    pub(crate) fn set_access(
        &mut self,
        start: usize,
        bytes: usize,
        accesses: &[(usize, Access)],
    ) -> Result<(), Code> {
        let starts = self.whole_mappings(start, bytes)?;
        let mut changed = Vec::new();
        for start in starts {
            let mut access = self.mappings.get(&start).ok_or(Code::INVALID_VALUE)?.access;
            accesses.iter().for_each(|&(device, given)| access[device] = given);
            changed.push((start, access));
        }
        // The process cannot tell devices apart: its own protection is that of the one that may do most.
        let most = changed.iter().flat_map(|(_, access)| access).max();
        let protection = match most.unwrap_or(&Access::None) {
            Access::None => libc::PROT_NONE,
            Access::Read => libc::PROT_READ,
            Access::ReadWrite => system::READ_WRITE,
        };
        // SAFETY: the range is whole mappings of the arena, and copies hold the lock for reading.
        unsafe { self.backing.protect(start, bytes, protection)? };
        for (start, access) in changed {
            if let Some(mapping) = self.mappings.get_mut(&start) {
                mapping.access = access;
            }
        }
        Ok(())
    }

    /// Number of the mappings that begin in the range.
    pub(crate) fn count_mappings(&self, start: usize, bytes: usize) -> usize {
        self.mappings.range(start..start.saturating_add(bytes)).count()
    }

    /// First addresses of the mappings that make the range up, without a gap.
    fn whole_mappings(&self, start: usize, bytes: usize) -> Result<Vec<usize>, Code> {
        self.check_granules(start, bytes)?;
        let mut reached = start;
        let mut starts = Vec::new();
        while reached < start + bytes {
            let mapping = self.mappings.get(&reached).ok_or(Code::INVALID_VALUE)?;
            starts.push(reached);
            reached += mapping.bytes;
        }
        if reached == start + bytes { Ok(starts) } else { Err(Code::INVALID_VALUE) }
    }

    pub(crate) fn mapping_around(&self, address: usize) -> Option<(usize, Mapping)> {
        around(&self.mappings, address, |mapping| mapping.bytes)
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<usize, Code> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let page = system::page_bytes();
        let rounded = bytes.checked_next_multiple_of(page).ok_or(Code::OUT_OF_MEMORY)?;
        self.take_bytes(rounded)?;
        // An unmapped page follows: a copy that overruns faults there.
        let placed = self.arena.take(rounded + page, page, 0).and_then(|start| {
            // SAFETY: the place was free, so nothing there is wanted.
            match unsafe { self.backing.clear(start, rounded, system::READ_WRITE) } {
                Ok(()) => Ok(start),
                Err(code) => {
                    self.arena.give(start);
                    Err(code)
                }
            }
        });
        match placed {
            Ok(start) => {
                self.allocations.insert(start, bytes);
            }
            Err(_) => self.in_use_bytes -= rounded,
        }
        placed
    }

    pub(crate) fn free(&mut self, start: usize) -> Result<(), Code> {
        let bytes = *self.allocations.get(&start).ok_or(Code::INVALID_VALUE)?;
        let rounded = bytes.next_multiple_of(system::page_bytes());
        // SAFETY: the range is an allocation of the arena, and copies hold the lock for reading.
        unsafe { self.backing.clear(start, rounded, libc::PROT_NONE)? };
        self.allocations.remove(&start);
        self.arena.give(start);
        self.in_use_bytes -= rounded;
        Ok(())
    }

    /// Whether a device may use all of a range of the arena that way now. Never where nothing is.
    pub(crate) fn is_accessible(
        &self,
        device: usize,
        start: usize,
        bytes: usize,
        access: Access,
    ) -> bool {
        let Some(end) = start.checked_add(bytes).filter(|_| self.backing.is_there()) else {
            return false;
        };
        if let Some((first, allocated)) = around(&self.allocations, start, |bytes| *bytes) {
            return end <= first + allocated;
        }
        let mut reached = start;
        while reached < end {
            match self.mapping_around(reached) {
                Some((first, mapping)) if mapping.access[device] >= access => {
                    reached = first + mapping.bytes;
                }
                _ => return false,
            }
        }
        true
    }

    /// Whether all of a range of host memory is known to the device.
    pub(crate) fn is_pinned(&self, start: usize, bytes: usize) -> bool {
        around(&self.pinned, start, |pinned| pinned.bytes)
            .is_some_and(|(first, pinned)| bytes <= pinned.bytes - (start - first))
    }
}
