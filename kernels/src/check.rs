//! Argument checks shared by all devices, before anything is read or written (I5).

use crate::{DType, KernelError, MergeArgs};

/// Limit of the elements of one argument: low enough that its bytes fit the address space.
pub(crate) const ELEMENTS_MAX: u64 = 1 << 48;

/// Whether a merged output may be the same buffer as its own input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InPlace {
    /// No: the CPU forms hold both as slices.
    Refused,
    /// Yes: the CUDA form reads an element before the same thread writes it.
    Accepted,
}

/// Numbers of elements of the arguments of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MergeCounts {
    pub(crate) rows: usize,
    /// `rows * head_dim`.
    pub(crate) elems: usize,
}

/// Checks the arguments of an accumulation.
pub(crate) fn accumulate(
    accumulator: usize,
    source: usize,
    elems: usize,
    dtype: DType,
) -> Result<(), KernelError> {
    elements(elems as u64, 1)?;
    let to = Span::new("accumulator", accumulator, elems, dtype.accumulator())?;
    to.must_not_overlap(&Span::new("gradient", source, elems, dtype)?)
}

/// Checks the arguments of a merge.
pub(crate) fn merge(args: &MergeArgs, in_place: InPlace) -> Result<MergeCounts, KernelError> {
    let elems = elements(args.rows, args.head_dim)?;
    let rows = elements(args.rows, 1)?;
    let outputs = |what, address| Span::new(what, address, elems, args.dtype);
    let lses = |what, address| Span::new(what, address, rows, args.dtype.accumulator());
    let inputs = [
        (outputs("first out", args.out1.addr())?, lses("first lse", args.lse1.addr())?),
        (outputs("second out", args.out2.addr())?, lses("second lse", args.lse2.addr())?),
    ];
    let out = outputs("out", args.out.addr())?;
    let lse = lses("lse", args.lse.addr())?;
    let is_in_place = |output: &Span, input: &Span| {
        in_place == InPlace::Accepted && output.address == input.address
    };
    out.must_not_overlap(&lse)?;
    for (part_out, part_lse) in &inputs {
        if !is_in_place(&out, part_out) {
            out.must_not_overlap(part_out)?;
        }
        lse.must_not_overlap(part_out)?;
        out.must_not_overlap(part_lse)?;
        if !is_in_place(&lse, part_lse) {
            lse.must_not_overlap(part_lse)?;
        }
    }
    Ok(MergeCounts { rows, elems })
}

/// Returns `rows * head_dim`, if below [`ELEMENTS_MAX`].
pub(crate) fn elements(rows: u64, head_dim: u64) -> Result<usize, KernelError> {
    rows.checked_mul(head_dim)
        .filter(|elems| *elems < ELEMENTS_MAX)
        .and_then(|elems| usize::try_from(elems).ok())
        .ok_or(KernelError::TooLarge { rows: rows as usize, head_dim: head_dim as usize })
}

/// An argument whose address and size are valid.
#[derive(Debug)]
struct Span {
    what: &'static str,
    address: usize,
    bytes: usize,
}

impl Span {
    /// The address of an empty span is not checked.
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

    fn must_not_overlap(&self, other: &Self) -> Result<(), KernelError> {
        let (a, b) = (self.address, other.address);
        let apart = self.bytes == 0 || other.bytes == 0;
        if apart || a + self.bytes <= b || b + other.bytes <= a {
            return Ok(());
        }
        Err(KernelError::Overlap { what: self.what, other: other.what })
    }
}
