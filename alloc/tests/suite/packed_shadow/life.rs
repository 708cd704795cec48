//! The life of a block, done to the allocator and to its shadow.

use super::super::common::gpu::Call;
use super::super::common::{BASE, PAGE, key, pages_of};
use super::ops::Op;
use super::{Armed, Left, Live, Shadow};
use dormouse_alloc::{AllocError, BlockInfo, Freed, Request, Stats};
use dormouse_device::{AddressRange, DeviceError, Fill};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) fn overlaps(one: AddressRange, other: AddressRange) -> bool {
    one.start < other.end() && other.start < one.end()
}

/// The pages that lie wholly inside `range`: those it has alone.
fn whole_pages(range: AddressRange) -> AddressRange {
    let first = (range.start - BASE).next_multiple_of(PAGE);
    let end = (range.end() - BASE) / PAGE * PAGE;
    if end > first {
        AddressRange::new(BASE + first, end - first)
    } else {
        AddressRange::new(range.start, 0)
    }
}

impl Live {
    /// The parts of the block that have pages: all of it, or what it has of shared pages.
    pub(super) fn awake_parts(&self) -> Vec<AddressRange> {
        let BlockInfo { range, pages, asleep, .. } = self.info;
        if !asleep || pages.bytes == 0 {
            return vec![range];
        }
        let head = AddressRange::new(range.start, pages.start - range.start);
        let tail = AddressRange::new(pages.end(), range.end() - pages.end());
        [head, tail].into_iter().filter(|it| it.bytes > 0).collect()
    }

    pub(super) fn awake_bytes(&self) -> u64 {
        self.awake_parts().iter().map(|it| it.bytes as u64).sum()
    }
}

impl Shadow {
    pub(super) fn allocate(&mut self, op: Op) {
        let Op::Allocate { bytes, align, arena, stream, whole_pages: is_whole, zero } = op else {
            return;
        };
        let request = Request {
            align,
            arena: self.arenas.get(arena).copied(),
            stream: self.key(stream, self.tags as usize),
            // Most have none.
            tag: if self.tags % 4 == 3 { self.tags % 3 } else { 0 },
            fill: if zero { Fill::Zero } else { Fill::Any },
            whole_pages: is_whole,
            ..Request::new(bytes)
        };
        let before = self.refusals();
        let is_armed = self.armed.is_some();
        let room_bytes = self.budget_bytes.saturating_sub(self.mapped_bytes());
        let block_bytes = self.setup.block_bytes(&request);
        let has_room = block_bytes
            .and_then(|it| it.checked_next_multiple_of(PAGE))
            .is_some_and(|it| it as u64 <= room_bytes);
        let is_easy =
            has_room && self.is_spacious(block_bytes.unwrap_or(bytes).saturating_add(align));
        let calls = self.calls_for_room(stream);
        let in_use_bytes = self.noted_use();
        let may_top_up =
            self.may_exceed_use(block_bytes.unwrap_or(bytes), in_use_bytes.unwrap_or(0));
        let outcome = self.allocator.allocate(&request);
        self.settle();
        // With enough room nothing is unmapped except moved pages, and below the maximum use no other stream is waited
        // for.
        if is_easy && self.refusals() == before {
            let [waits, others @ ..] = self.calls_for_room(stream);
            let [waits_before, others_before @ ..] = calls;
            assert_eq!(others, others_before, "there was room for {request:?}");
            assert!(may_top_up || waits == waits_before, "waits for others: {request:?}");
        }
        match outcome {
            Ok(block) => {
                self.noted_use_bytes = self.noted_use_bytes.max(in_use_bytes.unwrap_or(0));
                let is_right = |it| self.setup.may_be(block.range.bytes, it, &request);
                assert!(block_bytes.is_some_and(is_right), "{block:?} of {request:?}");
                assert_eq!(block.range.start % align, 0, "{block:?} of {request:?}");
                if self.setup.is_whole(&request) {
                    assert_eq!(whole_pages(block.range), block.range);
                }
                assert!(self.mapped_bytes() <= self.budget_bytes, "past the budget: {request:?}");
                self.begin(block.range, &request, stream);
                if block.zeroed {
                    assert_eq!(self.device.first_other(block.range, 0), None, "{block:?}");
                }
                self.tags += 1;
                self.device.write(block.range, self.tags);
                self.device.touch(block.range);
                let info = BlockInfo {
                    id: block.id,
                    range: block.range,
                    pages: whole_pages(block.range),
                    requested_bytes: bytes,
                    scope: 0,
                    tag: request.tag,
                    arena: request.arena,
                    wakes_large: self.setup.wakes_large(block.range),
                    claimed: None,
                    asleep: false,
                    free_deferred: false,
                    stream: request.stream,
                };
                self.note_back(&info, self.setup.is_small(&request));
                self.live.push(Live { info, users: vec![stream], tag: self.tags });
                self.trace.push(Some(block.range.start - BASE));
            }
            Err(AllocError::OutOfMemory(report)) => {
                self.ooms += 1;
                self.trace.push(None);
                assert!(report.to_string().lines().count() <= 12, "{report}");
                // A device that failed on the way, or a free on the way, makes it less certain.
                if self.refusals() == before && is_armed == self.armed.is_some() {
                    self.must_be_out_of_memory(&request, &report);
                }
            }
            Err(AllocError::Device(DeviceError::Refused { .. })) => {
                assert_ne!(self.refusals(), before, "{request:?}");
                self.trace.push(None);
            }
            Err(other) => panic!("{other} for {request:?}"),
        }
    }

    /// What only a shortage is a reason for: waits, asking for room, and unmapping. Pages that move may leave, and
    /// `stream` itself be waited for.
    fn calls_for_room(&self, stream: usize) -> [u64; 4] {
        let waits = match self.setup.moves_pages {
            true => self.device.gpu().waits_for_others(stream),
            false => self.device.gpu().calls(Call::Synchronize),
        };
        let unmaps = if self.setup.moves_pages { 0 } else { self.device.unmaps() };
        let stats = if self.is_lazy() { Stats::default() } else { self.allocator.stats() };
        [waits, stats.retries, stats.reclaims, unmaps]
    }

    /// The least use that the next request notes: pending blocks may become free before. `None` if the thread cache may
    /// serve it, which notes nothing.
    fn noted_use(&self) -> Option<u64> {
        if self.setup.thread_cache {
            return None;
        }
        let stats = self.allocator.stats();
        let active_bytes = stats.active_bytes.current - stats.pending_bytes.current;
        Some(active_bytes + stats.staged_bytes.current)
    }

    /// Whether pages for a block of `bytes` may make what is held more than was ever noted as in use, so that pages
    /// move.
    fn may_exceed_use(&self, bytes: usize, in_use_bytes: u64) -> bool {
        // It begins and ends within a page each.
        let pages_bytes = bytes.saturating_add(2 * PAGE) as u64;
        self.setup.moves_pages
            && self.mapped_bytes().saturating_add(pages_bytes)
                > self.noted_use_bytes.max(in_use_bytes)
    }

    /// Whether neither the device is full before the budget is, nor the space short of runs that a
    /// segment for `bytes` can be carved from.
    fn is_spacious(&self, bytes: usize) -> bool {
        let mut segments = self.allocator.segments();
        segments.sort_by_key(|it| it.0.start);
        let mut at = self.setup.space_start();
        let mut longest_bytes = 0;
        let end = BASE + self.setup.space_pages * PAGE;
        for range in segments.iter().map(|it| it.0).chain([AddressRange::new(end, 0)]) {
            longest_bytes = longest_bytes.max(range.start - at);
            at = range.end();
        }
        // Twice the length is more than any search by size class needs.
        let segment_bytes = bytes.saturating_add(self.setup.segment_pages * PAGE);
        longest_bytes >= segment_bytes.saturating_mul(2)
            && (self.capacity_pages * PAGE) as u64 >= self.budget_bytes
    }

    /// `range` is allocated on `stream`: it must be free.
    fn begin(&mut self, range: AddressRange, request: &Request, stream: usize) {
        for other in self.blocks().map(|it| it.info.range) {
            assert!(!overlaps(range, other), "{range:x?} of {request:?} overlaps {other:x?}");
        }
        for left in self.left.iter().filter(|it| overlaps(it.range, range)) {
            assert!(self.is_over(left), "{:?} of {:x?} is not over", left.ends, left.range);
        }
        self.left.retain(|it| !overlaps(it.range, range));
        if self.is_ordered() {
            self.device.gpu().must_suit(range, stream);
        }
        let mapped = self.device.mapped_pages();
        assert!(mapped[pages_of(range)].iter().all(|&it| it), "{range:x?} has no pages");
    }

    pub(super) fn launch(&mut self, at: usize, user: usize) {
        let Live { info, users, .. } = &self.live[at];
        if self.is_ordered() && !info.asleep && !info.free_deferred {
            self.device.gpu().launch(users[user % users.len()], info.range);
        }
    }

    pub(super) fn record(&mut self, at: usize, stream: usize) {
        let Live { info, users, .. } = &mut self.live[at];
        let recorded = self.allocator.record_stream(info.range.end() - 1, key(stream));
        assert_eq!(recorded.is_ok(), !info.free_deferred);
        if !info.free_deferred && !users.contains(&stream) {
            users.push(stream);
        }
    }

    pub(super) fn free(&mut self, at: usize, other: usize) {
        let waits = self.device.gpu().calls(Call::Synchronize);
        let is_ordered = self.is_ordered();
        let other_key = self.key(other % self.setup.streams.max(1), other);
        let Live { info, users, .. } = &mut self.live[at];
        let inside = self.allocator.free(info.range.start + 1, key(0));
        assert!(
            matches!(
                inside,
                Err(AllocError::NotBlockStart { .. } | AllocError::FreeDeferred { .. })
            ),
            "{inside:?}"
        );
        // The last use comes before the free.
        let last = if other == 0 { users[0] } else { other % self.setup.streams.max(1) };
        if is_ordered && !info.free_deferred && !info.asleep {
            self.device.gpu().launch(last, info.range);
        }
        let last_key = if other == 0 { info.stream } else { other_key };
        match self.allocator.free(info.range.start, last_key) {
            Ok(freed) => {
                assert!(!info.free_deferred, "freed twice: {info:?}");
                if !users.contains(&last) {
                    users.push(last);
                }
                match freed {
                    Freed::Done => self.leave(at),
                    Freed::Claimed(owner) => {
                        assert_eq!(info.claimed, Some(owner));
                        info.free_deferred = true;
                    }
                }
            }
            Err(AllocError::FreeDeferred { .. }) => assert!(info.free_deferred),
            Err(other) => panic!("{other} for {info:?}"),
        }
        assert_eq!(self.device.gpu().calls(Call::Synchronize), waits, "a free waited");
    }

    /// A block with no use but its own stream's is freed during the device's next call.
    pub(super) fn arm(&mut self, at: usize) {
        let Live { info, users, .. } = &self.live[at];
        if self.armed.is_some() || info.claimed.is_some() || users.len() > 1 {
            return;
        }
        let live = self.live.swap_remove(at);
        let is_freed = Arc::new(AtomicBool::new(false));
        let (allocator, done) = (Arc::downgrade(&self.allocator), Arc::clone(&is_freed));
        let (start, stream) = (live.info.range.start, live.info.stream);
        self.device.set_hook(move |operation, _| {
            let is_due = operation != dormouse_device::Operation::Event;
            if let Some(allocator) = allocator.upgrade().filter(|_| is_due)
                && !done.swap(true, Ordering::Relaxed)
            {
                assert_eq!(allocator.free(start, stream).unwrap(), Freed::Done);
            }
        });
        self.armed = Some(Armed { live, is_freed });
    }

    /// A block ends.
    fn leave(&mut self, at: usize) {
        let Live { info, users, .. } = self.live.swap_remove(at);
        self.note_gone(&info);
        if self.is_ordered() && !info.asleep && users.len() > 1 {
            let ends = users[1..].iter().map(|&user| self.device.gpu().end(user)).collect();
            self.left.push(Left { range: info.range, ends });
        }
    }

    pub(super) fn claim(&mut self, at: usize, offset: usize) {
        let info = &mut self.live[at].info;
        let address = info.range.start + offset % info.range.bytes;
        match self.allocator.claim(address, 77) {
            Ok(found) => {
                assert!(!info.free_deferred && info.claimed.is_none());
                info.claimed = Some(77);
                assert_eq!(found, *info);
            }
            Err(AllocError::FreeDeferred { .. }) => assert!(info.free_deferred),
            Err(AllocError::AlreadyClaimed { .. }) => assert!(info.claimed.is_some()),
            Err(other) => panic!("{other} for {info:?}"),
        }
    }

    /// The claimant waits for all uses, and then the pages go: exactly those it was told.
    pub(super) fn sleep(&mut self, at: usize) {
        let Live { info, .. } = &mut self.live[at];
        let is_allowed = info.claimed.is_some() && !info.asleep;
        if is_allowed {
            let Ok(ends) = self.allocator.uses_end(&[info.id]) else { return };
            ends.events.into_iter().for_each(|end| self.device.gpu().finish(end));
            let told = self.allocator.info(info.id).unwrap();
            assert_eq!(told, *info);
            if told.pages.bytes > 0 {
                self.device.take_pages(told.pages);
            }
            info.asleep = true;
        }
        assert_eq!(self.allocator.set_asleep(info.id).is_ok(), is_allowed);
    }

    pub(super) fn wake(&mut self, at: usize) {
        let Live { info, tag, .. } = &self.live[at];
        let (info, tag) = (*info, *tag);
        let pages = info.pages;
        if !info.asleep {
            let woken = self.allocator.set_awake(info.id);
            assert!(matches!(woken, Err(AllocError::WrongState { .. })), "{woken:?}");
        } else if self.reserve(pages.bytes as u64) {
            // A wake needs pages of the device, and fails if it is full.
            if self.device.mapped_bytes() as usize + pages.bytes > self.capacity_pages * PAGE {
                return self.unreserve(pages.bytes as u64);
            }
            if pages.bytes > 0 {
                self.device.bring_pages(pages);
                if info.wakes_large {
                    self.device.join(pages);
                }
                self.device.write(pages, tag);
                self.device.touch(pages);
            }
            self.allocator.set_awake(info.id).unwrap();
            self.staged_bytes -= pages.bytes as u64;
            self.live[at].info.asleep = false;
        } else if self.staged_bytes < pages.bytes as u64 {
            let woken = self.allocator.set_awake(info.id);
            assert!(matches!(woken, Err(AllocError::NotReserved { .. })), "{woken:?}");
        }
    }

    /// The claimant is done with the block.
    pub(super) fn release_held_back(&mut self, at: usize) {
        let info = &mut self.live[at].info;
        let finished =
            if info.free_deferred { Ok(()) } else { self.allocator.finish_free(info.id) };
        assert_eq!(finished.is_ok(), info.free_deferred);
        if info.free_deferred {
            // Both calls do it.
            let gone = if info.id.index.is_multiple_of(2) {
                self.allocator.finish_free(info.id)
            } else {
                self.allocator.unclaim(info.id)
            };
            gone.unwrap();
            self.leave(at);
        } else {
            let is_allowed = info.claimed.is_some() && !info.asleep;
            assert_eq!(self.allocator.unclaim(info.id).is_ok(), is_allowed);
            info.claimed = if is_allowed { None } else { info.claimed };
        }
    }

    /// What outlived its block gets nothing done.
    pub(super) fn stale(&self, which: usize) {
        let Some(at) = which.checked_rem(self.gone.len()) else { return };
        self.must_be_gone(&self.gone[at]);
    }
}
