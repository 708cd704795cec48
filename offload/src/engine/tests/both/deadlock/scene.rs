//! What a call finds: a device as full as the cell says, a copy that is held, and others' regions.

use std::sync::{Arc, Mutex};

use dormouse_alloc::{Allocator, Request};
use dormouse_device::{Device, Hold};

use super::cells::{Cell, InFlight, Memory};
use super::{
    ASLEEP_FIRST, BYTES, CopyStream, Fixture, Held, Plan, Stream, TestDevice, fill, holds, soon,
};
use crate::engine::{Engine, StashId, TagId};
use crate::ids::{RegionId, Tier};
use crate::prefix::{Edge, Phase, Prefix};
use dormouse_residency::region::RegionState;
use dormouse_storage::testing::Faults;

/// Device memory of a scene before it is made tight.
const BUDGET_BYTES: usize = 16 << 20;
const HOST_BYTES: u64 = 8 << 20;
const FILE_BYTES: usize = 8 << 20;

/// A region of the scene's own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) id: RegionId,
    pub(super) address: usize,
    seed: u64,
}

/// What keeps the copy from ending.
pub(super) enum Seam {
    Stream(Held),
    Writes(Faults),
}

impl Seam {
    pub(super) fn let_go(self) {
        match self {
            Self::Stream(held) => held.let_go(),
            Self::Writes(faults) => faults.hold(false, false),
        }
    }
}

/// Everything a call may touch. It can be shared among threads, which a [`Fixture`] cannot.
pub(super) struct Scene {
    pub(super) engine: Arc<Engine<TestDevice>>,
    pub(super) allocator: Arc<Allocator<TestDevice>>,
    pub(super) here: Stream,
    /// Whose copy is held.
    pub(super) subject: Placed,
    /// Awake, and may sleep for others.
    spare: Placed,
    pub(super) asleep: Placed,
    /// Memory outside all regions: always awake.
    pub(super) plain: usize,
    /// What a copy comes back to.
    pub(super) target: usize,
    pub(super) stash: StashId,
    pub(super) tag_awake: TagId,
    pub(super) tag_asleep: TagId,
    pub(super) tagged_asleep: Placed,
    tagged: Placed,
    pub(super) prefix: Mutex<Option<Prefix<TestDevice>>>,
    dormant: usize,
    /// To be freed by somebody who has to have the caller's lock first.
    pub(super) others: usize,
    /// Sleeps behind an event of the stream, which goes on when the caller's lock is free.
    late: Mutex<Option<(Stream, [Placed; 2])>>,
}

const SEEDS: [u64; 9] = [11, 12, 13, 14, 15, 16, 17, 18, 19];

fn placed(fixture: &Fixture, seed: u64) -> Placed {
    let (id, address) = fixture.region(BYTES, seed);
    Placed { id, address, seed }
}

fn tagged(fixture: &Fixture, name: &str, seed: u64) -> (TagId, Placed) {
    let tag = fixture.engine.tag_create(name, true).unwrap();
    let address = fixture.allocate(BYTES, seed);
    let id = fixture.engine.tag_add(tag, address).unwrap();
    (tag, Placed { id, address, seed })
}

/// A prefix of one layer in phase A, with one dormant tensor.
fn prefix_of(fixture: &Fixture, here: &Stream) -> (Prefix<TestDevice>, usize) {
    let mut prefix = fixture.engine.prefix(1, "prefix").unwrap();
    prefix.enter(Phase::A, here).unwrap();
    prefix.mark(Edge::ForwardBegin, 0, here).unwrap();
    let request =
        Request { scope: prefix.scope(0).unwrap(), arena: prefix.arena(), ..Request::new(BYTES) };
    let address = fixture.allocator.allocate(&request).unwrap().range.start;
    fill(address, BYTES, SEEDS[6]);
    assert_eq!(prefix.dormant(0, &[address]).unwrap().accepted, 1);
    prefix.mark(Edge::ForwardEnd, 0, here).unwrap();
    (prefix, address)
}

pub(super) fn fixture() -> Fixture {
    let mut plan = Plan { budget_bytes: BUDGET_BYTES, file_bytes: FILE_BYTES, ..Plan::default() };
    plan.config.host_bytes_max = HOST_BYTES;
    plan.build()
}

impl Scene {
    /// All but what is held. `wakes_prefix`: the prefix's layer sleeps already.
    pub(super) fn new(fixture: &Fixture, copy: InFlight, wakes_prefix: bool) -> Self {
        let (engine, here) = (Arc::clone(&fixture.engine), fixture.here());
        let [subject, spare, asleep] = [0, 1, 2].map(|at| placed(fixture, SEEDS[at]));
        let (plain, target) = (fixture.allocate(BYTES, SEEDS[3]), fixture.allocate(BYTES, 0));
        let others = fixture.allocate(BYTES, 0);
        let (tag_awake, tagged_awake) = tagged(fixture, "awake", SEEDS[4]);
        let (tag_asleep, tagged_asleep) = tagged(fixture, "asleep", SEEDS[5]);
        // SAFETY: a live, awake block of the test's own.
        let stash = unsafe { engine.stash_put(plain, BYTES, 1, &here) }.unwrap();
        let (mut prefix, dormant) = prefix_of(fixture, &here);
        let tier = if ASLEEP_FIRST == RegionState::Host { Tier::Host } else { Tier::Nvme };
        engine.sleep(&[asleep.id, tagged_asleep.id], tier, &[]).unwrap();
        if wakes_prefix {
            prefix.enter(Phase::B, &here).unwrap();
        }
        let mut settled = vec![asleep.id, tagged_asleep.id];
        if copy == InFlight::In {
            engine.sleep(&[subject.id], Tier::Host, &[]).unwrap();
            settled.push(subject.id);
        }
        settled.extend(engine.region_at(dormant));
        engine.wait_settled(&settled).unwrap();
        engine.let_reclaim(&[subject.id, spare.id], &[]);
        fixture.allocator.trim(u64::MAX);
        let allocator = Arc::clone(&fixture.allocator);
        Self {
            engine,
            allocator,
            here,
            subject,
            spare,
            asleep,
            plain,
            target,
            stash,
            tag_awake,
            tag_asleep,
            tagged_asleep,
            tagged: tagged_awake,
            prefix: Mutex::new(Some(prefix)),
            dormant,
            others,
            late: Mutex::default(),
        }
    }

    /// Begins the copy and keeps it from ending.
    pub(super) fn hold(&self, fixture: &Fixture, copy: InFlight) -> Option<Seam> {
        let ids = [self.subject.id];
        match copy {
            InFlight::Nothing => None,
            InFlight::Out => {
                let held = fixture.hold_way(CopyStream::Out);
                self.engine.sleep(&ids, Tier::Host, &[]).unwrap();
                assert_eq!(fixture.state(ids[0]), RegionState::FallingAsleep);
                Some(Seam::Stream(held))
            }
            InFlight::In => {
                let held = fixture.hold_way(CopyStream::In);
                self.engine.wake(&ids);
                let now = fixture.state(ids[0]);
                assert!(matches!(now, RegionState::Waking | RegionState::Awake), "{now:?}");
                Some(Seam::Stream(held))
            }
            InFlight::Write => {
                fixture.faults.hold(true, false);
                self.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
                soon("it is being written", || fixture.state(ids[0]) == fixture.while_written());
                fixture.faults.wait_held(1);
                Some(Seam::Writes(fixture.faults.clone()))
            }
        }
    }

    /// Puts regions in the way whose sleeps come only after `lock` is free. Where events come by
    /// themselves none may depend on a caller, and so there are none.
    pub(super) fn event_wait_behind(&self, fixture: &Fixture, lock: &Arc<Mutex<()>>) {
        if fixture.device().is_stream_ordered() {
            return;
        }
        let stream = fixture.device().create_stream("late").unwrap();
        let lock = Arc::clone(lock);
        fixture.device().hold(&stream, Box::new(move || drop(lock.lock().unwrap()))).unwrap();
        let event = fixture.device().record(&stream).unwrap();
        let late = [placed(fixture, SEEDS[7]), placed(fixture, SEEDS[8])];
        self.engine.sleep(&[late[0].id], Tier::Nvme, std::slice::from_ref(&event)).unwrap();
        self.engine.let_reclaim(&[late[1].id], &[event]);
        *self.late.lock().unwrap() = Some((stream, late));
    }

    /// Makes it as tight as the cell says: to the byte.
    pub(super) fn tighten(&self, memory: Memory) {
        if memory == Memory::Plenty {
            return;
        }
        let held_bytes = self.allocator.stats().mapped_bytes.current;
        self.budgets(
            held_bytes,
            if memory.has_host() { HOST_BYTES } else { 0 },
            if memory.has_nvme() { FILE_BYTES as u64 } else { 0 },
        );
    }

    fn budgets(&self, device_bytes: u64, host_bytes: u64, nvme_bytes: u64) {
        self.engine.set_tier_budget(Tier::Device, device_bytes).unwrap();
        self.engine.set_tier_budget(Tier::Host, host_bytes).unwrap();
        self.engine.set_tier_budget(Tier::Nvme, nvme_bytes).unwrap();
    }

    /// Whether room for one more region can be made: by one that leaves already, or may.
    pub(super) fn can_make_room(&self, cell: Cell) -> bool {
        let is_leaving = match cell.copy {
            InFlight::Nothing | InFlight::In => false,
            InFlight::Out => true,
            // By way of host memory its pages have gone before.
            InFlight::Write => self.engine.is_direct,
        };
        // On a GPU the way to the file is through host memory.
        let has_tier_room =
            cell.memory.has_host() || (self.engine.is_direct && cell.memory.has_nvme());
        cell.memory == Memory::Plenty || is_leaving || has_tier_room
    }

    /// Every byte is there; then everything is given up. `freed`: by the call; `made`: by it too.
    pub(super) fn end(self, fixture: &Fixture, freed: &[usize], made: &[usize]) {
        self.budgets(BUDGET_BYTES as u64, HOST_BYTES, FILE_BYTES as u64);
        if let Some(prefix) = self.prefix.into_inner().unwrap() {
            assert_eq!(prefix.close().left_asleep_bytes, 0);
        }
        let mut kept = vec![(self.plain, SEEDS[3]), (self.dormant, SEEDS[6])];
        let regions = [self.subject, self.spare, self.asleep, self.tagged, self.tagged_asleep];
        let late = self.late.into_inner().unwrap();
        for region in regions.into_iter().chain(late.into_iter().flat_map(|(_, late)| late)) {
            kept.push((region.address, region.seed));
        }
        for &(address, seed) in kept.iter().filter(|(address, _)| !freed.contains(address)) {
            self.engine.wake_address(address).unwrap();
            fixture.finish(&self.here);
            assert!(holds(address, BYTES, seed), "seed {seed}: its bytes are not there");
            self.engine.free(address, 0).unwrap();
        }
        for &address in made.iter().chain([&self.target]) {
            self.engine.free(address, 0).unwrap();
        }
        if self.engine.stash_count() > 0 {
            self.engine.stash_drop(self.stash).unwrap();
        }
        for tag in [self.tag_awake, self.tag_asleep] {
            // Gone where the call has destroyed it.
            let _ = self.engine.tag_destroy(tag);
        }
    }
}

/// A request for one region more, under a tag.
pub(super) fn request_in(tag: TagId) -> Request {
    Request { tag: tag.0, ..Request::new(BYTES) }
}
