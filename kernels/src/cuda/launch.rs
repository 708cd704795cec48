//! One call of a kernel, checked as the CPU's is.

use super::{Arguments, Kernel};
use crate::check::{self, InPlace};
use crate::{AccumulateArgs, DType, KernelError, MergeArgs};

/// One call of a kernel. Running it is safe where the addresses it was made of are of memory as
/// large as its counts say, on the device it is launched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Which one.
    pub kernel: Kernel,
    /// Blocks, by dimension.
    pub grid: [u32; 3],
    /// Threads of a block, by dimension.
    pub block: [u32; 3],
    /// Bytes of shared memory beyond what the kernel has by itself.
    pub shared_bytes: u32,
    /// Its parameters.
    pub arguments: Arguments,
}

impl Launch {
    /// Adds `elems` elements at `src_address`, of type `dtype`, into those of type
    /// [`DType::accumulator`] at `dst_address`. `None` where there is nothing to add.
    ///
    /// # Errors
    /// As [`crate::cpu::accumulate`].
    pub fn accumulate(
        dst_address: usize,
        src_address: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<Option<Self>, KernelError> {
        let args = AccumulateArgs {
            accumulator: std::ptr::without_provenance_mut(dst_address),
            source: std::ptr::without_provenance(src_address),
            elems: elems as u64,
            dtype,
            reserved: 0,
        };
        let elems = check::accumulate(&args)? as u64;
        let arguments = Arguments::pack([dst_address as u64, src_address as u64, elems], []);
        Ok(Self::of(Kernel::accumulate(dtype), elems, arguments))
    }

    /// Merges two partial attention outputs. `None` where there are no rows.
    ///
    /// # Errors
    /// As [`crate::cpu::merge_lse`], but `out` may be at the address of either part's output, and
    /// `lse` at that of either part's log-sum-exps.
    pub fn merge_lse(args: &MergeArgs) -> Result<Option<Self>, KernelError> {
        let rows = check::merge(args, InPlace::Accepted)?.rows as u64;
        let kernel = match args.dtype {
            DType::F64 => Kernel::MergeLseF64,
            _ => Kernel::MergeLseF32,
        };
        let addresses = [
            args.out1.addr(),
            args.lse1.addr(),
            args.out2.addr(),
            args.lse2.addr(),
            args.out.addr(),
            args.lse.addr(),
        ];
        let [out1, lse1, out2, lse2, out, lse] = addresses.map(|address| address as u64);
        let arguments = Arguments::pack(
            [out1, lse1, out2, lse2, out, lse, rows, args.head_dim],
            [args.base as u32, args.empty as u32],
        );
        Ok(Self::of(kernel, rows, arguments))
    }

    /// The driver refuses a grid without blocks.
    fn of(kernel: Kernel, items: u64, arguments: Arguments) -> Option<Self> {
        let launch = Self {
            kernel,
            grid: [kernel.grid_for(items), 1, 1],
            block: [kernel.block_threads(), 1, 1],
            shared_bytes: 0,
            arguments,
        };
        (items > 0).then_some(launch)
    }
}
