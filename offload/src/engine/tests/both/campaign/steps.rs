//! What an owner does, and what is put in its way.

use std::time::Duration;

use dormouse_alloc::Request;
use dormouse_device::{Device, Operation};

use super::world::{Content, LIVE_UNITS_MAX, Mine, Stashed, World};
use crate::engine::SleepOutcome;
use crate::engine::tests::campaign::errors::{REFUSED, TORN, To, refused};
use crate::engine::tests::campaign::script::{Disk, Kind, Op};
use crate::engine::tests::campaign::tally::Tally;
use crate::engine::tests::{holds, soon};
use crate::engine::transfers::CopyStream;
use crate::error::OffloadError;
use crate::ids::{Role, Tier, label};
use dormouse_residency::region::RegionState;

/// Dormant regions whose units are a multiple of this are that many blocks.
const SEVERAL_ONE_OF: usize = 3;
/// Long enough for other threads to get somewhere, most of the time.
const PAUSE: Duration = Duration::from_micros(50);

impl World {
    pub(super) fn step(&mut self, op: &Op, tally: &mut Tally) {
        match *op {
            Op::Allocate { units, kind } => self.allocate(units, kind, tally),
            Op::Write(at) => {
                if let Some(at) = self.pick(at, |m| m.is_sure) {
                    self.write(at);
                }
            }
            Op::WriteAsleep(at) => self.write_asleep(at, tally),
            Op::Sleep { at, count, tier } => self.sleep(&self.pick_regions(at, count), tier, tally),
            Op::SleepLate { at, tier } => self.sleep_late(at, tier, tally),
            Op::Wake { at, count } => self.wake(&self.pick_regions(at, count)),
            Op::WaitAwake { at, count } => self.wait_awake(&self.pick_regions(at, count), tally),
            Op::WaitSettled => self.wait_settled(),
            Op::SleepThenWake { at, tier } => {
                let places = self.pick_regions(at, 1);
                self.sleep(&places, tier, tally);
                self.wake(&places);
            }
            Op::WakeThenSleep { at, tier } => {
                let places = self.pick_asleep(at);
                self.wake_and_look(&places, tally);
                self.sleep(&places, tier, tally);
            }
            Op::WakeThenFree(at) => {
                let places = self.pick_asleep(at);
                self.wake_and_look(&places, tally);
                places.first().into_iter().for_each(|&at| self.free(at));
            }
            Op::SleepThenFree { at, tier } => {
                let places = self.pick_regions(at, 1);
                self.sleep(&places, tier, tally);
                places.first().into_iter().for_each(|&at| self.free(at));
            }
            Op::Free(at) => {
                if let Some(picked) = self.pick(at, |_| true) {
                    self.free_some(picked, at);
                }
            }
            Op::Release(at) => self.release(at, tally),
            Op::TagSleep { keeps, tier } => self.tag_sleep(keeps, tier, tally),
            Op::TagWake { keeps } => {
                self.let_events_go();
                let engine = &self.fixture.engine;
                engine.wake(&engine.tag_regions(self.tags[usize::from(keeps)]).unwrap());
            }
            Op::TagWait { keeps } => self.tag_wait(keeps, tally),
            Op::Stash(at) => self.stash(at, tally),
            Op::Unstash { at, into } => self.unstash(at, into, tally),
            Op::StashDrop(at) => {
                if !self.stashes.is_empty() {
                    let stash = self.stashes.swap_remove(at % self.stashes.len());
                    self.fixture.engine.stash_drop(stash.id).unwrap();
                }
            }
            Op::Budget { tier, units } => {
                self.let_events_go();
                let bytes = units * self.unit_bytes as u64;
                self.fixture.engine.set_tier_budget(tier, bytes).unwrap();
                tally.done(&format!("{tier:?} budget changed"), 1);
            }
            _ => self.put_in_the_way(op, tally),
        }
    }

    fn put_in_the_way(&mut self, op: &Op, tally: &mut Tally) {
        match *op {
            Op::Disk(ref disk) => self.disk(disk),
            Op::Refuse { operation, nth, count } => {
                self.armed.refused.insert(operation);
                for nth in nth..nth + count {
                    self.fixture.device().fail(operation, nth, refused(operation, REFUSED));
                }
            }
            Op::RefuseAnswers(count) => {
                self.armed.refused.extend([Operation::Event, Operation::Callback]);
                self.fixture.turn.refuse_answers(count);
            }
            Op::Tear(nth) => {
                self.armed.torn = true;
                let error = refused(Operation::Copy, TORN);
                self.fixture.device().tear(nth, error);
            }
            Op::Spoil { at, byte } => self.spoil(at, byte, tally),
            Op::Hold { writes, reads } => self.fixture.faults.hold(writes, reads),
            Op::HoldEvents => self.fixture.device().hold_events(),
            Op::LetGo => self.let_go(),
            Op::Pause => std::thread::sleep(PAUSE),
            Op::Heal => self.heal(),
            _ => unreachable!("{op:?} is an owner's"),
        }
    }

    fn disk(&mut self, disk: &Disk) {
        let (faults, armed) = (&self.fixture.faults, &mut self.armed);
        match *disk {
            Disk::Full(bytes) => {
                armed.full_disk = true;
                faults.fail_writes_after(bytes, libc::ENOSPC);
            }
            Disk::FailWrites(bytes) => {
                armed.failed_writes = true;
                faults.fail_writes_after(bytes, libc::EIO);
            }
            Disk::FailReads(times) => {
                armed.failed_reads = true;
                faults.fail_next_reads(times, libc::EIO);
            }
            Disk::Cut(ref lengths) => {
                armed.short = true;
                faults.cut_next(lengths);
            }
            Disk::Interrupt(times) => faults.interrupt_next(times),
            Disk::FlipReads(times) => {
                armed.flips = true;
                faults.flip_next_reads(times);
            }
            Disk::FlipWrites(times) => {
                armed.flips = true;
                faults.flip_next_writes(times);
            }
            Disk::Delay(times) => faults.delay_next(times),
        }
    }

    fn allocate(&mut self, units: usize, kind: Kind, tally: &mut Tally) {
        let bytes = units * self.unit_bytes;
        let live_bytes: usize = self.mine.iter().map(|m| m.bytes).sum();
        if (live_bytes + bytes) as u64 > LIVE_UNITS_MAX * self.unit_bytes as u64 {
            return;
        }
        self.let_go();
        let has_several_blocks =
            matches!(kind, Kind::Dormant | Kind::Eligible) && units.is_multiple_of(SEVERAL_ONE_OF);
        let units_each =
            if has_several_blocks { vec![1, units / SEVERAL_ONE_OF, 1] } else { vec![units] };
        let mut blocks = Vec::new();
        for units in units_each {
            let bytes = units * self.unit_bytes;
            match self.fixture.allocator.allocate(&Request::new(bytes)) {
                Ok(block) => blocks.push((block.range.start, bytes)),
                Err(e) => {
                    for (address, _) in blocks {
                        self.fixture.engine.free(address, 0).unwrap();
                    }
                    return self.met(To::Allocate, e, tally);
                }
            }
        }
        let address = blocks[0].0;
        let bytes = blocks.iter().map(|&(_, bytes)| bytes).sum();
        let engine = &self.fixture.engine;
        let name = label("campaign", Some(units as u32));
        let id = match kind {
            Kind::Plain => None,
            Kind::Dormant | Kind::Eligible => {
                let starts: Vec<usize> = blocks.iter().map(|&(address, _)| address).collect();
                let adopted = engine.adopt_together(&starts, Role::Dormant, name, None).unwrap();
                assert!(adopted.refused.is_empty(), "{adopted:?}");
                tally.done("regions of several blocks", u64::from(has_several_blocks));
                adopted.id
            }
            Kind::Tagged => Some(engine.tag_add(self.tags[1], address).unwrap()),
            Kind::Dropped => Some(engine.tag_add(self.tags[0], address).unwrap()),
        };
        let content = Content::Zero;
        let (is_partial, is_sure) = (false, true);
        self.mine.push(Mine { id, blocks, bytes, kind, content, is_partial, is_sure });
        let at = self.mine.len() - 1;
        self.write(at);
        self.offer(&[at]);
    }

    /// Offers the eligible ones to allocations that run short.
    fn offer(&mut self, places: &[usize]) {
        for &at in places {
            let mine = &mut self.mine[at];
            if let (Kind::Eligible, Some(id)) = (mine.kind, mine.id) {
                mine.is_sure = false;
                self.fixture.engine.let_reclaim(&[id], &[]);
            }
        }
    }

    fn sleep(&mut self, places: &[usize], tier: Tier, tally: &mut Tally) {
        self.sleep_behind(places, tier, &[], tally);
    }

    fn sleep_behind(
        &mut self,
        places: &[usize],
        tier: Tier,
        after: &[<super::TestDevice as Device>::Event],
        tally: &mut Tally,
    ) {
        let bytes = places.iter().map(|&at| self.mine[at].bytes as u64).sum();
        // Of several blocks some may have left their region.
        let is_one = |m: &Mine| m.blocks.len() == 1 && !m.is_partial;
        let is_whole = places.iter().all(|&at| is_one(&self.mine[at]));
        let slept = self.fixture.engine.sleep(&self.ids(places), tier, after);
        places.iter().for_each(|&at| self.mine[at].is_sure = false);
        match slept {
            Ok(outcome) if is_whole => assert_whole(&outcome, bytes),
            Ok(outcome) => assert!(outcome.accepted_bytes + outcome.declined_bytes <= bytes),
            Err(e) => self.met(To::Sleep, e, tally),
        }
    }

    fn sleep_late(&mut self, at: usize, tier: Tier, tally: &mut Tally) {
        let places = self.pick_regions(at, 1);
        let device = self.fixture.device();
        device.hold_events();
        // A refusal that was meant for the engine may meet us.
        if let Ok(event) = device.record(&self.fixture.here()) {
            self.sleep_behind(&places, tier, &[event], tally);
            tally.done("sleeps behind late events", 1);
        }
    }

    /// A write of the owner's while its bytes are going to the file: frozen memory is guarded on
    /// the host device, and nowhere else may an owner do so. Not of what goes through host memory,
    /// whose pages may be gone by then.
    fn write_asleep(&mut self, at: usize, tally: &mut Tally) {
        let is_one = |m: &Mine| m.id.is_some_and(|id| !self.fixture.engine.has_several_blocks(id));
        let Some(at) = self.pick(at, |m| m.is_sure && is_one(m)) else { return };
        if self.fixture.engine.is_direct {
            // What comes later is held up: the pages stay where they are.
            self.fixture.faults.hold(true, false);
            self.sleep(&[at], Tier::Nvme, tally);
        }
        self.write(at);
    }

    /// Half of them ahead of need.
    fn wake(&self, places: &[usize]) {
        self.let_events_go();
        let (now, ahead): (Vec<_>, Vec<_>) = places.iter().partition(|&&at| at % 2 == 0);
        self.fixture.engine.wake(&self.ids(&now));
        self.fixture.engine.wake_ahead(&self.ids(&ahead));
    }

    /// A wake that something else follows; it is cancelled where it was not over by then.
    fn wake_and_look(&self, places: &[usize], tally: &mut Tally) {
        self.wake(places);
        let is_under_way =
            |id| matches!(self.stands(id), RegionState::Loading | RegionState::Waking);
        let count = self.ids(places).into_iter().filter(|&id| is_under_way(id)).count();
        tally.done("wakes under way when another call came", count as u64);
    }

    fn wait_awake(&mut self, places: &[usize], tally: &mut Tally) {
        self.let_go();
        let ids = self.ids(places);
        // As a prefix does: it first forbids the sleep, then wakes.
        self.fixture.engine.forbid_reclaim(&ids);
        match self.fixture.engine.wait_awake(&ids) {
            Ok(_) => places.iter().for_each(|&at| {
                self.mine[at].is_sure = true;
                self.mine[at].verify();
            }),
            Err(e) => {
                places.iter().for_each(|&at| self.mine[at].is_sure = false);
                self.met(To::WaitAwake, e, tally);
            }
        }
        self.offer(places);
    }

    pub(super) fn wait_settled(&self) {
        self.let_go();
        let ids = self.ids(&(0..self.mine.len()).collect::<Vec<_>>());
        let engine = &self.fixture.engine;
        engine.wait_settled(&ids).unwrap();
        assert!(ids.iter().all(|&id| {
            use RegionState::{Awake, Empty, Gone, Host, Nvme};
            matches!(self.stands(id), Awake | Host | Nvme | Empty | Gone)
        }));
        // A region freed during its transfer has no waiter. The transfer ends all the same.
        soon("nothing is on its way", || {
            let stats = engine.stats();
            (stats.inflight_bytes, stats.queued_bytes) == (0, 0)
        });
    }

    fn free(&mut self, at: usize) {
        let mine = self.mine.swap_remove(at);
        for (address, _) in mine.blocks {
            self.fixture.engine.free(address, 0).unwrap();
        }
    }

    /// Now and then the last of several blocks alone.
    fn free_some(&mut self, at: usize, chance: usize) {
        let blocks = &mut self.mine[at].blocks;
        if chance.is_multiple_of(2) && blocks.len() > 1 {
            let last = blocks.pop();
            self.mine[at].is_partial = true;
            last.into_iter().for_each(|(address, _)| self.fixture.engine.free(address, 0).unwrap());
        } else {
            self.free(at);
        }
    }

    fn release(&mut self, at: usize, tally: &mut Tally) {
        let Some(&at) = self.pick_regions(at, 1).first() else { return };
        self.let_go();
        let Some(id) = self.mine[at].id else { return };
        match self.fixture.engine.release(id) {
            Err(e @ OffloadError::NotAwake { .. }) => return self.met(To::Release, e, tally),
            Err(OffloadError::Stale { .. }) if self.mine[at].is_partial => {}
            Err(e) => {
                self.met(To::Release, e, tally);
                // It is ours all the same; its bytes come with the copy that was not waited for.
                let stream = self.fixture.engine.stream(CopyStream::In).unwrap();
                assert!(self.fixture.engine.await_copies(&stream));
            }
            Ok(()) => {}
        }
        let mine = &mut self.mine[at];
        (mine.id, mine.kind, mine.is_sure) = (None, Kind::Plain, true);
        mine.verify();
    }

    fn under(&self, keeps: bool) -> Vec<usize> {
        let kind = if keeps { Kind::Tagged } else { Kind::Dropped };
        (0..self.mine.len()).filter(|&at| self.mine[at].kind == kind).collect()
    }

    fn tag_sleep(&mut self, keeps: bool, tier: Tier, tally: &mut Tally) {
        self.let_events_go();
        let places = self.under(keeps);
        let slept = self.fixture.engine.tag_sleep(self.tags[usize::from(keeps)], tier, &[]);
        for &at in &places {
            let mine = &mut self.mine[at];
            mine.is_sure = false;
            if let (Content::Filled(seed), false) = (mine.content, keeps) {
                mine.content = Content::Either(seed);
            }
        }
        match slept {
            // What was freed on its way and has not come to its end is under the tag still.
            Ok(outcome) => {
                let bytes: u64 = places.iter().map(|&at| self.mine[at].bytes as u64).sum();
                assert_whole(&outcome, bytes.max(outcome.accepted_bytes + outcome.declined_bytes));
            }
            Err(e) => self.met(To::Sleep, e, tally),
        }
    }

    fn tag_wait(&mut self, keeps: bool, tally: &mut Tally) {
        self.let_go();
        match self.fixture.engine.tag_wait(self.tags[usize::from(keeps)]) {
            Ok(_) => {
                self.finish_here();
                for at in self.under(keeps) {
                    self.mine[at].is_sure = true;
                    self.mine[at].verify();
                }
            }
            Err(e) => {
                self.under(keeps).into_iter().for_each(|at| self.mine[at].is_sure = false);
                self.met(To::WaitAwake, e, tally);
            }
        }
    }

    fn stash(&mut self, at: usize, tally: &mut Tally) {
        let Some(at) = self.pick(at, |m| m.is_sure) else { return };
        let Content::Filled(seed) = self.mine[at].content else { return };
        let (address, bytes) = self.mine[at].first();
        self.let_go();
        let here = self.fixture.here();
        // SAFETY: a live, awake block of the owner's.
        match unsafe { self.fixture.engine.stash_put(address, bytes, seed, &here) } {
            Ok(id) => self.stashes.push(Stashed { id, bytes, seed }),
            Err(e) => self.met(To::Stash, e, tally),
        }
    }

    fn unstash(&mut self, at: usize, into: usize, tally: &mut Tally) {
        if self.stashes.is_empty() {
            return;
        }
        let Stashed { id, bytes, seed } = self.stashes[at % self.stashes.len()];
        let Some(into) = self.pick(into, |m| m.is_sure && m.first().1 >= bytes) else { return };
        self.let_go();
        let (address, here) = (self.mine[into].first().0, self.fixture.here());
        // SAFETY: a live, awake block of the owner's, as long as the stash.
        match unsafe { self.fixture.engine.stash_get(id, address, &here) } {
            Ok(copied_bytes) => {
                assert_eq!(copied_bytes, bytes as u64);
                assert!(holds(address, bytes, seed), "a stash came back with other bytes");
            }
            Err(e) => self.met(To::Stash, e, tally),
        }
        self.write(into);
    }

    fn spoil(&mut self, at: usize, byte: u64, tally: &mut Tally) {
        let engine = &self.fixture.engine;
        let rests = |m: &Mine| m.id.is_some_and(|id| self.stands(id) == RegionState::Nvme);
        let Some(at) = self.pick(at, rests) else { return };
        let offset = self.mine[at].id.and_then(|id| engine.extent_offset(id)).unwrap();
        self.fixture.faults.spoil(offset + byte % self.mine[at].bytes as u64);
        self.armed.flips = true;
        tally.fired("FlippedAtRest", 1);
    }
}

/// Every byte was accepted or declined, and a decline has a reason.
fn assert_whole(outcome: &SleepOutcome, bytes: u64) {
    assert_eq!(outcome.accepted_bytes + outcome.declined_bytes, bytes, "{outcome:?}");
    assert!(outcome.declined_bytes == 0 || outcome.declined.is_some(), "{outcome:?}");
}
