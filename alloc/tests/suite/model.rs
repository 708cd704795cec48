//! The allocator against a naive model: random operations, everything compared after each.

use crate::common::{BASE, Fake, PAGE, allocator};
use dormouse_alloc::{AllocError, Allocator, ArenaId, BlockInfo, Cause, Freed, Request, Stats};
use dormouse_device::{AddressRange, Fill};
use proptest::prelude::*;
use std::sync::Arc;

/// Far more addresses than budget, so that a shortage is one of pages.
const SPACE_PAGES: usize = 4096;
const BUDGET_PAGES: usize = 96;
const ARENAS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate { bytes: usize, align_log: u32, arena: usize, tag: u32 },
    Free { which: usize },
    Claim { which: usize, offset: usize },
    Unclaim { which: usize },
    FinishFree { which: usize },
    Sleep { which: usize },
    Wake { which: usize },
    Reserve { pages: u64 },
    Unreserve { pages: u64 },
    Trim { bytes: u64 },
    Budget { pages: usize },
    ReopenArena { which: usize },
    Stale { which: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let which = any::<usize>();
    let bytes = prop_oneof![4 => 1..6 * PAGE, 2 => 1..40 * PAGE, 1 => Just(200 * PAGE)];
    let align_log = prop_oneof![3 => 0..13_u32, 1 => 13..17_u32];
    prop_oneof![
        12 => (bytes, align_log, 0..=ARENAS, 0..4_u32).prop_map(
            |(bytes, align_log, arena, tag)| Op::Allocate { bytes, align_log, arena, tag }),
        8 => which.prop_map(|which| Op::Free { which }),
        5 => (which, 0..8 * PAGE).prop_map(|(which, offset)| Op::Claim { which, offset }),
        2 => which.prop_map(|which| Op::Unclaim { which }),
        4 => which.prop_map(|which| Op::FinishFree { which }),
        4 => which.prop_map(|which| Op::Sleep { which }),
        3 => which.prop_map(|which| Op::Wake { which }),
        1 => (0..20_u64).prop_map(|pages| Op::Reserve { pages }),
        1 => (0..20_u64).prop_map(|pages| Op::Unreserve { pages }),
        2 => (0..30 * PAGE as u64).prop_map(|bytes| Op::Trim { bytes }),
        1 => prop_oneof![1..BUDGET_PAGES, Just(BUDGET_PAGES)].prop_map(|pages| Op::Budget { pages }),
        2 => (0..ARENAS).prop_map(|which| Op::ReopenArena { which }),
        1 => which.prop_map(|which| Op::Stale { which }),
    ]
}

/// The model: a list of blocks as they should be reported, and plain sums.
struct Model {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
    blocks: Vec<BlockInfo>,
    gone: Vec<BlockInfo>,
    arenas: Vec<ArenaId>,
    staged_bytes: u64,
    budget_bytes: u64,
    mapped_bytes_before: u64,
    allocated_total: u64,
    peak_allocated_bytes: u64,
    ooms: u64,
    /// Offsets of all allocations so far.
    trace: Vec<Option<usize>>,
}

type Checked = Result<(), TestCaseError>;

impl Model {
    fn new() -> Self {
        let (device, allocator) = allocator(SPACE_PAGES, BUDGET_PAGES);
        let arenas = (0..ARENAS).map(|_| allocator.arena_create().unwrap()).collect();
        Self {
            device,
            allocator,
            blocks: Vec::new(),
            gone: Vec::new(),
            arenas,
            staged_bytes: 0,
            budget_bytes: (BUDGET_PAGES * PAGE) as u64,
            mapped_bytes_before: 0,
            allocated_total: 0,
            peak_allocated_bytes: 0,
            ooms: 0,
            trace: Vec::new(),
        }
    }

    fn sum(&self, of: impl Fn(&BlockInfo) -> bool) -> u64 {
        self.blocks.iter().filter(|it| of(it)).map(|it| it.range.bytes as u64).sum()
    }

    /// Bytes that no trim can give back.
    fn held_bytes(&self) -> u64 {
        self.sum(|it| !it.asleep) + self.staged_bytes
    }

    fn cached_bytes(&self) -> u64 {
        self.device.mapped_bytes() - self.sum(|it| !it.asleep)
    }

    fn apply(&mut self, op: Op) -> Checked {
        let pick = |which: usize, len: usize| (len > 0).then(|| which % len);
        match op {
            Op::Allocate { bytes, align_log, arena, tag } => {
                let arena = self.arenas.get(arena).copied();
                let align = 1 << align_log;
                let scope = tag.into();
                let fill = if tag % 2 == 0 { Fill::Any } else { Fill::Zero };
                self.allocate(&Request {
                    bytes,
                    align,
                    stream: 5,
                    arena,
                    scope,
                    tag,
                    fill,
                    whole_pages: false,
                })
            }
            Op::Free { which } => pick(which, self.blocks.len()).map_or(Ok(()), |it| self.free(it)),
            Op::Claim { which, offset } => {
                pick(which, self.blocks.len()).map_or(Ok(()), |it| self.claim(it, offset))
            }
            Op::Unclaim { which } => {
                pick(which, self.blocks.len()).map_or(Ok(()), |it| self.unclaim(it))
            }
            Op::FinishFree { which } => {
                pick(which, self.blocks.len()).map_or(Ok(()), |it| self.finish_free(it))
            }
            Op::Sleep { which } => {
                pick(which, self.blocks.len()).map_or(Ok(()), |it| self.sleep(it))
            }
            Op::Wake { which } => pick(which, self.blocks.len()).map_or(Ok(()), |it| self.wake(it)),
            Op::Reserve { pages } => self.reserve(pages * PAGE as u64),
            Op::Unreserve { pages } => self.unreserve(pages * PAGE as u64),
            Op::Trim { bytes } => {
                let cached = self.cached_bytes();
                let wanted = bytes.next_multiple_of(PAGE as u64);
                prop_assert_eq!(self.allocator.trim(bytes), wanted.min(cached));
                Ok(())
            }
            Op::Budget { pages } => {
                self.budget_bytes = (pages * PAGE) as u64;
                self.allocator.set_budget(self.budget_bytes).unwrap();
                let mapped_bytes = self.device.mapped_bytes() + self.staged_bytes;
                prop_assert!(mapped_bytes <= self.budget_bytes.max(self.held_bytes()));
                Ok(())
            }
            Op::ReopenArena { which } => {
                let closed = std::mem::replace(
                    &mut self.arenas[which],
                    self.allocator.arena_create().unwrap(),
                );
                self.allocator.arena_close(closed);
                let request = Request { arena: Some(closed), ..Request::new(1) };
                let refused = self.allocator.allocate(&request);
                prop_assert!(
                    matches!(refused, Err(AllocError::UnknownArena { .. })),
                    "{refused:?}"
                );
                self.allocator.arena_close(closed);
                Ok(())
            }
            Op::Stale { which } => pick(which, self.gone.len()).map_or(Ok(()), |it| self.stale(it)),
        }
    }

    fn allocate(&mut self, request: &Request) -> Checked {
        let rounded = request.bytes.next_multiple_of(PAGE);
        let block = match self.allocator.allocate(request) {
            Ok(block) => block,
            Err(AllocError::OutOfMemory(report)) => {
                // Never a false one: with all of the cache gone it would still not fit.
                prop_assert_eq!(report.cause, Cause::Budget, "{}", report);
                prop_assert!(self.held_bytes() + rounded as u64 > self.budget_bytes, "{report}");
                prop_assert!(report.to_string().lines().count() <= 12);
                self.ooms += 1;
                self.trace.push(None);
                return Ok(());
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        let AddressRange { start, bytes } = block.range;
        prop_assert_eq!(bytes, rounded);
        prop_assert_eq!(start % request.align.max(PAGE), 0);
        let overlap =
            self.blocks.iter().find(|it| start < it.range.end() && it.range.start < start + bytes);
        prop_assert!(overlap.is_none(), "{block:?} overlaps {overlap:?}");
        let (mapped, dirty) = self.device.touch(block.range);
        prop_assert!(mapped, "{block:?} has no pages");
        prop_assert_eq!(block.zeroed, !dirty);
        prop_assert!(self.device.mapped_bytes() + self.staged_bytes <= self.budget_bytes);
        self.trace.push(Some(start - BASE));
        self.allocated_total += 1;
        self.blocks.push(BlockInfo {
            id: block.id,
            range: block.range,
            pages: block.range,
            requested_bytes: request.bytes,
            scope: request.scope,
            tag: request.tag,
            arena: request.arena,
            wakes_large: false,
            claimed: None,
            asleep: false,
            free_deferred: false,
            stream: request.stream,
        });
        Ok(())
    }

    /// The user frees block `at`, by its start; first by an address inside, which is refused.
    fn free(&mut self, at: usize) -> Checked {
        let block = self.blocks[at];
        if !block.free_deferred {
            let inside = self.allocator.free(block.range.start + 1, 0);
            prop_assert!(matches!(inside, Err(AllocError::NotBlockStart { .. })), "{inside:?}");
        }
        match self.allocator.free(block.range.start, 0) {
            Ok(Freed::Done) => {
                prop_assert!(!block.free_deferred && block.claimed.is_none());
                self.remove(at);
            }
            Ok(Freed::Claimed(owner)) => {
                prop_assert!(!block.free_deferred && block.claimed == Some(owner));
                self.blocks[at].free_deferred = true;
            }
            Err(AllocError::FreeDeferred { .. }) => prop_assert!(block.free_deferred),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
        Ok(())
    }

    fn claim(&mut self, at: usize, offset: usize) -> Checked {
        let block = self.blocks[at];
        let address = block.range.start + offset % block.range.bytes;
        match self.allocator.claim(address, 77) {
            Ok(info) => {
                prop_assert!(!block.free_deferred && block.claimed.is_none());
                self.blocks[at].claimed = Some(77);
                prop_assert_eq!(info, self.blocks[at]);
            }
            Err(AllocError::FreeDeferred { .. }) => prop_assert!(block.free_deferred),
            Err(AllocError::AlreadyClaimed { .. }) => prop_assert!(block.claimed.is_some()),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
        Ok(())
    }

    fn unclaim(&mut self, at: usize) -> Checked {
        let block = self.blocks[at];
        let result = self.allocator.unclaim(block.id);
        let allowed = block.claimed.is_some() && (block.free_deferred || !block.asleep);
        prop_assert_eq!(result.is_ok(), allowed, "{:?}", result);
        match (allowed, block.free_deferred) {
            (true, true) => self.remove(at),
            (true, false) => self.blocks[at].claimed = None,
            (false, _) => {}
        }
        Ok(())
    }

    fn finish_free(&mut self, at: usize) -> Checked {
        let block = self.blocks[at];
        prop_assert_eq!(self.allocator.finish_free(block.id).is_ok(), block.free_deferred);
        if block.free_deferred {
            self.remove(at);
        }
        Ok(())
    }

    fn sleep(&mut self, at: usize) -> Checked {
        let block = self.blocks[at];
        let allowed = block.claimed.is_some() && !block.asleep;
        if allowed {
            self.device.take_pages(block.range);
            self.blocks[at].asleep = true;
        }
        prop_assert_eq!(self.allocator.set_asleep(block.id).is_ok(), allowed);
        Ok(())
    }

    fn wake(&mut self, at: usize) -> Checked {
        let block = self.blocks[at];
        let bytes = block.range.bytes as u64;
        let before = self.staged_bytes;
        if block.asleep {
            self.reserve(bytes)?;
        }
        let reserved = self.staged_bytes > before;
        if self.staged_bytes < bytes {
            prop_assert!(self.allocator.set_awake(block.id).is_err());
        } else if block.asleep && reserved {
            self.device.bring_pages(block.range);
            self.device.touch(block.range);
            self.blocks[at].asleep = false;
            self.staged_bytes -= bytes;
            prop_assert!(self.allocator.set_awake(block.id).is_ok());
        }
        Ok(())
    }

    fn reserve(&mut self, bytes: u64) -> Checked {
        match self.allocator.reserve_awake(bytes) {
            Ok(()) => {
                self.staged_bytes += bytes;
                prop_assert!(self.held_bytes() <= self.budget_bytes);
            }
            Err(AllocError::NoRoom { .. }) => {
                prop_assert!(self.held_bytes() + bytes > self.budget_bytes);
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
        Ok(())
    }

    fn unreserve(&mut self, bytes: u64) -> Checked {
        let result = self.allocator.unreserve_awake(bytes);
        prop_assert_eq!(result.is_ok(), bytes <= self.staged_bytes);
        self.staged_bytes -= if result.is_ok() { bytes } else { 0 };
        Ok(())
    }

    /// An id that outlived its block gets nothing done.
    fn stale(&mut self, at: usize) -> Checked {
        let id = self.gone[at].id;
        for result in [
            self.allocator.unclaim(id),
            self.allocator.finish_free(id),
            self.allocator.set_asleep(id),
            self.allocator.set_awake(id),
            self.allocator.info(id).map(drop),
        ] {
            prop_assert!(matches!(result, Err(AllocError::StaleBlock { .. })), "{result:?}");
        }
        Ok(())
    }

    fn remove(&mut self, at: usize) {
        let block = self.blocks.swap_remove(at);
        self.gone.push(block);
    }

    /// Everything that can be seen from outside, compared.
    fn compare(&mut self) -> Checked {
        prop_assert_eq!(self.allocator.check(), Ok(()));
        prop_assert_eq!(self.device.violations(), Vec::<String>::new());
        let stats = self.allocator.stats();
        let active = self.sum(|it| !it.asleep);
        let pages = self.device.mapped_bytes();
        let requested: usize =
            self.blocks.iter().filter(|it| !it.free_deferred).map(|it| it.requested_bytes).sum();
        let allocated = self.sum(|it| !it.asleep && !it.free_deferred);
        self.peak_allocated_bytes = self.peak_allocated_bytes.max(allocated);
        for (name, figure, expected) in [
            ("allocated", stats.allocated_bytes.current, allocated),
            ("allocated peak", stats.allocated_bytes.peak, self.peak_allocated_bytes),
            ("active", stats.active_bytes.current, active),
            ("asleep", stats.asleep_bytes.current, self.sum(|it| it.asleep)),
            ("requested", stats.requested_bytes.current, requested as u64),
            ("mapped", stats.mapped_bytes.current, pages + self.staged_bytes),
            ("cached", stats.cached_bytes.current, pages - active),
            ("staged", stats.staged_bytes.current, self.staged_bytes),
            ("allocations", stats.allocations.added_total, self.allocated_total),
            ("ooms", stats.ooms, self.ooms),
            ("maps", stats.maps, self.device.maps()),
            ("budget", stats.budget_bytes, self.budget_bytes),
        ] {
            prop_assert_eq!(figure, expected, "{}", name);
        }
        // Above a lowered budget it can only go down (I2).
        let mapped_bytes = pages + self.staged_bytes;
        prop_assert!(mapped_bytes <= self.budget_bytes.max(self.mapped_bytes_before), "{stats:?}");
        self.mapped_bytes_before = mapped_bytes;
        let by_start = |block: &BlockInfo| block.range.start;
        let mut found = self.allocator.blocks();
        found.sort_by_key(by_start);
        let mut expected = self.blocks.clone();
        expected.sort_by_key(by_start);
        prop_assert_eq!(&found, &expected);
        for block in &expected {
            let seen = (!block.free_deferred).then_some(*block);
            let AddressRange { start, bytes } = block.range;
            for address in [start, start + bytes / 2, start + bytes - 1] {
                prop_assert_eq!(self.allocator.lookup(address), seen);
            }
            prop_assert_eq!(self.allocator.info(block.id).unwrap(), *block);
        }
        for block in self.gone.iter().rev().take(4) {
            let start = block.range.start;
            let held = self.blocks.iter().find(|it| it.range.contains(start) && !it.free_deferred);
            prop_assert_eq!(self.allocator.lookup(start), held.copied());
        }
        Ok(())
    }

    /// Everything is let go: nothing must be left.
    fn wind_down(&mut self) -> Checked {
        for block in std::mem::take(&mut self.blocks) {
            if !block.free_deferred {
                let _ = self.allocator.free(block.range.start, 0).unwrap();
            }
            if block.claimed.is_some() {
                self.allocator.finish_free(block.id).unwrap();
            }
        }
        self.unreserve(self.staged_bytes)?;
        for arena in self.arenas.drain(..) {
            self.allocator.arena_close(arena);
        }
        self.compare()?;
        self.allocator.trim(u64::MAX);
        self.compare()?;
        let Stats { segments, arenas, mapped_bytes, .. } = self.allocator.stats();
        prop_assert_eq!((segments.current, arenas.current, mapped_bytes.current), (0, 0, 0));
        prop_assert_eq!(self.allocator.blocks(), []);
        Ok(())
    }
}

fn run(ops: &[Op]) -> Result<Vec<Option<usize>>, TestCaseError> {
    let mut model = Model::new();
    for &op in ops {
        model.apply(op)?;
        model.compare()?;
    }
    model.wind_down()?;
    Ok(model.trace)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// I1 to I3, I6 and I7, budget, figures and lookups, after every single operation.
    #[test]
    fn agrees_with_the_model_and_repeats_itself(ops in proptest::collection::vec(op(), 1..100)) {
        prop_assert_eq!(run(&ops)?, run(&ops)?);
    }
}
