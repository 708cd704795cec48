//! Pages and room: trims, budgets, reservations, arenas, and what a refusal is worth.

use super::super::common::{BASE, PAGE, key, pages_of};
use super::{Left, Shadow};
use dormouse_alloc::{AllocError, Cause, OutOfMemory, Request};

impl Shadow {
    /// By page: whether an awake block has a part in it, so that it cannot leave.
    pub(super) fn held_pages(&self) -> Vec<bool> {
        let mut held = vec![false; self.setup.space_pages];
        for part in self.blocks().flat_map(|it| it.awake_parts()) {
            held[pages_of(part)].fill(true);
        }
        held
    }

    fn held_bytes(&self) -> u64 {
        (self.held_pages().into_iter().filter(|&it| it).count() * PAGE) as u64
    }

    /// Bytes that the budget counts.
    pub(super) fn mapped_bytes(&self) -> u64 {
        self.device.mapped_bytes() + self.staged_bytes
    }

    pub(super) fn is_over(&self, left: &Left) -> bool {
        let gpu = self.device.gpu();
        left.ends.iter().all(|&end| gpu.is_complete(end))
    }

    /// Whether the room was there.
    pub(super) fn reserve(&mut self, bytes: u64) -> bool {
        let before = self.refusals();
        let outcome = self.allocator.reserve_awake(bytes);
        self.settle();
        match outcome {
            Ok(()) => {
                self.staged_bytes += bytes;
                assert!(self.mapped_bytes() <= self.budget_bytes);
                true
            }
            Err(AllocError::NoRoom { .. }) => {
                let least_bytes = self.held_bytes() + self.staged_bytes + bytes;
                let has_excuse = self.refusals() != before;
                assert!(least_bytes > self.budget_bytes || has_excuse, "room for {bytes} bytes");
                false
            }
            Err(other) => panic!("{other} for {bytes} bytes"),
        }
    }

    pub(super) fn unreserve(&mut self, bytes: u64) {
        let result = self.allocator.unreserve_awake(bytes);
        assert_eq!(result.is_ok(), bytes <= self.staged_bytes);
        self.staged_bytes -= if result.is_ok() { bytes } else { 0 };
    }

    /// All that can leave does, whole pages of it, and no more than was asked for.
    pub(super) fn trim(&mut self, bytes: u64) {
        let (before, mapped_bytes) = (self.refusals(), self.device.mapped_bytes());
        let trimmed_bytes = self.allocator.trim(bytes);
        self.settle();
        assert_eq!(trimmed_bytes, mapped_bytes - self.device.mapped_bytes());
        let asked_bytes = bytes.checked_next_multiple_of(PAGE as u64).unwrap_or(u64::MAX);
        // A large page leaves whole.
        let most_bytes = asked_bytes.saturating_add(((self.setup.large_pages - 1) * PAGE) as u64);
        assert!(trimmed_bytes <= most_bytes, "{trimmed_bytes} trimmed of {bytes}");
        if trimmed_bytes < asked_bytes && self.refusals() == before {
            assert_eq!(self.device.mapped_bytes(), self.held_bytes(), "free pages were left");
            assert_eq!(self.allocator.stats().pending_blocks.current, 0);
        }
    }

    pub(super) fn set_budget(&mut self, bytes: u64) {
        let before = self.refusals();
        self.budget_bytes = bytes;
        self.allocator.set_budget(bytes).unwrap();
        self.settle();
        let least_bytes = self.held_bytes() + self.staged_bytes;
        let is_held = self.mapped_bytes() <= bytes.max(least_bytes);
        assert!(is_held || self.refusals() != before, "more is held than a budget of {bytes}");
    }

    pub(super) fn reopen_arena(&mut self, which: usize) {
        let opened = self.allocator.arena_create().unwrap();
        let closed = std::mem::replace(&mut self.arenas[which], opened);
        self.allocator.arena_close(closed);
        let refused = self.allocator.allocate(&Request {
            arena: Some(closed),
            stream: key(0),
            ..Request::new(1)
        });
        assert!(matches!(refused, Err(AllocError::UnknownArena { .. })), "{refused:?}");
        self.allocator.arena_close(closed);
    }

    /// A request was refused. It must be that it would not fit with all else gone that can go:
    /// nothing pending, and every page unmapped that no awake block has a part in. See the page of
    /// the test on what that says and what it does not.
    pub(super) fn must_be_out_of_memory(&self, request: &Request, report: &OutOfMemory) {
        let pending_blocks = self.allocator.stats().pending_blocks.current;
        assert!(pending_blocks == 0 || report.tried.impossible, "not waited for: {report}");
        let page_bytes = PAGE as u64;
        let held = self.held_pages();
        let missing = self.fewest_missing(request, &held);
        // Where addresses are short, all that is certain is that no gap is long enough.
        let Some(missing) = missing else { return };
        assert_ne!(report.cause, Cause::AddressSpace, "{report}");
        let held = held.into_iter().filter(|&it| it).count();
        let budget_bytes = (held + missing) as u64 * page_bytes + self.staged_bytes;
        let is_short = budget_bytes > self.budget_bytes || held + missing > self.capacity_pages;
        let (budget_pages, staged_pages) =
            (self.budget_bytes / page_bytes, self.staged_bytes / page_bytes);
        assert!(
            is_short,
            "{missing} pages more would have done: {held} held, {staged_pages} staged, budget \
             {budget_pages}, device {}\n{request:?}\n{report}",
            self.capacity_pages
        );
    }

    /// The fewest pages that would have to be mapped for `request`, were all gone that can go;
    /// `None` where no run of addresses is certain to be long enough.
    fn fewest_missing(&self, request: &Request, held: &[bool]) -> Option<usize> {
        let granule_bytes = self.setup.granule_bytes;
        let unit_bytes = if self.setup.is_whole(request) { PAGE } else { granule_bytes };
        let bytes = self.setup.block_bytes(request)?;
        let align = request.align.max(unit_bytes);
        let pools = self.allocator.pools(request).unwrap();
        let segments = self.allocator.segments();
        let space_bytes = self.setup.space_pages * PAGE;
        // By granule: in a block, awake or asleep.
        let mut used = vec![false; space_bytes / granule_bytes];
        let granules =
            |start: usize, end: usize| (start - BASE) / granule_bytes..(end - BASE) / granule_bytes;
        for range in self.blocks().map(|it| it.info.range) {
            used[granules(range.start, range.end())].fill(true);
        }
        // In the gaps of its pools' own segments.
        let mut fewest: Option<usize> = None;
        for segment in segments.iter().filter(|it| pools.contains(&it.1)) {
            let mut start = segment.0.start.next_multiple_of(align);
            while start.checked_add(bytes).is_some_and(|end| end <= segment.0.end()) {
                let wanted = granules(start, start + bytes);
                if let Some(at) = used[wanted.clone()].iter().rposition(|&it| it) {
                    // No place before the end of the block that is in the way.
                    let past = BASE + (wanted.start + at + 1) * granule_bytes;
                    start = past.next_multiple_of(align);
                    continue;
                }
                let first = (start - BASE) / PAGE;
                let end = (start + bytes - BASE).div_ceil(PAGE);
                let missing = held[first..end].iter().filter(|&&it| !it).count();
                fewest = Some(fewest.map_or(missing, |it| it.min(missing)));
                start += align;
            }
        }
        // In a segment that is carved where none with a block in it is.
        let mut taken = vec![false; self.setup.space_pages];
        for segment in &segments {
            let has_block = used[granules(segment.0.start, segment.0.end())].contains(&true);
            taken[pages_of(segment.0)].fill(has_block);
        }
        taken[..(self.setup.space_start() - BASE) / PAGE].fill(true);
        let longest = taken.split(|&it| it).map(<[bool]>::len).max().unwrap_or(0) * PAGE;
        let enough = bytes.checked_add(align - granule_bytes)?;
        if longest >= enough.checked_add(enough / 32 + granule_bytes)? {
            let missing = bytes.div_ceil(PAGE);
            fewest = Some(fewest.map_or(missing, |it| it.min(missing)));
        }
        fewest
    }
}
