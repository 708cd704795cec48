//! What an address is.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::CUmemorytype_enum as MemoryType;

use crate::code::Code;
use crate::context;
use crate::entry::{In, Out, entry};
use crate::space::{Space, around};
use crate::state::driver;

/// `CU_DEVICE_INVALID`: the ordinal of memory that is no device's.
const NO_DEVICE: c_int = -2;

const TYPE_HOST: c_int = MemoryType::CU_MEMORYTYPE_HOST as c_int;
const TYPE_DEVICE: c_int = MemoryType::CU_MEMORYTYPE_DEVICE as c_int;

/// The attributes that are answered. `BUFFER_ID` is not: addresses are all that tells ranges apart.
mod attribute {
    use std::ffi::c_int;

    use cudarc::driver::sys::CUpointer_attribute_enum as Attribute;

    macro_rules! numbers {
        ($($name:ident = $attribute:ident;)*) => {
            $(pub(super) const $name: c_int = Attribute::$attribute as c_int;)*
        };
    }

    numbers! {
        CONTEXT = CU_POINTER_ATTRIBUTE_CONTEXT;
        MEMORY_TYPE = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        DEVICE_POINTER = CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
        HOST_POINTER = CU_POINTER_ATTRIBUTE_HOST_POINTER;
        SYNC_MEMOPS = CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
        IS_MANAGED = CU_POINTER_ATTRIBUTE_IS_MANAGED;
        DEVICE_ORDINAL = CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        IS_LEGACY_IPC = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        RANGE_START = CU_POINTER_ATTRIBUTE_RANGE_START_ADDR;
        RANGE_SIZE = CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        MAPPED = CU_POINTER_ATTRIBUTE_MAPPED;
        HANDLE_TYPES = CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES;
        IS_RDMA_CAPABLE = CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE;
        POOL = CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
    }
}

/// A range the driver knows.
#[derive(Clone, Copy)]
struct Found {
    kind: Kind,
    start: usize,
    bytes: usize,
    is_mapped: bool,
    is_rdma_capable: bool,
    handle_types: u32,
    device: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Allocated,
    Reserved,
    Pinned,
}

/// A value and the type it is left as.
enum Value {
    Int(c_int),
    Word(u64),
}

impl Value {
    fn put(self, place: Out<u8>) -> Result<(), Code> {
        match self {
            Self::Int(value) => place.cast().put(value),
            Self::Word(value) => place.cast().put(value),
        }
    }
}

fn find(memory: &Space, address: usize) -> Option<Found> {
    let whole = |kind, start, bytes| Found {
        kind,
        start,
        bytes,
        is_mapped: true,
        is_rdma_capable: kind == Kind::Allocated,
        handle_types: 0,
        device: 0,
    };
    if let Some((start, bytes)) = around(&memory.allocations, address, |bytes| *bytes) {
        return Some(whole(Kind::Allocated, start, bytes));
    }
    if let Some((start, pinned)) = around(&memory.pinned, address, |pinned| pinned.bytes) {
        return Some(whole(Kind::Pinned, start, pinned.bytes));
    }
    let (start, bytes) = around(&memory.reservations, address, |bytes| *bytes)?;
    let mapping = memory.mapping_around(address);
    let handle = mapping.and_then(|(_, mapping)| memory.handles.get(&mapping.handle));
    Some(Found {
        kind: Kind::Reserved,
        start,
        bytes,
        is_mapped: mapping.is_some(),
        is_rdma_capable: handle.is_some_and(|handle| handle.traits.is_rdma_capable),
        handle_types: handle.map_or(0, |handle| handle.traits.handle_types),
        device: handle.map_or(0, |handle| handle.traits.device),
    })
}

/// One attribute of a known range.
fn value(found: &Found, attribute: c_int, address: usize) -> Result<Value, Code> {
    let is_device = found.kind != Kind::Pinned;
    let flag = |is: bool| Ok(Value::Int(c_int::from(is)));
    let word = |value: usize| Ok(Value::Word(value as u64));
    match attribute {
        // Memory of `cuMemCreate` belongs to no context.
        attribute::CONTEXT if found.kind == Kind::Reserved => word(0),
        attribute::CONTEXT => word(context::handle(found.device)),
        attribute::MEMORY_TYPE if is_device => Ok(Value::Int(TYPE_DEVICE)),
        attribute::MEMORY_TYPE => Ok(Value::Int(TYPE_HOST)),
        attribute::DEVICE_POINTER => word(address),
        attribute::HOST_POINTER if !is_device => word(address),
        attribute::SYNC_MEMOPS | attribute::IS_MANAGED | attribute::IS_LEGACY_IPC => flag(false),
        attribute::DEVICE_ORDINAL => Ok(Value::Int(found.device as c_int)),
        attribute::RANGE_START => word(found.start),
        attribute::RANGE_SIZE => word(found.bytes),
        attribute::MAPPED => flag(found.is_mapped),
        attribute::HANDLE_TYPES => word(found.handle_types as usize),
        attribute::POOL => word(0),
        attribute::IS_RDMA_CAPABLE => flag(found.is_rdma_capable),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// What `cuPointerGetAttributes` leaves where there is no value.
fn value_of_nothing(attribute: c_int) -> Result<Value, Code> {
    match attribute {
        attribute::DEVICE_ORDINAL => Ok(Value::Int(NO_DEVICE)),
        attribute::MEMORY_TYPE
        | attribute::SYNC_MEMOPS
        | attribute::IS_MANAGED
        | attribute::IS_LEGACY_IPC
        | attribute::MAPPED
        | attribute::IS_RDMA_CAPABLE => Ok(Value::Int(0)),
        attribute::CONTEXT
        | attribute::DEVICE_POINTER
        | attribute::HOST_POINTER
        | attribute::RANGE_START
        | attribute::RANGE_SIZE
        | attribute::HANDLE_TYPES
        | attribute::POOL => Ok(Value::Word(0)),
        _ => Err(Code::INVALID_VALUE),
    }
}

entry! { Init, fn cuPointerGetAttribute(place: Out<u8>, attribute: c_int, address: usize) {
    place.check()?;
    let found = find(&driver()?.memory(), address).ok_or(Code::INVALID_VALUE)?;
    value(&found, attribute, address)?.put(place)
}}

entry! { Init, fn cuPointerGetAttributes(
    count: c_uint,
    attributes: In<c_int>,
    places: In<Out<u8>>,
    address: usize,
) {
    if count == 0 || attributes.is_null() || places.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let found = find(&driver()?.memory(), address);
    for index in 0..count as usize {
        let attribute = attributes.get_at(index)?;
        let known = found.as_ref().map_or_else(
            || value_of_nothing(attribute),
            // A known range that lacks one of the attributes leaves nothing there.
            |found| value(found, attribute, address).or_else(|_| value_of_nothing(attribute)),
        )?;
        known.put(places.get_at(index)?)?;
    }
    Ok(())
}}

entry! { Context, fn cuMemGetAddressRange_v2(
    base: Out<usize>,
    size: Out<usize>,
    address: usize,
) {
    let memory = driver()?.memory();
    // What is mapped is a range of its own, wherever in a reservation it lies.
    let mapping = memory.mapping_around(address).map(|(start, mapping)| (start, mapping.bytes));
    let range = mapping.or_else(|| around(&memory.allocations, address, |bytes| *bytes));
    let (start, bytes) = range.ok_or(Code::NOT_FOUND)?;
    base.put_if_asked(start);
    size.put_if_asked(bytes);
    Ok(())
}}
