//! What a device says about itself.

use std::ffi::{c_char, c_int};

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;

use crate::code::Code;
use crate::entry::{Out, entry};
use crate::state::driver;

/// Limit of the devices.
pub(crate) const DEVICES_MAX: usize = 8;
/// The name of every device, with its zero.
const NAME: &std::ffi::CStr = c"dormouse stand-in";
/// The driver version: a runtime of CUDA 13 takes none before 13.0.
const DRIVER_VERSION: c_int = 13_000;
/// The first device's, and nothing like it elsewhere. The last byte of others is higher.
const UUID: [u8; 16] = *b"dormouse-standin";
/// The first number that names no attribute in that version.
const ATTRIBUTES_END: c_int = 148;

/// Attributes that are not zero: an H100's figures where the device has none of its own.
const ATTRIBUTES: &[(Attribute, c_int)] = &[
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, c_int::MAX),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65_535),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65_535),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49_152),
    (Attribute::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65_536),
    (Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH, c_int::MAX),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65_536),
    (Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_980_000),
    (Attribute::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512),
    (Attribute::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132),
    (Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512),
    (Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2_619_000),
    (Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5_120),
    (Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2_048),
    (Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3),
    (Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32),
    (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
    (Attribute::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233_472),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65_536),
    (Attribute::CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2),
    (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232_448),
    (Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32),
    (Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1_024),
    (Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1),
];

/// The number of a device that exists.
pub(crate) fn check_device(device: c_int) -> Result<usize, Code> {
    let devices = driver()?.devices;
    usize::try_from(device).ok().filter(|it| *it < devices).ok_or(Code::INVALID_DEVICE)
}

entry! { Nothing, fn cuDriverGetVersion(version: Out<c_int>) {
    version.put(DRIVER_VERSION)
}}

entry! { Init, fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
    check_device(ordinal)?;
    device.put(ordinal)
}}

entry! { Init, fn cuDeviceGetCount(count: Out<c_int>) {
    count.put(driver()?.devices as c_int)
}}

entry! { Init, fn cuDeviceGetName(name: Out<c_char>, bytes: c_int, device: c_int) {
    check_device(device)?;
    name.check()?;
    let room = usize::try_from(bytes).unwrap_or(0).checked_sub(1).ok_or(Code::INVALID_VALUE)?;
    let text = NAME.to_bytes();
    let shown = &text[..text.len().min(room)];
    for (place, byte) in shown.iter().enumerate() {
        name.at(place).put(*byte as c_char)?;
    }
    name.at(shown.len()).put(0)
}}

entry! { Init, fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) {
    let mut own = UUID;
    own[UUID.len() - 1] += check_device(device)? as u8;
    uuid.put(own)
}}

entry! { Init, fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) {
    check_device(device)?;
    if !(1..ATTRIBUTES_END).contains(&attribute) {
        return Err(Code::INVALID_VALUE);
    }
    let known = ATTRIBUTES.iter().find(|(known, _)| *known as c_int == attribute);
    value.put(known.map_or(0, |(_, value)| *value))
}}

entry! { Init, fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
    check_device(device)?;
    bytes.put(driver()?.total_bytes)
}}

entry! { Init, fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
    check_device(device)?;
    check_device(peer)?;
    // A device is no peer of itself.
    can.put(c_int::from(device != peer))
}}
