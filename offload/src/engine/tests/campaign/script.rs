//! What a sequence does: a list of operations and faults that comes of its seed alone.

use dormouse_device::Operation;

use crate::ids::Tier;
use dormouse_storage::testing::Random;
use dormouse_storage::{CHUNK_BYTES, SHORT_ATTEMPTS_MAX, UNIT_BYTES};

/// Operations of a sequence.
const OPERATIONS_MIN: u64 = 16;
const OPERATIONS_MAX: u64 = 60;
/// Blocks that are there before anything else is done.
const AT_FIRST: usize = 4;
/// Largest region, in units.
const REGION_UNITS_MAX: u64 = 12;
/// Largest tier, in units.
pub(crate) const TIER_UNITS_MAX: u64 = 128;
/// A failing disk fails within this many bytes.
const FAILING_BYTES_MAX: u64 = 32 * UNIT_BYTES as u64;
/// One of this many sequences has regions of several chunks.
const BIG_ONE_OF: u64 = 256;
/// A region of two units and more has two chunks and more there.
const BIG_UNIT_BYTES: usize = CHUNK_BYTES / 2 + UNIT_BYTES;
/// One of this many sequences has a file on the disk; the others have memory in its place.
const ON_DISK_ONE_OF: u64 = 16;

/// What refuses on command. Not `Thaw` and `Forget`, which leave nothing to be done: the memory
/// stays as it is for good, and that is counted.
pub(crate) const REFUSING: [Operation; 11] = [
    Operation::Map,
    Operation::Unmap,
    Operation::Freeze,
    Operation::Seal,
    Operation::Stage,
    Operation::Publish,
    Operation::Pin,
    Operation::CreateStream,
    Operation::Event,
    Operation::Copy,
    Operation::Callback,
];

/// Whose a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No region: it never sleeps.
    Plain,
    Dormant,
    /// Dormant, and asleep whenever somebody is short of memory.
    Eligible,
    /// Under a tag that keeps bytes.
    Tagged,
    /// Under a tag that does not.
    Dropped,
}

/// What befalls the file.
#[derive(Clone, Debug)]
pub(crate) enum Disk {
    /// Full after this many bytes.
    Full(u64),
    /// Writes fail after this many bytes.
    FailWrites(u64),
    FailReads(u32),
    Cut(Vec<usize>),
    Interrupt(u32),
    FlipReads(u32),
    FlipWrites(u32),
    Delay(u32),
}

/// One step. Numbers of things are taken modulo those there are.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Allocate {
        units: usize,
        kind: Kind,
    },
    Write(usize),
    /// By an owner who has just had it put to sleep.
    WriteAsleep(usize),
    Sleep {
        at: usize,
        count: usize,
        tier: Tier,
    },
    /// Behind an event that has not come.
    SleepLate {
        at: usize,
        tier: Tier,
    },
    Wake {
        at: usize,
        count: usize,
    },
    WaitAwake {
        at: usize,
        count: usize,
    },
    WaitSettled,
    SleepThenWake {
        at: usize,
        tier: Tier,
    },
    WakeThenSleep {
        at: usize,
        tier: Tier,
    },
    WakeThenFree(usize),
    SleepThenFree {
        at: usize,
        tier: Tier,
    },
    Free(usize),
    Release(usize),
    TagSleep {
        keeps: bool,
        tier: Tier,
    },
    TagWake {
        keeps: bool,
    },
    TagWait {
        keeps: bool,
    },
    Stash(usize),
    Unstash {
        at: usize,
        into: usize,
    },
    StashDrop(usize),
    Budget {
        tier: Tier,
        units: u64,
    },
    Disk(Disk),
    Refuse {
        operation: Operation,
        nth: u64,
        count: u64,
    },
    /// Waits for a copy's end, where it is waited for.
    RefuseAnswers(u64),
    Tear(u64),
    /// A bit of what rests in the file changes.
    Spoil {
        at: usize,
        byte: u64,
    },
    Hold {
        writes: bool,
        reads: bool,
    },
    HoldEvents,
    LetGo,
    /// Time for other threads.
    Pause,
    Heal,
}

/// What is behind the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Memory; each thread does one request at a time.
    Blocking,
    /// Memory; answers come in no order.
    Unordered,
    /// A file, through io_uring where the system has it; answers come in no order.
    Ring,
    /// A file; each thread does one request at a time.
    FileBlocking,
}

/// How a sequence ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// All is healed, woken and looked at.
    Verify,
    /// The engine goes in the middle of it.
    DropEngine,
    /// The engine is shut down in the middle of it.
    ShutDown,
}

/// One sequence.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) via_host: bool,
    pub(crate) backing: Backing,
    pub(crate) unit_bytes: usize,
    pub(crate) device_units: u64,
    pub(crate) host_units: u64,
    pub(crate) file_units: u64,
    pub(crate) window_units: u64,
    pub(crate) operations: Vec<Op>,
    pub(crate) ending: Ending,
}

/// Which faults a sequence may meet. Some sequences meet none of a kind, so that what comes after
/// one is not always the same.
#[derive(Clone, Copy, Debug)]
struct Temper {
    fails: bool,
    flips: bool,
    refuses: bool,
    holds: bool,
    budgets: bool,
}

impl Script {
    pub(crate) fn of(seed: u64) -> Self {
        // Neighbouring seeds of a shift register are alike at first.
        let mut random = Random::new((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for _ in 0..8 {
            random.below(2);
        }
        let r = &mut random;
        let is_big = r.below(BIG_ONE_OF) == 0;
        let backing = match (r.below(ON_DISK_ONE_OF), r.below(2)) {
            (0, 0) => Backing::Ring,
            (0, _) => Backing::FileBlocking,
            (_, 0) => Backing::Unordered,
            _ => Backing::Blocking,
        };
        let [fails, flips, refuses, holds, budgets] = [(); 5].map(|()| r.below(2) == 0);
        let temper = Temper { fails, flips, refuses, holds, budgets };
        let count = OPERATIONS_MIN + r.below(OPERATIONS_MAX - OPERATIONS_MIN + 1);
        Self {
            via_host: r.below(2) == 0,
            backing,
            unit_bytes: if is_big { BIG_UNIT_BYTES } else { UNIT_BYTES },
            device_units: 32 + r.below(TIER_UNITS_MAX - 32),
            host_units: if r.below(4) == 0 { 0 } else { r.below(TIER_UNITS_MAX) },
            file_units: 24 + r.below(TIER_UNITS_MAX - 24),
            window_units: 1 + r.below(32),
            operations: temper.operations(r, count as usize),
            ending: match r.below(10) {
                0 => Ending::DropEngine,
                1 => Ending::ShutDown,
                _ => Ending::Verify,
            },
        }
    }

    pub(crate) fn cut(mut self, length: usize) -> Self {
        self.operations.truncate(length);
        self
    }
}

fn tier(r: &mut Random) -> Tier {
    if r.below(3) == 0 { Tier::Host } else { Tier::Nvme }
}

fn kind(r: &mut Random) -> Kind {
    match r.below(8) {
        0 => Kind::Plain,
        1 | 2 => Kind::Dormant,
        3 | 4 => Kind::Eligible,
        5 | 6 => Kind::Tagged,
        _ => Kind::Dropped,
    }
}

impl Temper {
    fn operations(self, r: &mut Random, count: usize) -> Vec<Op> {
        let mut operations: Vec<_> = (0..AT_FIRST).map(|_| allocate(r)).collect();
        while operations.len() < count {
            match r.below(3) {
                0 => operations.extend(self.fault(r)),
                _ => operations.push(operation(r)),
            }
        }
        operations
    }

    /// What is put in the way, and where it needs that, what it is in the way of.
    fn fault(self, r: &mut Random) -> Vec<Op> {
        match r.below(5) {
            0 if self.fails => vec![Op::Disk(failure(r))],
            1 if self.flips => vec![match r.below(4) {
                0 => Op::Disk(Disk::FlipReads(1 + r.below(3) as u32)),
                1 => Op::Disk(Disk::FlipWrites(1)),
                _ => Op::Spoil { at: place(r), byte: r.below(1 << 24) },
            }],
            2 if self.refuses => match r.below(5) {
                0 => vec![Op::Tear(1 + r.below(3))],
                1 => vec![Op::Heal],
                2 => vec![Op::RefuseAnswers(1 + r.below(3)), operation(r)],
                _ => refusal(r),
            },
            3 if self.holds => held_up(r),
            4 if self.budgets => {
                let tier = [Tier::Device, Tier::Host, Tier::Nvme][r.below(3) as usize];
                let floor = u64::from(tier == Tier::Device);
                vec![Op::Budget { tier, units: floor + r.below(TIER_UNITS_MAX) }]
            }
            _ => Vec::new(),
        }
    }
}

fn place(r: &mut Random) -> usize {
    r.below(64) as usize
}

fn allocate(r: &mut Random) -> Op {
    Op::Allocate { units: 1 + r.below(REGION_UNITS_MAX) as usize, kind: kind(r) }
}

fn operation(r: &mut Random) -> Op {
    let (at, count, keeps) = (place(r), 1 + r.below(3) as usize, r.below(2) == 0);
    match r.below(44) {
        0..=7 => allocate(r),
        8 => Op::Write(at),
        9..=17 => Op::Sleep { at, count, tier: tier(r) },
        18 => Op::SleepLate { at, tier: tier(r) },
        19..=20 => Op::Wake { at, count },
        21..=24 => Op::WaitAwake { at, count },
        25..=26 => Op::WaitSettled,
        27..=28 => Op::SleepThenWake { at, tier: tier(r) },
        29 => Op::WakeThenSleep { at, tier: tier(r) },
        30 => Op::WakeThenFree(at),
        31 => Op::SleepThenFree { at, tier: tier(r) },
        32..=33 => Op::Free(at),
        34 => Op::Release(at),
        35..=36 => Op::TagSleep { keeps, tier: tier(r) },
        37 => Op::TagWake { keeps },
        38 => Op::TagWait { keeps },
        39..=40 => Op::Stash(at),
        41..=42 => Op::Unstash { at, into: place(r) },
        _ => Op::StashDrop(at),
    }
}

/// A refusal, and what may meet it.
fn refusal(r: &mut Random) -> Vec<Op> {
    let operation = REFUSING[r.below(REFUSING.len() as u64) as usize];
    let (at, count) = (place(r), 1 + r.below(3) as usize);
    let meets = match operation {
        Operation::Map => allocate(r),
        // Pages are taken from the cache only where they are too many.
        Operation::Unmap => Op::Budget { tier: Tier::Device, units: 1 + r.below(16) },
        Operation::Stage | Operation::Publish => Op::WakeThenSleep { at, tier: tier(r) },
        _ => Op::Sleep { at, count, tier: tier(r) },
    };
    vec![Op::Refuse { operation, nth: 1 + r.below(2), count: 1 + r.below(3) }, meets]
}

/// Transfers or events are held up, and things done meanwhile, up to the first that waits.
fn held_up(r: &mut Random) -> Vec<Op> {
    let (at, count) = (place(r), 1 + r.below(4) as usize);
    let mut operations = vec![match r.below(4) {
        0 => Op::HoldEvents,
        1 => Op::Hold { writes: false, reads: true },
        _ => Op::Hold { writes: true, reads: r.below(2) == 0 },
    }];
    match r.below(5) {
        0 => operations.push(Op::WriteAsleep(at)),
        1 => operations.extend([
            Op::Sleep { at, count, tier: Tier::Nvme },
            Op::Pause,
            Op::Wake { at, count },
        ]),
        2 => operations.extend([Op::WakeThenFree(at), Op::WakeThenSleep { at, tier: tier(r) }]),
        3 => operations.extend([
            Op::Sleep { at, count, tier: tier(r) },
            Op::Pause,
            Op::SleepThenFree { at, tier: Tier::Nvme },
        ]),
        _ => operations.extend([
            Op::TagSleep { keeps: r.below(3) > 0, tier: tier(r) },
            Op::Pause,
            Op::TagWake { keeps: r.below(3) > 0 },
        ]),
    }
    if r.below(2) == 0 {
        operations.push(Op::LetGo);
    }
    operations
}

fn failure(r: &mut Random) -> Disk {
    match r.below(8) {
        0 => Disk::Full(r.below(FAILING_BYTES_MAX)),
        1 => Disk::FailWrites(r.below(FAILING_BYTES_MAX)),
        2 => Disk::FailReads(1 + r.below(3) as u32),
        3 => Disk::Interrupt(1 + r.below(8) as u32),
        4 => Disk::Delay(1 + r.below(3) as u32),
        // No end of it: an error.
        5 if r.below(4) == 0 => Disk::Cut(vec![0; SHORT_ATTEMPTS_MAX as usize]),
        _ => {
            let lengths = [0, 1, UNIT_BYTES - 1, UNIT_BYTES, UNIT_BYTES + 1, 3 * UNIT_BYTES];
            let one = |r: &mut Random| lengths[r.below(lengths.len() as u64) as usize];
            Disk::Cut((0..1 + r.below(4)).map(|_| one(r)).collect())
        }
    }
}
