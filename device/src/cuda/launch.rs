//! Kernels: an image loaded into the context, its functions, and launches of them.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use super::entries::{Handle, check};
use super::space::Space;
use super::{CudaDevice, Stream};
use crate::{AddressRange, DeviceError, Operation};

/// Limit of the parameters of a kernel.
pub const PARAMETERS_MAX: usize = 32;

/// Loaded kernels, by the address of the image and the name.
pub(super) type Kernels = HashMap<(usize, &'static CStr), Function>;

/// A loaded image. Its functions keep it loaded.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    handle: Handle,
    space: Arc<Space>,
}

/// One kernel of a module.
#[derive(Clone, Debug)]
pub struct Function {
    handle: Handle,
    /// Keeps its code loaded.
    module: Module,
}

/// Grid and block dimensions of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

const OPERATION: Operation = Operation::Launch;

impl CudaDevice {
    /// Returns the kernel `name` of `image`, and loads it at the first call.
    ///
    /// # Errors
    /// As [`CudaDevice::load_module`] and [`Module::function`].
    pub fn kernel(
        &self,
        image: &'static [u8],
        name: &'static CStr,
    ) -> Result<Function, DeviceError> {
        let key = (image.as_ptr() as usize, name);
        let mut kernels = self.kernels.lock();
        if let Some(kernel) = kernels.get(&key) {
            return Ok(kernel.clone());
        }
        let loaded = kernels.iter().find(|((of, _), _)| *of == key.0);
        let module = match loaded {
            Some((_, kernel)) => kernel.module.clone(),
            None => self.load_module(image)?,
        };
        let kernel = module.function(name)?;
        kernels.insert(key, kernel.clone());
        Ok(kernel)
    }

    /// Loads an image: machine code for this GPU, or code that the driver translates.
    ///
    /// # Errors
    /// `Refused` for an image that has nothing for this GPU; `DeviceLost`.
    pub fn load_module(&self, image: &'static [u8]) -> Result<Module, DeviceError> {
        let context = &self.space.context;
        let _gpu = context.enter(OPERATION)?;
        let mut handle = 0;
        // SAFETY: it writes one handle, and reads an image that says its own length.
        check(unsafe { (context.entries.module_load)(&raw mut handle, image.as_ptr().cast()) })
            .map_err(|code| context.error(code, OPERATION, AddressRange::new(0, image.len())))?;
        Ok(Module(Arc::new(Loaded { handle, space: Arc::clone(&self.space) })))
    }

    /// Queues a kernel.
    ///
    /// # Errors
    /// `Refused`, for a shape the GPU has not too; `DeviceLost`. Nothing was queued then.
    ///
    /// # Safety
    /// `parameters` point to the values of the kernel's parameters, in order and of their types;
    /// what these point to is valid for the kernel until the stream has passed it.
    pub unsafe fn launch(
        &self,
        function: &Function,
        shape: &LaunchShape,
        parameters: &[*const c_void],
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        debug_assert!(parameters.len() <= PARAMETERS_MAX, "{} parameters", parameters.len());
        let mut pointers = [std::ptr::null_mut(); PARAMETERS_MAX];
        for (place, parameter) in pointers.iter_mut().zip(parameters) {
            *place = parameter.cast_mut();
        }
        let [grid_x, grid_y, grid_z] = shape.grid;
        let [block_x, block_y, block_z] = shape.block;
        self.space.queue(stream, OPERATION, AddressRange::default(), || {
            // SAFETY: the caller's; the function's module is loaded as long as `function` lives,
            // and the driver copies the values before it returns.
            check(unsafe {
                (self.space.context.entries.launch_kernel)(
                    function.handle,
                    grid_x,
                    grid_y,
                    grid_z,
                    block_x,
                    block_y,
                    block_z,
                    shape.shared_bytes,
                    stream.handle(),
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            })
        })
    }
}

impl Module {
    /// The kernel `name`.
    ///
    /// # Errors
    /// `Refused` where the image has none of that name.
    pub fn function(&self, name: &CStr) -> Result<Function, DeviceError> {
        let context = &self.0.space.context;
        let _gpu = context.enter(OPERATION)?;
        let mut handle = 0;
        // SAFETY: it writes one handle and reads a NUL-terminated name.
        check(unsafe {
            (context.entries.module_function)(&raw mut handle, self.0.handle, name.as_ptr())
        })
        .map_err(|code| context.error(code, OPERATION, AddressRange::default()))?;
        Ok(Function { handle, module: self.clone() })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(_gpu) = self.space.context.enter(OPERATION) {
            // Fails only where the driver is gone, and the module with it.
            // SAFETY: loaded by us; its functions are gone.
            unsafe { (self.space.context.entries.module_unload)(self.handle) };
        }
    }
}
