//! The driver's mapping calls, each timed apart: one handle at a time, and a run of them at once.

use std::time::Instant;

use crate::plain::Plain;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const PINNED: i32 = 1;
const DEVICE: i32 = 1;
const READ_WRITE: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: i32,
    ordinal: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: i32,
    handle_types: i32,
    location: Location,
    windows_metadata: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: i32,
}

const GPU: Location = Location { kind: DEVICE, ordinal: 0 };

/// What is timed. `AccessRun` and `UnmapRun` take all handles of a batch in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Create,
    Map,
    Access,
    Unmap,
    Release,
    AccessRun,
    UnmapRun,
}

impl Call {
    pub(crate) const ALL: [(Self, &'static str); 7] = [
        (Self::Create, "create"),
        (Self::Map, "map"),
        (Self::Access, "access"),
        (Self::Unmap, "unmap"),
        (Self::Release, "release"),
        (Self::AccessRun, "access_run"),
        (Self::UnmapRun, "unmap_run"),
    ];
}

/// Microseconds per call, by [`Call`].
pub(crate) type Samples = [Vec<f64>; Call::ALL.len()];

type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> i32;
type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> i32;
type SetAccess = unsafe extern "C" fn(u64, usize, *const Access, usize) -> i32;
type Unmap = unsafe extern "C" fn(u64, usize) -> i32;
type Release = unsafe extern "C" fn(u64) -> i32;
type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> i32;

/// The calls, looked up once, and addresses for a batch.
pub(crate) struct Calls {
    create: Create,
    map: Map,
    set_access: SetAccess,
    unmap: Unmap,
    release: Release,
    free: Unmap,
    start: u64,
    bytes: usize,
}

impl Calls {
    /// Reserves `bytes` of addresses.
    pub(crate) fn new(plain: &Plain, bytes: usize) -> Self {
        let mut start = 0;
        // SAFETY: the entry points' types; reserving writes one address.
        unsafe {
            let reserve: Reserve = plain.entry(c"cuMemAddressReserve");
            assert_eq!(reserve(&raw mut start, bytes, 0, 0, 0), 0, "{bytes} bytes of addresses");
            Self {
                create: plain.entry(c"cuMemCreate"),
                map: plain.entry(c"cuMemMap"),
                set_access: plain.entry(c"cuMemSetAccess"),
                unmap: plain.entry(c"cuMemUnmap"),
                release: plain.entry(c"cuMemRelease"),
                free: plain.entry(c"cuMemAddressFree"),
                start,
                bytes,
            }
        }
    }

    /// Maps the reserved bytes in handles of `page_bytes` and takes them away again; adds what each call
    /// took. `in_runs`: access and unmapping of all handles in one call.
    ///
    /// # Panics
    /// If the driver refuses a call.
    pub(crate) fn batch(&self, page_bytes: usize, in_runs: bool, samples: &mut Samples) {
        let count = self.bytes / page_bytes;
        let at = |index: usize| self.start + (index * page_bytes) as u64;
        let mut timed = |call: Call, work: &mut dyn FnMut() -> i32| {
            let start = Instant::now();
            let code = work();
            samples[call as usize].push(start.elapsed().as_secs_f64() * 1e6);
            assert_eq!(code, 0, "{call:?} of a handle of {page_bytes} bytes");
        };
        let properties = Properties {
            kind: PINNED,
            handle_types: 0,
            location: GPU,
            windows_metadata: 0,
            flags: [0; 8],
        };
        let access = Access { location: GPU, flags: READ_WRITE };
        let mut handles = vec![0; count];
        for handle in &mut handles {
            // SAFETY: it writes one handle and reads the properties.
            timed(Call::Create, &mut || unsafe {
                (self.create)(handle, page_bytes, &properties, 0)
            });
        }
        for (index, handle) in handles.iter().enumerate() {
            // SAFETY: addresses of ours, at which nothing is mapped.
            timed(Call::Map, &mut || unsafe { (self.map)(at(index), page_bytes, 0, *handle, 0) });
        }
        if in_runs {
            // SAFETY: all of the range is mapped; nobody uses it.
            timed(Call::AccessRun, &mut || unsafe {
                (self.set_access)(self.start, count * page_bytes, &access, 1)
            });
            // SAFETY: as above.
            timed(Call::UnmapRun, &mut || unsafe { (self.unmap)(self.start, count * page_bytes) });
        } else {
            for index in 0..count {
                // SAFETY: a mapped handle that nobody uses.
                timed(Call::Access, &mut || unsafe {
                    (self.set_access)(at(index), page_bytes, &access, 1)
                });
            }
            for index in 0..count {
                // SAFETY: as above.
                timed(Call::Unmap, &mut || unsafe { (self.unmap)(at(index), page_bytes) });
            }
        }
        for handle in handles {
            // SAFETY: a live handle that is mapped nowhere.
            timed(Call::Release, &mut || unsafe { (self.release)(handle) });
        }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        // SAFETY: addresses of ours, at which nothing is mapped.
        unsafe { (self.free)(self.start, self.bytes) };
    }
}

/// The layouts of the driver's header.
const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Access>() == 12);
