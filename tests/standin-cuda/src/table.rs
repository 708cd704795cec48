//! The entry points by name: for faults, counts and `cuGetProcAddress`.

use std::ffi::{c_char, c_int, c_void};

use cudarc::driver::sys::CUdriverProcAddressQueryResult as Found;

use crate::code::Code;
use crate::entry::{In, Out, entry};

macro_rules! table {
    ($($module:ident: $($name:ident)*;)*) => {
        /// One entry point.
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "the driver's names")]
        pub(crate) enum Entry { $($($name,)*)* }

        /// Names, in the order of [`Entry`].
        pub(crate) const NAMES: &[&str] = &[$($(stringify!($name),)*)*];

        const ENTRIES: &[Entry] = &[$($(Entry::$name,)*)*];

        fn address(entry: Entry) -> *const c_void {
            match entry { $($(Entry::$name => crate::$module::$name as *const c_void,)*)* }
        }
    };
}

table! {
    code: cuGetErrorName cuGetErrorString;
    state: cuInit;
    table: cuGetProcAddress_v2;
    device_info: cuDriverGetVersion cuDeviceGet cuDeviceGetCount cuDeviceGetName
        cuDeviceGetUuid_v2 cuDeviceGetAttribute cuDeviceTotalMem_v2 cuDeviceCanAccessPeer;
    context: cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxGetState
        cuCtxGetCurrent cuCtxSetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetDevice
        cuCtxSynchronize cuCtxGetStreamPriorityRange;
    memory: cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2;
    pinned: cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
        cuMemHostGetDevicePointer_v2;
    pointers: cuPointerGetAttribute cuPointerGetAttributes cuMemGetAddressRange_v2;
    vmm: cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease cuMemMap cuMemUnmap
        cuMemSetAccess cuMemGetAccess cuMemGetAllocationGranularity cuMemRetainAllocationHandle
        cuMemGetAllocationPropertiesFromHandle cuMemExportToShareableHandle
        cuMemImportFromShareableHandle;
    copies: cuMemcpy cuMemcpyAsync cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuMemcpyHtoDAsync_v2
        cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemsetD8_v2 cuMemsetD8Async cuMemsetD32Async
        cuStreamWriteValue32_v2;
    streams: cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamQuery
        cuStreamSynchronize cuStreamWaitEvent cuStreamGetCtx cuStreamGetPriority cuStreamGetFlags
        cuStreamGetId cuLaunchHostFunc;
    capture: cuStreamIsCapturing cuStreamGetCaptureInfo_v2 cuStreamBeginCapture_v2
        cuStreamEndCapture cuThreadExchangeStreamCaptureMode;
    graphs: cuGraphGetNodes cuGraphInstantiateWithFlags cuGraphLaunch cuGraphDestroy
        cuGraphExecDestroy;
    events: cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventRecordWithFlags cuEventQuery
        cuEventSynchronize cuEventElapsedTime cuEventElapsedTime_v2;
    modules: cuModuleLoadData cuModuleUnload cuModuleGetFunction cuFuncGetAttribute cuLaunchKernel;
}

/// The entry point of that exact name.
pub(crate) fn find(name: &str) -> Option<Entry> {
    NAMES.iter().zip(ENTRIES).find(|(known, _)| **known == name).map(|(_, entry)| *entry)
}

entry! { Nothing, fn cuGetProcAddress_v2(
    symbol: In<c_char>,
    function: Out<*const c_void>,
    _version: c_int,
    _flags: u64,
    status: Out<u32>,
) {
    let symbol = symbol.text()?;
    function.check()?;
    // Callers ask for the name without its version, and get the newest there is.
    let found = find(&format!("{symbol}_v2")).or_else(|| find(&symbol));
    let outcome = match found {
        Some(_) => Found::CU_GET_PROC_ADDRESS_SUCCESS,
        None => Found::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND,
    };
    status.put_if_asked(outcome as u32);
    function.put(found.map_or(std::ptr::null(), address))?;
    found.map(|_| ()).ok_or(Code::NOT_FOUND)
}}
