//! Element types.

use crate::KernelError;

/// Element type of a tensor. The codes are those of the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum DType {
    /// IEEE binary16.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// IEEE binary32.
    F32 = 3,
    /// IEEE binary64.
    F64 = 4,
}

impl DType {
    /// All element types.
    pub const ALL: [Self; 4] = [Self::F16, Self::Bf16, Self::F32, Self::F64];

    /// Returns the size and alignment of an element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// Returns the type in which its gradients are accumulated: FP64 for FP64, else FP32.
    #[must_use]
    pub const fn accumulator(self) -> Self {
        if matches!(self, Self::F64) { Self::F64 } else { Self::F32 }
    }
}

impl TryFrom<i32> for DType {
    type Error = KernelError;

    fn try_from(code: i32) -> Result<Self, KernelError> {
        let mut all = Self::ALL.into_iter();
        all.find(|dtype| *dtype as i32 == code).ok_or(KernelError::UnknownDType { code })
    }
}
