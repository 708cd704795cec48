//! Kernels: loaded images, their functions, and launches.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use super::entries::{Handle, check, read};
use super::space::Space;
use super::{CudaDevice, Stream};
use crate::{AddressRange, DeviceError, Operation};

/// Limit of the parameters of a kernel.
const PARAMETERS_MAX: usize = 32;

/// Loaded kernels, by the address of the list of images and the name.
pub(super) type Kernels = HashMap<(usize, &'static CStr), Function>;

/// A loaded image.
#[derive(Debug)]
struct Module {
    handle: Handle,
    space: Arc<Space>,
}

/// A loaded kernel.
#[derive(Clone, Debug)]
pub struct Function {
    handle: Handle,
    /// Keeps its code loaded.
    module: Arc<Module>,
}

const OPERATION: Operation = Operation::Launch;

impl CudaDevice {
    /// Returns the kernel `name` of the first of `images` that the driver accepts (machine code for this
    /// GPU, or code that the driver translates), and loads it at the first call.
    ///
    /// # Errors
    /// `Refused`, of the last image, if none has code for this GPU and driver, or the accepted one no kernel
    /// of this name; `DeviceLost`.
    pub fn kernel(
        &self,
        images: &'static [&'static [u8]],
        name: &'static CStr,
    ) -> Result<Function, DeviceError> {
        let key = (images.as_ptr() as usize, name);
        let mut kernels = self.kernels.lock();
        if let Some(kernel) = kernels.get(&key) {
            return Ok(kernel.clone());
        }
        let loaded = kernels.iter().find(|((of, _), _)| *of == key.0);
        let module = match loaded {
            Some((_, kernel)) => Arc::clone(&kernel.module),
            None => Arc::new(Module::load_first(&self.space, images)?),
        };
        let kernel = module.function(name)?;
        kernels.insert(key, kernel.clone());
        Ok(kernel)
    }

    /// Queues `blocks` blocks of `threads` threads of a kernel, both in one dimension.
    ///
    /// # Errors
    /// `Refused`, also for a shape that the GPU does not support; `DeviceLost`. Nothing is queued.
    ///
    /// # Safety
    /// `parameters` point to the values of the kernel's parameters, in order and of their types;
    /// the memory they name is valid until the stream has passed the kernel.
    pub unsafe fn launch(
        &self,
        function: &Function,
        blocks: u32,
        threads: u32,
        parameters: &[*const c_void],
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        debug_assert!(parameters.len() <= PARAMETERS_MAX, "{} parameters", parameters.len());
        let mut pointers = [std::ptr::null_mut(); PARAMETERS_MAX];
        for (place, parameter) in pointers.iter_mut().zip(parameters) {
            *place = parameter.cast_mut();
        }
        let launch = self.space.context.entries.launch_kernel;
        let (handle, pointers) = (function.handle, pointers.as_mut_ptr());
        let none = std::ptr::null_mut();
        self.space.queue(stream, OPERATION, AddressRange::default(), || {
            // SAFETY: the caller's; `function` keeps its module loaded, and the driver copies the values
            // before it returns.
            check(unsafe {
                launch(handle, blocks, 1, 1, threads, 1, 1, 0, stream.handle(), pointers, none)
            })
        })
    }
}

impl Module {
    /// Loads the first image that the driver accepts.
    fn load_first(
        space: &Arc<Space>,
        images: &'static [&'static [u8]],
    ) -> Result<Self, DeviceError> {
        let mut refused = None;
        for image in images {
            match Self::load(space, image) {
                Err(error @ DeviceError::Refused { .. }) => refused = Some(error),
                other => return other,
            }
        }
        let accepted = "at least one image";
        Err(refused.unwrap_or(DeviceError::BadConfig { field: "images", seen: 0, accepted }))
    }

    fn load(space: &Arc<Space>, image: &'static [u8]) -> Result<Self, DeviceError> {
        let range = AddressRange::new(0, image.len());
        let handle = space.context.call(OPERATION, range, |entries| {
            // SAFETY: it writes one handle, and reads an image that contains its own length.
            read(|handle| unsafe { (entries.module_load)(handle, image.as_ptr().cast()) })
        })?;
        Ok(Self { handle, space: Arc::clone(space) })
    }

    fn function(self: &Arc<Self>, name: &CStr) -> Result<Function, DeviceError> {
        let handle = self.space.context.call(OPERATION, AddressRange::default(), |entries| {
            // SAFETY: it writes one handle and reads a NUL-terminated name.
            read(|handle| unsafe { (entries.module_function)(handle, self.handle, name.as_ptr()) })
        })?;
        Ok(Function { handle, module: Arc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_gpu) = self.space.context.enter(OPERATION) {
            // It fails only if the driver is gone, and the module with it.
            // SAFETY: loaded by us; no function of it exists.
            unsafe { (self.space.context.entries.module_unload)(self.handle) };
        }
    }
}
