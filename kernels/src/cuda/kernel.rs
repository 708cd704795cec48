//! The kernels and their grid sizes.

use std::ffi::CStr;

use crate::DType;

/// Limit of the blocks of a launch; threads continue in steps of the grid. It is over forty times what
/// the largest GPU holds at once (148 SMs of 8 blocks), so that the last, partly filled round costs little.
pub const BLOCKS_MAX: u32 = 65_536;

/// Threads of a block of an accumulation: `ACCUMULATE_BLOCK_THREADS` of `common.cuh`.
pub(super) const ACCUMULATE_BLOCK_THREADS: u32 = 256;
/// Threads of a block of a merge: `MERGE_BLOCK_THREADS` of `common.cuh`.
pub(super) const MERGE_BLOCK_THREADS: u32 = 128;
/// Rows that a block merges at a time: `MERGE_BLOCK_ROWS` of `common.cuh`.
pub(super) const MERGE_BLOCK_ROWS: u64 = 32;
/// Bytes of the sums that a thread updates at a time: `VECTOR_BYTES` of `common.cuh`.
pub(super) const VECTOR_BYTES: u64 = 16;

/// A function of each of [`super::IMAGES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// FP16 into FP32.
    AccumulateF16,
    /// bfloat16 into FP32.
    AccumulateBf16,
    /// FP32 into FP32.
    AccumulateF32,
    /// FP64 into FP64.
    AccumulateF64,
    /// FP16 parts.
    MergeLseF16,
    /// bfloat16 parts.
    MergeLseBf16,
    /// FP32 parts.
    MergeLseF32,
    /// FP64 parts.
    MergeLseF64,
}

impl Kernel {
    /// All kernels, in the order of their discriminants.
    pub const ALL: [Self; 8] = [
        Self::AccumulateF16,
        Self::AccumulateBf16,
        Self::AccumulateF32,
        Self::AccumulateF64,
        Self::MergeLseF16,
        Self::MergeLseBf16,
        Self::MergeLseF32,
        Self::MergeLseF64,
    ];

    /// Returns its name in the module.
    #[must_use]
    pub const fn name(self) -> &'static CStr {
        match self {
            Self::AccumulateF16 => c"dormouse_accumulate_f16",
            Self::AccumulateBf16 => c"dormouse_accumulate_bf16",
            Self::AccumulateF32 => c"dormouse_accumulate_f32",
            Self::AccumulateF64 => c"dormouse_accumulate_f64",
            Self::MergeLseF16 => c"dormouse_merge_lse_f16",
            Self::MergeLseBf16 => c"dormouse_merge_lse_bf16",
            Self::MergeLseF32 => c"dormouse_merge_lse_f32",
            Self::MergeLseF64 => c"dormouse_merge_lse_f64",
        }
    }

    /// Returns the type of its input.
    #[must_use]
    pub const fn dtype(self) -> DType {
        match self {
            Self::AccumulateF16 | Self::MergeLseF16 => DType::F16,
            Self::AccumulateBf16 | Self::MergeLseBf16 => DType::Bf16,
            Self::AccumulateF32 | Self::MergeLseF32 => DType::F32,
            Self::AccumulateF64 | Self::MergeLseF64 => DType::F64,
        }
    }

    /// Returns the number of threads of a block.
    #[must_use]
    pub const fn block_threads(self) -> u32 {
        if self.is_merge() { MERGE_BLOCK_THREADS } else { ACCUMULATE_BLOCK_THREADS }
    }

    /// Returns the items that a block processes in one round: elements of an accumulation, rows of a merge.
    #[must_use]
    pub const fn items_per_block(self) -> u64 {
        if self.is_merge() {
            return MERGE_BLOCK_ROWS;
        }
        let lanes = VECTOR_BYTES / self.dtype().accumulator().size_bytes() as u64;
        ACCUMULATE_BLOCK_THREADS as u64 * lanes
    }

    /// Returns the number of blocks for `items` elements or rows, at most [`BLOCKS_MAX`].
    #[must_use]
    pub const fn grid_for(self, items: u64) -> u32 {
        let blocks = items.div_ceil(self.items_per_block());
        if blocks > BLOCKS_MAX as u64 { BLOCKS_MAX } else { blocks as u32 }
    }

    pub(super) const fn accumulate(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::AccumulateF16,
            DType::Bf16 => Self::AccumulateBf16,
            DType::F32 => Self::AccumulateF32,
            DType::F64 => Self::AccumulateF64,
        }
    }

    pub(super) const fn merge(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::MergeLseF16,
            DType::Bf16 => Self::MergeLseBf16,
            DType::F32 => Self::MergeLseF32,
            DType::F64 => Self::MergeLseF64,
        }
    }

    const fn is_merge(self) -> bool {
        matches!(
            self,
            Self::MergeLseF16 | Self::MergeLseBf16 | Self::MergeLseF32 | Self::MergeLseF64
        )
    }
}
