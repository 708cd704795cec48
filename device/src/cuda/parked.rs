//! Parked handles of both sizes.

use super::physical::Piece;

/// Unmapped handles.
#[derive(Debug)]
pub(super) struct Parked {
    page_bytes: usize,
    large_bytes: usize,
    pages: Vec<u64>,
    /// Empty if a large page is a page.
    large: Vec<u64>,
}

impl Parked {
    pub(super) const fn new(page_bytes: usize, large_bytes: usize) -> Self {
        Self { page_bytes, large_bytes, pages: Vec::new(), large: Vec::new() }
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * self.page_bytes + self.large.len() * self.large_bytes
    }

    fn of_size(&mut self, bytes: usize) -> &mut Vec<u64> {
        if bytes == self.page_bytes { &mut self.pages } else { &mut self.large }
    }

    pub(super) fn put(&mut self, piece: Piece) {
        self.of_size(piece.range.bytes).push(piece.handle);
    }

    /// Takes a handle of `bytes`.
    pub(super) fn take(&mut self, bytes: usize) -> Option<u64> {
        self.of_size(bytes).pop()
    }

    /// Takes handles until at most `keep_bytes` are left, large ones first: they are the fewest calls to release
    /// and to create again. Returns them and their bytes.
    pub(super) fn take_beyond(&mut self, keep_bytes: usize) -> (Vec<u64>, usize) {
        let before_bytes = self.bytes();
        let mut taken = Vec::new();
        while self.bytes() > keep_bytes {
            let Some(handle) = self.large.pop().or_else(|| self.pages.pop()) else { break };
            taken.push(handle);
        }
        (taken, before_bytes - self.bytes())
    }
}
