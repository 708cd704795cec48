//! On a GPU, whose driver is the stand-in. Its memory is the CPU's to look at, at the same
//! addresses, once its pages are mapped; when what is in it is right is a matter of streams.

mod arrivals;
#[path = "both/mod.rs"]
#[expect(clippy::duplicate_mod, reason = "the same tests, of another `TestDevice`")]
pub(crate) mod both;
mod event_waits;
mod loss;
mod queues;
mod reads;
mod refusals;
pub(crate) mod side;
mod stress;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::faulty::Faulty;
use standin::{Exclusive, Live, Standin};

use self::both::Fixture;
use super::campaign::errors::REFUSED;
use super::{Held, PATIENCE};
use crate::engine::transfers::CopyStream;
use dormouse_residency::region::RegionState;

pub(crate) type TestDevice = Faulty<CudaDevice>;

/// Where memory sleeps that was not told where.
pub(crate) const ASLEEP_FIRST: RegionState = RegionState::Host;

/// The stand-in's, so that sizes and page counts are those of the host device.
const PAGE_BYTES: usize = 4096;
/// Pages of a large page: the larger blocks have some. The variable sets it; with 1 there are none.
const LARGE_PAGES: usize = 16;
const LARGE_PAGES_VARIABLE: &str = "DORMOUSE_TEST_LARGE_PAGES";
const TOTAL_BYTES: u64 = 2 << 30;

/// Between two looks at what is left.
const LOOK: Duration = Duration::from_millis(1);

/// What waits for a copy's end.
const ANSWERS: &str = "cuEventSynchronize";

/// Answers that were refused, or are to be.
#[derive(Default)]
struct Refused {
    count: u64,
    /// Number of calls that succeed, then number of calls that fail.
    next: Option<(u64, u64)>,
}

/// The stand-in driver, to one test alone. When it is given up, everything made meanwhile is gone,
/// unless the device was lost: then nothing can be given back.
pub(crate) struct Turn {
    pub(crate) standin: Standin,
    before: [u64; Live::ALL.len()],
    is_lost: AtomicBool,
    refused: Mutex<Refused>,
    _alone: Exclusive,
}

impl Turn {
    pub(crate) fn take() -> Self {
        let standin = standin::load_with(PAGE_BYTES, TOTAL_BYTES);
        let alone = standin.exclusive();
        let before = live(standin);
        let (is_lost, refused) = (AtomicBool::new(false), Mutex::default());
        Self { standin, before, is_lost, refused, _alone: alone }
    }

    /// The next `count` waits for a copy's end are refused, and no others.
    pub(crate) fn refuse_answers(&self, count: u64) {
        self.heal();
        self.refused.lock().unwrap().next = Some((self.standin.calls(ANSWERS), count));
        self.standin.fail(ANSWERS, 1, count, REFUSED);
    }

    /// The driver refuses nothing more.
    pub(crate) fn heal(&self) {
        self.standin.heal();
        let mut refused = self.refused.lock().unwrap();
        if let Some((before, count)) = refused.next.take() {
            refused.count += count.min(self.standin.calls(ANSWERS) - before);
        }
    }

    /// How many waits were refused. None will be any more.
    pub(crate) fn refused_answers(&self) -> Option<u64> {
        self.heal();
        Some(self.refused.lock().unwrap().count)
    }

    /// Launches of the accumulating kernel: the stand-in's kernels add nothing.
    pub(crate) fn accumulations(&self) -> Option<u64> {
        Some(self.standin.launches("dormouse_accumulate_f32"))
    }
}

fn live(standin: Standin) -> [u64; Live::ALL.len()] {
    Live::ALL.map(|what| standin.live(what))
}

impl Drop for Turn {
    fn drop(&mut self) {
        if std::thread::panicking() || self.is_lost.load(Ordering::SeqCst) {
            return;
        }
        // The last owner of an engine may be a callback, on a thread of the device. Thousands of pages take it
        // longer than a test waits: only a count that stands still is a leak.
        let (mut left, mut since) = (live(self.standin), Instant::now());
        while left.iter().zip(&self.before).any(|(now, was)| now > was) {
            let named = || Live::ALL.into_iter().zip(left).zip(self.before).collect::<Vec<_>>();
            assert!(since.elapsed() < PATIENCE, "left, for {PATIENCE:?}: {:?}", named());
            std::thread::sleep(LOOK);
            let now = live(self.standin);
            if now != left {
                (left, since) = (now, Instant::now());
            }
        }
    }
}

pub(crate) fn new_device(reserve_bytes: usize, capacity_bytes: u64) -> TestDevice {
    let large_pages = std::env::var(LARGE_PAGES_VARIABLE);
    let large_pages = large_pages.map_or(LARGE_PAGES, |pages| pages.parse().unwrap());
    let large_page_bytes = large_pages * PAGE_BYTES;
    let config =
        CudaConfig { reserve_bytes, capacity_bytes, large_page_bytes, ..CudaConfig::default() };
    Faulty::new(CudaDevice::new(&config).unwrap())
}

impl Fixture {
    pub(crate) fn hold_copies_out(&self) -> Held {
        self.hold_way(CopyStream::Out)
    }

    pub(crate) fn hold_copies_in(&self) -> Held {
        self.hold_way(CopyStream::In)
    }

    /// Loses the device, as by a touch of memory that is not there. Its memory is kept for good:
    /// what was queued may come to it when the loss has been taken back for the next test.
    pub(crate) fn lose(&self) {
        const ILLEGAL_ADDRESS: i32 = 700;
        self.keep_for_good();
        self.turn.standin.lose(ILLEGAL_ADDRESS);
    }

    /// Gives nothing back, and does not ask for it.
    pub(crate) fn keep_for_good(&self) {
        std::mem::forget((Arc::clone(&self.engine), Arc::clone(&self.allocator)));
        self.turn.is_lost.store(true, Ordering::SeqCst);
    }
}
