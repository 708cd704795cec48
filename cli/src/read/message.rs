//! An Arrow message looked over before the reader trusts what it says of its own size.
//!
//! A compressed buffer begins with the length that it will have, and the reader asks for as much at
//! once: a length that lies would end the program where there is less memory. How much a byte can
//! stand for at most, the compressions themselves say.

use arrow_ipc::{CompressionType, Endianness, RecordBatch, Schema, root_as_message};

/// Bytes that a byte of LZ4 stands for at most: one more of a length, which counts to 255.
const LZ4_GROWTH_MAX: u64 = 255;
/// … of Zstandard: a block of 128 KiB of one value takes four bytes.
const ZSTD_GROWTH_MAX: u64 = 1 << 15;

/// What is wrong with a message, if something is. What is no message at all, the reader refuses.
pub(super) fn look_over(metadata: &[u8], body: &[u8]) -> Result<(), String> {
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

/// Numbers are read as they lie.
pub(super) fn little_endian(schema: &Schema<'_>) -> Result<(), String> {
    if schema.endianness() == Endianness::Little {
        return Ok(());
    }
    Err("its numbers are not little-endian; accepted: those that are".to_owned())
}

fn batch_fits(batch: &RecordBatch<'_>, body: &[u8]) -> Result<(), String> {
    let growth = batch.compression().map(|it| match it.codec() {
        CompressionType::LZ4_FRAME => LZ4_GROWTH_MAX,
        _ => ZSTD_GROWTH_MAX,
    });
    // Together, so that one buffer named often is not one held often.
    let mut left = growth.map(|growth| growth.saturating_mul(body.len() as u64));
    for buffer in batch.buffers().iter().flatten() {
        let (offset, length) = (buffer.offset(), buffer.length());
        let held = usize::try_from(offset).ok().zip(usize::try_from(length).ok());
        let held = held.and_then(|(offset, length)| body.get(offset..)?.get(..length));
        let Some(held) = held else {
            let bytes = body.len();
            return Err(format!(
                "a buffer of {length} bytes at byte {offset} of a message of {bytes}"
            ));
        };
        let Some((left, (claimed, _))) = left.as_mut().zip(held.split_first_chunk()) else {
            continue;
        };
        // Below 0: not compressed.
        let claimed = u64::try_from(i64::from_le_bytes(*claimed)).unwrap_or(0);
        let bytes = held.len();
        *left = left.checked_sub(claimed).ok_or_else(|| {
            format!("a compressed buffer of {bytes} bytes says that it holds {claimed}")
        })?;
        // The reader would end the program where this fails.
        let room = usize::try_from(claimed).ok();
        if room.is_none_or(|room| Vec::<u8>::new().try_reserve_exact(room).is_err()) {
            return Err(format!(
                "a compressed buffer of {bytes} bytes holds {claimed}, more than there is memory for"
            ));
        }
    }
    Ok(())
}
