//! Bytes of unclaimed tagged blocks, by tag. A claimed block is counted by the engine that claimed it.

use super::State;

impl State {
    /// Counts block `index` of `tag`, if that is one: it was published, or its claim has ended.
    #[inline]
    pub(super) fn count_tagged(&mut self, index: u32, tag: u32) {
        if tag != 0 {
            *self.tagged_bytes.entry(tag).or_default() += self.range_bytes(index);
        }
    }

    /// Discounts block `index`, if it has a tag: it is freed or claimed.
    pub(super) fn discount_tagged(&mut self, index: u32) {
        let tag = self.records[index as usize].tag;
        if tag == 0 {
            return;
        }
        let bytes = self.range_bytes(index);
        if let Some(level) = self.tagged_bytes.get_mut(&tag) {
            *level = level.saturating_sub(bytes);
            if *level == 0 {
                self.tagged_bytes.remove(&tag);
            }
        }
    }

    /// Returns the bytes of unclaimed blocks by tag, in the order of the tags.
    pub(crate) fn tagged_bytes(&self) -> Vec<(u32, u64)> {
        self.tagged_bytes.iter().map(|(tag, bytes)| (*tag, *bytes)).collect()
    }
}
