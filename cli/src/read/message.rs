//! Validation of Arrow messages before they are decoded.
//!
//! A compressed buffer states its decompressed length, which the reader allocates at once; a false length
//! would abort the process. The compression formats bound the ratio.

use arrow_ipc::{CompressionType, Endianness, RecordBatch, Schema, root_as_message};

/// Maximum growth of LZ4: a further length byte stands for up to 255 bytes.
const LZ4_GROWTH_MAX: u64 = 255;
/// Maximum growth of Zstandard: a block of 128 KiB of one value takes four bytes.
const ZSTD_GROWTH_MAX: u64 = 1 << 15;

/// Checks the buffers of a message. The reader itself refuses invalid messages.
pub(super) fn check_message(metadata: &[u8], body: &[u8]) -> Result<(), String> {
    let Ok(message) = root_as_message(metadata) else { return Ok(()) };
    if let Some(schema) = message.header_as_schema() {
        little_endian(&schema)?;
    }
    let of_dictionary = || message.header_as_dictionary_batch()?.data();
    match message.header_as_record_batch().or_else(of_dictionary) {
        Some(batch) => batch_fits(&batch, body),
        None => Ok(()),
    }
}

/// Checks that numbers are little-endian.
pub(super) fn little_endian(schema: &Schema<'_>) -> Result<(), String> {
    if schema.endianness() == Endianness::Little {
        return Ok(());
    }
    Err("its numbers are big-endian; accepted: little-endian".to_owned())
}

fn batch_fits(batch: &RecordBatch<'_>, body: &[u8]) -> Result<(), String> {
    let growth = batch.compression().map(|it| match it.codec() {
        CompressionType::LZ4_FRAME => LZ4_GROWTH_MAX,
        _ => ZSTD_GROWTH_MAX,
    });
    // Counted over all buffers, which may overlap.
    let mut left = growth.map(|growth| growth.saturating_mul(body.len() as u64));
    for buffer in batch.buffers().iter().flatten() {
        let (offset, length) = (buffer.offset(), buffer.length());
        let held = usize::try_from(offset).ok().zip(usize::try_from(length).ok());
        let held = held.and_then(|(offset, length)| body.get(offset..)?.get(..length));
        let Some(held) = held else {
            let bytes = body.len();
            return Err(format!(
                "a buffer of {length} bytes at byte {offset} exceeds its message of {bytes} bytes"
            ));
        };
        let Some((left, (claimed, _))) = left.as_mut().zip(held.split_first_chunk()) else {
            continue;
        };
        // A negative length means not compressed.
        let claimed = u64::try_from(i64::from_le_bytes(*claimed)).unwrap_or(0);
        let bytes = held.len();
        *left = left.checked_sub(claimed).ok_or_else(|| {
            format!("a compressed buffer of {bytes} bytes claims {claimed} decompressed bytes")
        })?;
        // The reader would abort the process if this failed.
        let room = usize::try_from(claimed).ok();
        if room.is_none_or(|room| Vec::<u8>::new().try_reserve_exact(room).is_err()) {
            return Err(format!(
                "a compressed buffer of {bytes} bytes needs {claimed} bytes, more than available memory"
            ));
        }
    }
    Ok(())
}
