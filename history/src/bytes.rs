//! Fields of bytes that come from a disk.

/// Takes the first `N` bytes off `rest`. The error says what is wrong.
pub(crate) fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], String> {
    let (own, after) = rest.split_first_chunk().ok_or("it ends early")?;
    *rest = after;
    Ok(*own)
}
