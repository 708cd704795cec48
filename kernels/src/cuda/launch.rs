//! Launches of the kernels: checked like the CPU versions.

use super::Kernel;
use crate::check::{self, InPlace};
use crate::{DType, KernelError, MergeArgs};

/// Parameters of the kernel with the most of them, `merge_lse`.
const PARAMETERS_MAX: usize = 10;

// The driver reads a four-byte parameter from the start of its value.
const _: () = assert!(cfg!(target_endian = "little"));

/// A checked call of a kernel. Running it is safe if its addresses are memory of the device, as large
/// as its counts require.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel, which determines the threads of a block.
    pub kernel: Kernel,
    /// Number of blocks, in one dimension.
    pub blocks: u32,
    /// The values of its parameters, in order; the rest is 0.
    pub parameters: [u64; PARAMETERS_MAX],
}

impl Launch {
    /// Adds `elems` elements of `dtype` at `src_address` to those of type [`DType::accumulator`] at
    /// `dst_address`. `None` if there are no elements.
    ///
    /// # Errors
    /// As [`crate::cpu::accumulate`].
    pub fn accumulate(
        dst_address: usize,
        src_address: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<Option<Self>, KernelError> {
        check::accumulate(dst_address, src_address, elems, dtype)?;
        let elems = elems as u64;
        let parameters = [dst_address as u64, src_address as u64, elems, 0, 0, 0, 0, 0, 0, 0];
        Ok(Self::new(Kernel::accumulate(dtype), elems, parameters))
    }

    /// Merges two partial attention outputs. `None` if there are no rows.
    ///
    /// # Errors
    /// As [`crate::cpu::merge_lse`], except that `out` may be at the address of either part's output,
    /// and `lse` at that of either part's log-sum-exps.
    pub fn merge_lse(args: &MergeArgs) -> Result<Option<Self>, KernelError> {
        let rows = check::merge(args, InPlace::Accepted)?.rows as u64;
        let inputs = [args.out1, args.lse1, args.out2, args.lse2].map(|input| input.addr() as u64);
        let [out1, lse1, out2, lse2] = inputs;
        let (out, lse) = (args.out.addr() as u64, args.lse.addr() as u64);
        let (base, empty) = (args.base as u64, args.empty as u64);
        let parameters = [out1, lse1, out2, lse2, out, lse, rows, args.head_dim, base, empty];
        Ok(Self::new(Kernel::merge(args.dtype), rows, parameters))
    }

    /// `None` for no items: the driver refuses a grid without blocks.
    fn new(kernel: Kernel, items: u64, parameters: [u64; PARAMETERS_MAX]) -> Option<Self> {
        (items > 0).then(|| Self { kernel, blocks: kernel.grid_for(items), parameters })
    }
}
