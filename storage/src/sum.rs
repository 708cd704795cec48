//! CRC-32C of bytes that are in no cache.
//!
//! Such a sum is limited by memory latency: its speed depends on the number of cache lines in flight, and
//! the hardware prefetcher stops at each page. So a block has eight lanes that are read in turn and
//! prefetched, and their sums are combined. The `crc32c` crate sums the rest, shorter than a block.
#![expect(unsafe_code, reason = "an instruction that not all processors have")]

/// A cache line.
const LINE_BYTES: usize = 64;
const WORD_BYTES: usize = 8;
/// Lanes of a block, read in turn.
const LANES: usize = 8;
const LANE_LINES: usize = 256;
/// Lines by which the prefetch is ahead.
const AHEAD_LINES: usize = 8;

type CacheLine = [u8; LINE_BYTES];
type Lane = [CacheLine; LANE_LINES];
type Block = [Lane; LANES];

/// Returns the CRC-32C (RFC 3720, appendix B.4).
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    if is_x86_feature_detected!("sse4.2") {
        let blocks: &[Block] = bytes.as_chunks().0.as_chunks().0.as_chunks().0;
        let rest = &bytes[size_of_val(blocks)..];
        // SAFETY: the processor has the instruction.
        let sum = blocks.iter().fold(0, |sum, block| unsafe { append(sum, block) });
        return crc32c::crc32c_append(sum, rest);
    }
    crc32c::crc32c(bytes)
}

/// Appends `block` to `sum`.
#[target_feature(enable = "sse4.2")]
fn append(sum: u32, block: &Block) -> u32 {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_crc32_u64, _mm_prefetch};

    let mut states = [0; LANES];
    states[0] = u64::from(!sum);
    for at in 0..LANE_LINES {
        for lane in block {
            let ahead = lane.as_ptr().wrapping_add(at + AHEAD_LINES);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        }
        for word in 0..LINE_BYTES / WORD_BYTES {
            for (state, lane) in states.iter_mut().zip(block) {
                let word = lane[at].as_chunks::<WORD_BYTES>().0[word];
                *state = _mm_crc32_u64(*state, u64::from_le_bytes(word));
            }
        }
    }
    !states.into_iter().fold(0, |before, state| past_a_lane(before) ^ state as u32)
}

/// Appends a lane of zeros to a state. The operation is linear, so it applies to each bit.
fn past_a_lane(state: u32) -> u32 {
    (0..32).fold(0, |sum, bit| sum ^ (PAST_A_LANE[bit] & (state >> bit & 1).wrapping_neg()))
}

/// [`past_a_lane`] of each bit.
const PAST_A_LANE: [u32; 32] = {
    let mut past = [0; 32];
    // One zero bit: the state times x, modulo the polynomial, with reversed bits.
    let mut bit = 0;
    while bit < 32 {
        past[bit] = if bit == 0 { 0x82f6_3b78 } else { 1 << (bit - 1) };
        bit += 1;
    }
    // Doubled until it is a lane.
    let mut zeros = 1;
    while zeros < 8 * size_of::<Lane>() {
        past = twice(&past);
        zeros *= 2;
    }
    assert!(zeros == 8 * size_of::<Lane>());
    past
};

/// Squares a linear operator, given by its images of single bits.
const fn twice(once: &[u32; 32]) -> [u32; 32] {
    let mut both = [0; 32];
    let mut bit = 0;
    while bit < 32 {
        let mut of = 0;
        while of < 32 {
            if once[bit] >> of & 1 == 1 {
                both[bit] ^= once[of];
            }
            of += 1;
        }
        bit += 1;
    }
    both
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use super::{Block, crc32c};

    /// The definition, one bit at a time.
    fn slow(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0, |state, &byte| {
            (0..8).fold(state ^ u32::from(byte), |s: u32, _| (s >> 1) ^ (0x82f6_3b78 * (s & 1)))
        })
    }

    #[test]
    fn examples_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn equals_the_definition(
            seed: u64,
            start in 0..64_usize,
            bytes in 0..3 * size_of::<Block>() + 100,
        ) {
            let mut state = seed | 1;
            let filled: Vec<u8> = (0..start + bytes)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state as u8
                })
                .collect();
            prop_assert_eq!(crc32c(&filled[start..]), slow(&filled[start..]));
        }
    }
}
