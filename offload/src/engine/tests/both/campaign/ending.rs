//! How sequences end: whatever befell them, each byte is there and nothing is left.

use std::sync::Arc;

use dormouse_alloc::Request;
use dormouse_device::Device;

use super::Fixture;
use super::world::{CAPACITY_UNITS, Mine, World};
use crate::engine::Stats;
use crate::engine::tests::campaign::errors::To;
use crate::engine::tests::campaign::script::{Ending, Kind, REFUSING};
use crate::engine::tests::campaign::tally::Tally;
use crate::engine::tests::{holds, soon};
use crate::ids::Tier;
use dormouse_residency::region::RegionState;
use dormouse_storage::testing::Mishap;

impl World {
    pub(super) fn end(mut self, ending: Ending, tally: &mut Tally) {
        self.let_go();
        match ending {
            Ending::Verify => {
                self.heal();
                self.wake_all(tally);
                self.unstash_all(tally);
                self.mend_all();
                self.sleep_again();
                self.count(&self.fixture.engine.stats(), tally);
                self.give_all_back();
            }
            Ending::ShutDown => {
                self.fixture.engine.shutdown();
                self.armed.shut_down = true;
                self.heal();
                self.wake_all(tally);
                self.count(&self.fixture.engine.stats(), tally);
                self.free_all();
            }
            Ending::DropEngine => {
                self.count(&self.fixture.engine.stats(), tally);
                return self.drop_engine();
            }
        }
        self.fixture.assert_empty();
        self.assert_stopped_for_a_reason();
        self.assert_file_is_whole();
    }

    /// Wakes each region that can be woken, and looks at it.
    fn wake_all(&mut self, tally: &mut Tally) {
        // A step that was failed before may be waited for still.
        self.wait_settled();
        let bytes = CAPACITY_UNITS * self.unit_bytes as u64;
        self.fixture.engine.set_tier_budget(Tier::Device, bytes).unwrap();
        for at in 0..self.mine.len() {
            let Some(id) = self.mine[at].id else {
                self.mine[at].verify();
                continue;
            };
            self.fixture.engine.forbid_reclaim(&[id]);
            let Err(e) = self.fixture.engine.wait_awake(&[id]) else {
                self.mine[at].verify();
                self.mine[at].is_sure = true;
                continue;
            };
            self.mine[at].is_sure = false;
            let name = self.armed.explain(To::WaitAwake, e);
            tally.error(name);
            match name {
                // The only copy: it is said to be wrong, and stays what it is.
                "Corrupted" => {
                    assert_eq!(self.fixture.state(id), RegionState::Nvme);
                    let start = self.fixture.engine.extent_offset(id).unwrap();
                    let range = start..start + self.mine[at].bytes as u64;
                    assert!(self.fixture.faults.is_spoiled(range), "{:?}", self.mine[at]);
                }
                "ShutDown" => {}
                _ => panic!("{name}, though all is healed: {:?}", self.mine[at]),
            }
        }
    }

    /// Once the disk is right again, so is what was said to be wrong.
    fn mend_all(&mut self) {
        self.fixture.faults.mend();
        for mine in self.mine.iter_mut().filter(|m| !m.is_sure) {
            self.fixture.engine.wait_awake(&mine.id.into_iter().collect::<Vec<_>>()).unwrap();
            mine.verify();
        }
        self.assert_stashes(|e| panic!("{e}, though the disk is right"));
    }

    /// Faults that are over have no say any more: what has a place goes there, and comes back.
    fn sleep_again(&mut self) {
        for tier in [Tier::Host, Tier::Nvme] {
            self.fixture.engine.set_tier_budget(tier, self.file_bytes).unwrap();
        }
        let ids = self.ids(&(0..self.mine.len()).collect::<Vec<_>>());
        let mut accepted = Vec::new();
        for &id in &ids {
            let outcome = self.fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
            accepted.extend((outcome.accepted_bytes > 0).then_some(id));
        }
        self.fixture.engine.wait_settled(&ids).unwrap();
        assert!(
            accepted.iter().all(|&id| self.fixture.state(id) == RegionState::Nvme),
            "{accepted:?}"
        );
        self.fixture.engine.wait_awake(&ids).unwrap();
        self.mine.iter_mut().for_each(Mine::verify);
    }

    fn unstash_all(&self, tally: &mut Tally) {
        let mut errors = Vec::new();
        self.assert_stashes(|e| errors.push(e));
        for e in errors {
            let name = self.armed.explain(To::Stash, e);
            assert_eq!(name, "Corrupted", "though all is healed");
            assert!(self.fixture.faults.is_spoiled(0..self.file_bytes));
            tally.error(name);
        }
    }

    /// Copies every stash back into a block of its own, and looks at it.
    fn assert_stashes(&self, mut failed: impl FnMut(crate::error::OffloadError)) {
        for stash in &self.stashes {
            let block = self.fixture.allocator.allocate(&Request::new(stash.bytes)).unwrap();
            let (address, here) = (block.range.start, self.fixture.here());
            // SAFETY: a live, awake block of the owner's, as long as the stash.
            match unsafe { self.fixture.engine.stash_get(stash.id, address, &here) } {
                Ok(_) => assert!(holds(address, stash.bytes, stash.seed), "{stash:?}"),
                Err(e) => failed(e),
            }
            self.fixture.engine.free(address, 0).unwrap();
        }
    }

    /// The owner takes some of it back by name, and frees everything.
    fn give_all_back(&mut self) {
        for tag in self.tags {
            self.fixture.engine.tag_destroy(tag).unwrap();
        }
        for mine in &mut self.mine {
            if matches!(mine.kind, Kind::Tagged | Kind::Dropped) {
                mine.verify();
                assert_eq!(self.fixture.engine.region_at(mine.first().0), None);
            }
        }
        self.free_all();
    }

    fn free_all(&mut self) {
        for (address, _) in std::mem::take(&mut self.mine).into_iter().flat_map(|m| m.blocks) {
            self.fixture.engine.free(address, 0).unwrap();
        }
        for stash in std::mem::take(&mut self.stashes) {
            self.fixture.engine.stash_drop(stash.id).unwrap();
        }
    }

    /// The engine's last owner goes while its threads are at work: they come to their end, and what
    /// was awake is as it was.
    fn drop_engine(self) {
        let Self { calm, fixture, mine, .. } = self;
        let Fixture { engine, allocator, faults, turn } = fixture;
        let gone = Arc::downgrade(&engine);
        drop(engine);
        soon("the engine goes", || gone.strong_count() == 0);
        assert!(faults.is_idle(), "a request is with the file still");
        allocator.check().unwrap();
        assert_eq!(allocator.stats().staged_bytes.current, 0);
        for mut mine in mine.into_iter().filter(|m| m.is_sure) {
            mine.verify();
        }
        drop((calm, allocator));
        // The driver's last.
        let _turn = turn;
    }

    /// The tier is stopped where a write failed, and nowhere else.
    fn assert_stopped_for_a_reason(&self) {
        let failed: u64 = [Mishap::FullDisk, Mishap::FailedWrite]
            .map(|mishap| self.fixture.faults.befallen(mishap))
            .into_iter()
            .sum();
        let is_stopped = self.fixture.engine.stats().nvme_stopped.is_some();
        assert!(is_stopped || failed == 0, "a failed write is said to nobody");
        assert!(failed > 0 || self.armed.short || !is_stopped, "stopped for no reason");
    }

    /// No extent is left anywhere: the file can be had in one range.
    fn assert_file_is_whole(&self) {
        let engine = &self.fixture.engine;
        engine.set_tier_budget(Tier::Nvme, self.file_bytes).unwrap();
        if engine.stats().nvme_stopped.is_none() {
            let whole = engine.take_extent(self.file_bytes).unwrap();
            engine.release_extent(whole);
        }
    }

    fn count(&self, stats: &Stats, tally: &mut Tally) {
        for mishap in Mishap::ALL {
            tally.fired(&format!("{mishap:?}"), self.fixture.faults.befallen(mishap));
        }
        let device = self.fixture.device();
        for operation in REFUSING {
            tally.fired(&format!("Refused{operation:?}"), device.failures(operation));
        }
        if let Some(count) = self.fixture.turn.refused_answers() {
            tally.fired("RefusedAnswer", count);
        }
        tally.fired("TornCopy", device.torn_copies());
        tally.done("sleeps", stats.sleeps);
        tally.done("wakes", stats.wakes);
        tally.done("sleeps called off", stats.sleeps_backed_out);
        tally.done("sleeps failed", stats.sleep_failures);
        tally.done("wakes failed", stats.wake_failures);
        tally.done("sleeps declined", stats.declined);
        tally.done("chunks read twice", stats.reread_chunks);
        tally.done("room made", stats.reclaims);
        if !device.is_stream_ordered() {
            tally.done("written meanwhile", stats.written_meanwhile);
        }
    }
}
