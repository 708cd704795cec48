//! What the granules of mapped pages hold: a tag each. A page that leaves takes them with it.

use super::{BASE, PAGE};
use dormouse_device::AddressRange;
use std::ops::Range;

/// Contents of new pages that were not requested as zero.
pub(super) const GARBAGE: u32 = u32::MAX;

/// By page, for those that are mapped: the tags of its granules. Nothing at all is kept where no
/// granule is set.
#[derive(Debug, Default)]
pub(super) struct Contents {
    granule_bytes: usize,
    pages: Vec<Option<Box<[u32]>>>,
}

impl Contents {
    pub(super) fn new(pages: usize, granule_bytes: usize) -> Self {
        Self { granule_bytes, pages: vec![None; pages] }
    }

    /// Pages come, full of zeroes, or go.
    pub(super) fn set_mapped(&mut self, pages: Range<usize>, is_mapped: bool) {
        let Self { granule_bytes, pages: all } = self;
        if *granule_bytes > 0 {
            let fresh = || vec![0; PAGE.div_ceil(*granule_bytes)].into_boxed_slice();
            all[pages].iter_mut().for_each(|page| *page = is_mapped.then(fresh));
        }
    }

    pub(super) fn write(&mut self, range: AddressRange, tag: u32) {
        for (_, page, part) in parts(range, self.granule_bytes) {
            if let Some(page) = &mut self.pages[page] {
                page[part].fill(tag);
            }
        }
    }

    /// See `Fake::first_other`.
    pub(super) fn first_other(
        &self,
        range: AddressRange,
        tag: u32,
    ) -> Option<(usize, Option<u32>)> {
        parts(range, self.granule_bytes).find_map(|(offset, page, part)| match &self.pages[page] {
            None => Some((offset, None)),
            Some(page) => {
                let at = page[part.clone()].iter().position(|&found| found != tag)?;
                Some((offset + at * self.granule_bytes, Some(page[part.start + at])))
            }
        })
    }
}

/// `range` page by page: its offset in the range, which page, and which granules of it. Nothing
/// where no granule is set.
fn parts(
    range: AddressRange,
    granule_bytes: usize,
) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let (first, end) = (range.start - BASE, range.end() - BASE);
    let pages = if granule_bytes > 0 { first / PAGE..end.div_ceil(PAGE) } else { 0..0 };
    pages.map(move |page| {
        let start = first.max(page * PAGE);
        let stop = end.min((page + 1) * PAGE);
        let granule = |at: usize| (at - page * PAGE).div_ceil(granule_bytes);
        (start - first, page, granule(start)..granule(stop))
    })
}
