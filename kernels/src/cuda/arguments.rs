//! A kernel's parameters as bytes.

/// Bytes of the parameters of the kernel that has the most: `merge_lse`.
const BYTES_MAX: usize = 8 * 8 + 2 * 4;

/// A kernel's parameters, each at a multiple of its size: eight-byte ones first, then four-byte
/// ones. This is also the layout of one parameter buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Arguments {
    bytes: [u8; BYTES_MAX],
    wide: usize,
    narrow: usize,
}

impl Arguments {
    pub(super) fn pack<const WIDE: usize, const NARROW: usize>(
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

    /// The parameters, one after another, aligned to eight bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.wide * 8 + self.narrow * 4]
    }

    /// Where each parameter begins in [`Self::bytes`], in the kernel's order.
    pub fn offsets(&self) -> impl ExactSizeIterator<Item = usize> + use<> {
        let wide = self.wide;
        (0..wide + self.narrow).map(move |index| index * 8 - index.saturating_sub(wide) * 4)
    }
}
