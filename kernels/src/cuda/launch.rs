//! Launches of the kernels: checked like the CPU versions, with parameters packed as bytes.

use super::Kernel;
use crate::check::{self, InPlace};
use crate::{DType, KernelError, MergeArgs};

/// Bytes of the largest parameter list, that of `merge_lse`.
const BYTES_MAX: usize = 8 * 8 + 2 * 4;

/// A kernel's parameters, each at a multiple of its size: eight-byte ones first, then four-byte ones.
/// This is also the layout of a parameter buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Arguments {
    bytes: [u8; BYTES_MAX],
    wide: usize,
    narrow: usize,
}

impl Arguments {
    fn pack<const WIDE: usize, const NARROW: usize>(
        wide: [u64; WIDE],
        narrow: [u32; NARROW],
    ) -> Self {
        const { assert!(WIDE * 8 + NARROW * 4 <= BYTES_MAX) }
        let mut bytes = [0; BYTES_MAX];
        let (wide_bytes, narrow_bytes) = bytes.split_at_mut(WIDE * 8);
        for (to, value) in wide_bytes.as_chunks_mut().0.iter_mut().zip(wide) {
            *to = value.to_ne_bytes();
        }
        for (to, value) in narrow_bytes.as_chunks_mut().0.iter_mut().zip(narrow) {
            *to = value.to_ne_bytes();
        }
        Self { bytes, wide: WIDE, narrow: NARROW }
    }

    /// Returns the parameters in order, aligned to eight bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.wide * 8 + self.narrow * 4]
    }

    /// Returns the offset of each parameter in [`Self::bytes`], in the kernel's order.
    pub fn offsets(&self) -> impl ExactSizeIterator<Item = usize> + use<> {
        let wide = self.wide;
        (0..wide + self.narrow).map(move |index| index * 8 - index.saturating_sub(wide) * 4)
    }
}

/// A checked call of a kernel. Running it is safe if its addresses are memory of the device, as large
/// as its counts require.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel, which determines the threads of a block.
    pub kernel: Kernel,
    /// Number of blocks, in one dimension.
    pub blocks: u32,
    /// Its parameters.
    pub arguments: Arguments,
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
        let arguments = Arguments::pack([dst_address as u64, src_address as u64, elems], []);
        Ok(Self::new(Kernel::accumulate(dtype), elems, arguments))
    }

    /// Merges two partial attention outputs. `None` if there are no rows.
    ///
    /// # Errors
    /// As [`crate::cpu::merge_lse`], except that `out` may be at the address of either part's output,
    /// and `lse` at that of either part's log-sum-exps.
    pub fn merge_lse(args: &MergeArgs) -> Result<Option<Self>, KernelError> {
        let rows = check::merge(args, InPlace::Accepted)?.rows as u64;
        let kernel = match args.dtype {
            DType::F64 => Kernel::MergeLseF64,
            _ => Kernel::MergeLseF32,
        };
        let inputs = [args.out1, args.lse1, args.out2, args.lse2].map(|input| input.addr() as u64);
        let [out1, lse1, out2, lse2] = inputs;
        let (out, lse) = (args.out.addr() as u64, args.lse.addr() as u64);
        let arguments = Arguments::pack(
            [out1, lse1, out2, lse2, out, lse, rows, args.head_dim],
            [args.base as u32, args.empty as u32],
        );
        Ok(Self::new(kernel, rows, arguments))
    }

    /// `None` for no items: the driver refuses a grid without blocks.
    fn new(kernel: Kernel, items: u64, arguments: Arguments) -> Option<Self> {
        (items > 0).then(|| Self { kernel, blocks: kernel.grid_for(items), arguments })
    }
}
