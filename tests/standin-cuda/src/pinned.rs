//! Host memory the device knows: allocated here, or registered.

use std::ffi::c_uint;

use cudarc::driver::sys;

use crate::capture;
use crate::code::Code;
use crate::entry::{Out, entry};
use crate::space::Pinned;
use crate::state::driver;
use crate::system;

/// Portable, mapped for the device, write-combined.
const ALLOCATE_FLAGS: c_uint = 7;
const REGISTER_FLAGS: c_uint = sys::CU_MEMHOSTREGISTER_PORTABLE
    | sys::CU_MEMHOSTREGISTER_DEVICEMAP
    | sys::CU_MEMHOSTREGISTER_IOMEMORY
    | sys::CU_MEMHOSTREGISTER_READ_ONLY;
/// What the device's attributes say it does not have.
const REGISTER_FLAGS_MISSING: c_uint =
    sys::CU_MEMHOSTREGISTER_IOMEMORY | sys::CU_MEMHOSTREGISTER_READ_ONLY;

entry! { Context, fn cuMemHostAlloc(address: Out<usize>, bytes: usize, flags: c_uint) {
    capture::refuse_unsafe()?;
    address.check()?;
    let page = system::page_bytes();
    let rounded = bytes.checked_next_multiple_of(page).ok_or(Code::OUT_OF_MEMORY)?;
    if bytes == 0 || flags & !ALLOCATE_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let start = system::map_anywhere(rounded, system::READ_WRITE)?;
    driver()?.memory_mut().pinned.insert(start, Pinned { bytes, is_ours: true });
    address.put(start)
}}

entry! { Context, fn cuMemFreeHost(address: usize) {
    capture::refuse_unsafe()?;
    let mut memory = driver()?.memory_mut();
    let known = memory.pinned.get(&address).filter(|pinned| pinned.is_ours).copied();
    let pinned = known.ok_or(Code::INVALID_VALUE)?;
    memory.pinned.remove(&address);
    // SAFETY: it was allocated above, and is freed once. Copies look for it under the lock that is
    // held here, so none uses it.
    unsafe { system::unmap(address, pinned.bytes.next_multiple_of(system::page_bytes())) };
    Ok(())
}}

entry! { Context, fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: c_uint) {
    capture::refuse_unsafe()?;
    let end = address.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
    if address == 0 || bytes == 0 || flags & !REGISTER_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    if flags & REGISTER_FLAGS_MISSING != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let mut memory = driver()?.memory_mut();
    if memory.arena.contains(address) || !system::is_mapped(address, bytes) {
        return Err(Code::INVALID_VALUE);
    }
    let before = memory.pinned.range(..end).next_back();
    if before.is_some_and(|(start, pinned)| start + pinned.bytes > address) {
        return Err(Code::ALREADY_REGISTERED);
    }
    memory.pinned.insert(address, Pinned { bytes, is_ours: false });
    Ok(())
}}

entry! { Context, fn cuMemHostUnregister(address: usize) {
    capture::refuse_unsafe()?;
    let mut memory = driver()?.memory_mut();
    match memory.pinned.get(&address) {
        None => Err(Code::NOT_REGISTERED),
        Some(pinned) if pinned.is_ours => Err(Code::INVALID_VALUE),
        Some(_) => {
            memory.pinned.remove(&address);
            Ok(())
        }
    }
}}

entry! { Context, fn cuMemHostGetDevicePointer_v2(
    device: Out<usize>,
    address: usize,
    flags: c_uint,
) {
    if flags != 0 || !driver()?.memory().is_pinned(address, 1) {
        return Err(Code::INVALID_VALUE);
    }
    // Addresses are unified: the device's is the host's.
    device.put(address)
}}
