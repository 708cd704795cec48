//! What every device asks of a kernel's arguments, before anything is read or written (I5).

use crate::interface::{AccumulateArgs, ELEMENTS_MAX, MergeArgs};
use crate::{DType, KernelError};

/// Whether a merged output may be the very buffer of its own input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InPlace {
    /// No: the CPU's forms hold both as slices.
    Refused,
    /// Yes: the CUDA form reads an element before the same thread writes it.
    Accepted,
}

/// Elements of the arguments of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MergeCounts {
    pub(crate) rows: usize,
    /// `rows * head_dim`.
    pub(crate) elems: usize,
}

/// Elements to add.
pub(crate) fn accumulate(args: &AccumulateArgs) -> Result<usize, KernelError> {
    let elems = elements(args.elems, 1)?;
    let wide = args.dtype.accumulator();
    let to = Span::new("accumulator", args.accumulator.addr(), elems, wide)?;
    let from = Span::new("gradient", args.source.addr(), elems, args.dtype)?;
    to.keep_off(&from)?;
    Ok(elems)
}

/// What to merge.
pub(crate) fn merge(args: &MergeArgs, in_place: InPlace) -> Result<MergeCounts, KernelError> {
    if !matches!(args.dtype, DType::F32 | DType::F64) {
        return Err(KernelError::MergeType { dtype: args.dtype });
    }
    let elems = elements(args.rows, args.head_dim)?;
    let rows = elements(args.rows, 1)?;
    let span = |what, address, count| Span::new(what, address, count, args.dtype);
    let inputs = [
        (span("first out", args.out1.addr(), elems)?, span("first lse", args.lse1.addr(), rows)?),
        (span("second out", args.out2.addr(), elems)?, span("second lse", args.lse2.addr(), rows)?),
    ];
    let out = span("out", args.out.addr(), elems)?;
    let lse = span("lse", args.lse.addr(), rows)?;
    out.keep_off(&lse)?;
    for (part_out, part_lse) in &inputs {
        out.keep_off_own(part_out, in_place)?;
        lse.keep_off(part_out)?;
        out.keep_off(part_lse)?;
        lse.keep_off_own(part_lse, in_place)?;
    }
    Ok(MergeCounts { rows, elems })
}

/// `rows * head_dim`, where that is a count of something real.
pub(crate) fn elements(rows: u64, head_dim: u64) -> Result<usize, KernelError> {
    rows.checked_mul(head_dim)
        .filter(|elems| *elems < ELEMENTS_MAX)
        .and_then(|elems| usize::try_from(elems).ok())
        .ok_or(KernelError::TooLarge { rows: rows as usize, head_dim: head_dim as usize })
}

/// An argument whose address and size have been checked.
#[derive(Debug)]
struct Span {
    what: &'static str,
    address: usize,
    bytes: usize,
}

impl Span {
    /// An empty span's address is not looked at.
    fn new(
        what: &'static str,
        address: usize,
        elems: usize,
        dtype: DType,
    ) -> Result<Self, KernelError> {
        let align = dtype.size_bytes();
        // Below ELEMENTS_MAX, so the product fits; the end must not wrap either.
        let bytes = elems * align;
        let usable = address != 0 && address.is_multiple_of(align);
        if bytes > 0 && !(usable && address.checked_add(bytes).is_some()) {
            return Err(KernelError::Address { what, address, align });
        }
        Ok(Self { what, address, bytes })
    }

    /// Refuses an output that shares bytes with `other`.
    fn keep_off(&self, other: &Self) -> Result<(), KernelError> {
        let (a, b) = (self.address, other.address);
        let apart = self.bytes == 0 || other.bytes == 0;
        if apart || a + self.bytes <= b || b + other.bytes <= a {
            return Ok(());
        }
        Err(KernelError::Overlap { what: self.what, other: other.what })
    }

    /// [`Self::keep_off`] for the input that this output may be in the place of.
    fn keep_off_own(&self, input: &Self, in_place: InPlace) -> Result<(), KernelError> {
        if in_place == InPlace::Accepted && self.address == input.address {
            return Ok(());
        }
        self.keep_off(input)
    }
}
