//! Modules and kernels: any image has any kernel, and a launch is counted, not run.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUfunction_attribute_enum as Attribute;

use crate::capture;
use crate::code::Code;
use crate::entry::{In, Out, entry};
use crate::state::{Driver, check_not_lost, driver, lock, new_name};
use crate::streams;

const BLOCK_THREADS_MAX: u64 = 1024;
/// What a block may ask for at most.
const SHARED_BYTES_MAX: c_uint = 232_448;

/// Loaded modules and the functions asked of them.
#[derive(Default)]
pub(crate) struct Modules {
    /// Functions of each module.
    loaded: BTreeMap<usize, Vec<usize>>,
    functions: BTreeMap<usize, Arc<str>>,
}

/// Launches that a stream has reached, by kernel.
static LAUNCHES: Mutex<BTreeMap<Arc<str>, u64>> = Mutex::new(BTreeMap::new());

/// How many launches of `kernel` a stream has reached.
pub(crate) fn launches(kernel: &str) -> u64 {
    lock(&LAUNCHES).get(kernel).copied().unwrap_or(0)
}

fn function(driver: &Driver, function: usize) -> Result<Arc<str>, Code> {
    lock(&driver.modules).functions.get(&function).cloned().ok_or(Code::INVALID_HANDLE)
}

entry! { Context, fn cuModuleLoadData(module: Out<usize>, image: In<u8>) {
    capture::refuse_unsafe()?;
    module.check()?;
    if image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let handle = new_name();
    lock(&driver()?.modules).loaded.insert(handle, Vec::new());
    module.put(handle)
}}

entry! { Context, fn cuModuleUnload(module: usize) {
    capture::refuse_unsafe()?;
    let mut modules = lock(&driver()?.modules);
    for function in modules.loaded.remove(&module).ok_or(Code::INVALID_HANDLE)? {
        modules.functions.remove(&function);
    }
    Ok(())
}}

entry! { Context, fn cuModuleGetFunction(
    function: Out<usize>,
    module: usize,
    name: In<c_char>,
) {
    function.check()?;
    let name = name.text()?;
    let mut modules = lock(&driver()?.modules);
    let functions = modules.loaded.get_mut(&module).ok_or(Code::INVALID_HANDLE)?;
    if name.is_empty() {
        return Err(Code::NOT_FOUND);
    }
    let handle = new_name();
    functions.push(handle);
    modules.functions.insert(handle, name.into());
    function.put(handle)
}}

entry! { Context, fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, handle: usize) {
    function(driver()?, handle)?;
    let known = [
        (Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, BLOCK_THREADS_MAX as c_int),
        (Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS, 32),
        (Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION, 90),
        (Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION, 90),
    ];
    if !(0..Attribute::CU_FUNC_ATTRIBUTE_MAX as c_int).contains(&attribute) {
        return Err(Code::INVALID_VALUE);
    }
    let found = known.iter().find(|(known, _)| *known as c_int == attribute);
    value.put(found.map_or(0, |(_, value)| *value))
}}

entry! { Context, fn cuLaunchKernel(
    handle: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: usize,
    arguments: In<usize>,
    extra: In<usize>,
) {
    let driver = driver()?;
    let name = function(driver, handle)?;
    let stream = driver.streams.find(stream)?;
    let sides = [grid_x, grid_y, grid_z, block_x, block_y, block_z];
    let threads = [block_x, block_y, block_z].iter().fold(1, |threads: u64, side| {
        threads.saturating_mul(u64::from(*side))
    });
    if sides.contains(&0)
        || threads > BLOCK_THREADS_MAX
        || shared_bytes > SHARED_BYTES_MAX
        || (!arguments.is_null() && !extra.is_null())
    {
        return Err(Code::INVALID_VALUE);
    }
    streams::give(driver, &stream, move || {
        if check_not_lost().is_ok() {
            *lock(&LAUNCHES).entry(name.clone()).or_default() += 1;
        }
    })
}}
