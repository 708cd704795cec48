//! Element types.

use crate::KernelError;

/// Element type of a tensor; the codes are those of the C header.
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
    /// Every element type.
    pub const ALL: [Self; 4] = [Self::F16, Self::Bf16, Self::F32, Self::F64];

    /// Bytes of one element, which is also its alignment.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The type its gradients are added up in: enough bits for thousands of additions.
    #[must_use]
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            Self::F16 | Self::Bf16 | Self::F32 => Self::F32,
        }
    }
}

impl TryFrom<i32> for DType {
    type Error = KernelError;

    fn try_from(code: i32) -> Result<Self, KernelError> {
        Self::ALL
            .into_iter()
            .find(|dtype| *dtype as i32 == code)
            .ok_or(KernelError::UnknownDType { code })
    }
}
