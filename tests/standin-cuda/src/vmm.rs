//! Reserving, creating, mapping: the driver's virtual memory calls.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys;

use crate::code::Code;
use crate::cost::Call;
use crate::device_info::check_device;
use crate::entry::{In, Out, entry};
use crate::space::{Access, Traits};
use crate::state::driver;

/// `CUmemLocation`, with numbers where a caller may leave any.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

/// `CUmemAllocationProp` likewise.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows: usize,
    compression: u8,
    is_rdma_capable: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc` likewise.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AccessDescription {
    location: Location,
    flags: c_uint,
}

const _: () = {
    assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());
    assert!(size_of::<AccessDescription>() == size_of::<sys::CUmemAccessDesc>());
};

const LOCATION_DEVICE: c_uint = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_uint;
const PINNED: c_uint = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as c_uint;
/// The one way to hand memory to another process that may be asked for.
const FILE_DESCRIPTOR: c_uint =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
const READ: c_uint = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ as c_uint;
const READ_WRITE: c_uint = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint;
/// The larger of `CUmemAllocationGranularity_flags`.
const GRANULARITY_RECOMMENDED: c_uint = 1;

impl Location {
    fn check(self) -> Result<usize, Code> {
        if self.kind != LOCATION_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        check_device(self.id)
    }
}

impl Properties {
    /// The device whose memory it is.
    fn check(&self) -> Result<usize, Code> {
        if self.kind != PINNED || self.usage != 0 || self.reserved != [0; 4] || self.windows != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if self.handle_types & !FILE_DESCRIPTOR != 0 || self.compression != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        self.location.check()
    }
}

/// No flags are defined for these calls.
fn check_no_flags(flags: u64) -> Result<(), Code> {
    if flags == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

entry! { Context, fn cuMemAddressReserve(
    address: Out<usize>,
    bytes: usize,
    align: usize,
    hint: usize,
    flags: u64,
) {
    check_no_flags(flags)?;
    address.check()?;
    address.put(driver()?.memory_mut().reserve(bytes, align, hint)?)
}}

entry! { Context, fn cuMemAddressFree(address: usize, bytes: usize) {
    driver()?.memory_mut().unreserve(address, bytes)
}}

entry! { Context, fn cuMemCreate(
    handle: Out<u64>,
    bytes: usize,
    properties: In<Properties>,
    flags: u64,
) {
    check_no_flags(flags)?;
    handle.check()?;
    let properties = properties.get()?;
    let traits = Traits {
        device: properties.check()?,
        is_rdma_capable: properties.is_rdma_capable != 0,
        handle_types: properties.handle_types,
    };
    let driver = driver()?;
    driver.costs.spin();
    driver.costs.charge(Call::Create, 1, bytes);
    handle.put(driver.memory_mut().create(bytes, traits)?)
}}

entry! { Context, fn cuMemRelease(handle: u64) {
    let driver = driver()?;
    driver.costs.spin();
    let bytes = driver.memory().handles.get(&handle).map_or(0, |handle| handle.bytes);
    driver.costs.charge(Call::Release, 1, bytes);
    driver.memory_mut().release(handle)
}}

entry! { Context, fn cuMemMap(
    address: usize,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) {
    check_no_flags(flags)?;
    if offset != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let driver = driver()?;
    driver.costs.spin();
    driver.costs.charge(Call::Map, 1, bytes);
    driver.memory_mut().map(address, bytes, handle)
}}

entry! { Context, fn cuMemUnmap(address: usize, bytes: usize) {
    let driver = driver()?;
    driver.costs.spin();
    let handles = driver.memory().count_mappings(address, bytes);
    driver.costs.charge(Call::Unmap, handles, bytes);
    driver.memory_mut().unmap(address, bytes)
}}

entry! { Context, fn cuMemSetAccess(
    address: usize,
    bytes: usize,
    descriptions: In<AccessDescription>,
    count: usize,
) {
    let mut accesses = Vec::new();
    for index in 0..count {
        let description = descriptions.get_at(index)?;
        let access = match description.flags {
            0 => Access::None,
            READ => Access::Read,
            READ_WRITE => Access::ReadWrite,
            _ => return Err(Code::INVALID_VALUE),
        };
        accesses.push((description.location.check()?, access));
    }
    if accesses.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    let driver = driver()?;
    let handles = driver.memory().count_mappings(address, bytes);
    driver.costs.charge(Call::SetAccess, handles, bytes);
    driver.memory_mut().set_access(address, bytes, &accesses)
}}

entry! { Context, fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: usize) {
    let device = location.get()?.check()?;
    let memory = driver()?.memory();
    let (_, mapping) = memory.mapping_around(address).ok_or(Code::INVALID_VALUE)?;
    flags.put(match mapping.access[device] {
        Access::None => 0,
        Access::Read => u64::from(READ),
        Access::ReadWrite => u64::from(READ_WRITE),
    })
}}

entry! { Init, fn cuMemGetAllocationGranularity(
    granularity: Out<usize>,
    properties: In<Properties>,
    option: c_uint,
) {
    properties.get()?.check()?;
    if option > GRANULARITY_RECOMMENDED {
        return Err(Code::INVALID_VALUE);
    }
    granularity.put(driver()?.granularity)
}}

entry! { Context, fn cuMemRetainAllocationHandle(handle: Out<u64>, address: usize) {
    handle.check()?;
    handle.put(driver()?.memory_mut().retain(address)?)
}}

entry! { Context, fn cuMemGetAllocationPropertiesFromHandle(
    properties: Out<Properties>,
    handle: u64,
) {
    properties.check()?;
    let traits = driver()?.memory_mut().traits(handle)?;
    properties.put(Properties {
        kind: PINNED,
        handle_types: traits.handle_types,
        location: Location { kind: LOCATION_DEVICE, id: traits.device as c_int },
        windows: 0,
        compression: 0,
        is_rdma_capable: u8::from(traits.is_rdma_capable),
        usage: 0,
        reserved: [0; 4],
    })
}}

// Memory may be asked for that other processes can have, as PyTorch does; none gets it.
entry! { Context, fn cuMemExportToShareableHandle(
    _shared: Out<u8>,
    _handle: u64,
    _kind: c_uint,
    _flags: u64,
) {
    Err(Code::NOT_SUPPORTED)
}}

entry! { Context, fn cuMemImportFromShareableHandle(
    _handle: Out<u64>,
    _shared: usize,
    _kind: c_uint,
) {
    Err(Code::NOT_SUPPORTED)
}}
