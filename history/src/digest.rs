//! Names of prompts.

use twox_hash::xxhash3_128::Hasher;

/// Ids that are hashed at once.
const BLOCK_IDS: usize = 256;

/// A prompt's name: XXH3-128, seed 0, of its ids as little-endian 32-bit numbers. It is the same in every
/// process, on every machine and in every release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub u128);

impl Digest {
    /// Returns the digest of a prompt.
    #[must_use]
    pub fn of(prompt: &[u32]) -> Self {
        let mut hasher = Hasher::new();
        let mut block = [0_u8; BLOCK_IDS * 4];
        for ids in prompt.chunks(BLOCK_IDS) {
            for (bytes, id) in block.chunks_exact_mut(4).zip(ids) {
                bytes.copy_from_slice(&id.to_le_bytes());
            }
            hasher.write(&block[..ids.len() * 4]);
        }
        Self(hasher.finish_128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_reference_implementation() {
        // xxhsum 0.8 -H2 of no bytes, and of the bytes 01 00 00 00 02 00 00 00 03 00 00 00.
        assert_eq!(Digest::of(&[]).0, 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
        assert_eq!(Digest::of(&[1, 2, 3]), Digest::of(&[1, 2, 3]));
        assert_ne!(Digest::of(&[1, 2, 3]), Digest::of(&[1, 2, 4]));
        assert_ne!(Digest::of(&[0]), Digest::of(&[0, 0]));
    }

    #[test]
    fn blocks_do_not_show() {
        let ids: Vec<u32> = (0..3 * BLOCK_IDS as u32 + 5).collect();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(Digest::of(&ids).0, twox_hash::XxHash3_128::oneshot(&bytes));
    }
}
