//! Stray accesses on the host device: a thread that reads or writes sleeping memory waits while its region wakes.
//!
//! The thread waits in the guard's fault handler and may hold any lock of the program. The thread here that wakes
//! its region takes the engine's locks, the allocator's and `malloc`'s heap, and waits for I/O threads: what a
//! reclaim inside `malloc` does as well. None of these locks is held while a caller's memory is accessed. Should
//! that ever be wrong, [`STRAY_WAIT_MAX`] ends the wait, and the process with it.
//!
//! Accesses are taken up at any time, and each is answered when its region is awake, however long others take. The
//! serving thread waits for nothing: a wake without room is handed to a second thread, which waits until others sleep.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use dormouse_device::host::guard::{self, Request, Stopper};
use dormouse_device::{Device, DeviceKind, SpanLabel, with_signals_blocked};
use dormouse_storage::ThreadError;
use dormouse_storage::sync::lock;
use dormouse_timeline::Lane;

use super::Engine;
use crate::error::OffloadError;
use crate::ids::RegionId;

/// Limit of the time in which a stray access waits and no wake goes on, above one request behind a full file queue.
pub const STRAY_WAIT_MAX: Duration = Duration::from_secs(60);
/// A region that woke this often stays awake until its owner puts it to sleep: reclaim might otherwise take turns
/// between the memory that one instruction reads.
pub(super) const RECLAIMED_WAKES_MAX: u32 = 8;
/// Limit on warnings of one engine, apart from the first of each owner. Later ones are debug events.
const WARNINGS_MAX: u64 = 16;

/// An access to sleeping memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrayAccess {
    /// The address.
    pub address: usize,
    /// "read" or "write"; "read or write" on machines that do not tell.
    pub access: &'static str,
    /// Number of the thread.
    pub thread: u32,
    /// Label of the region: its prefix or tag, and its layer.
    pub label: SpanLabel,
}

impl std::fmt::Display for StrayAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, access, thread, label } = self;
        write!(f, "{access} of {address:#x} by thread {thread} in ")?;
        if label.layer != u32::MAX {
            write!(f, "layer {} of ", label.layer)?;
        }
        let end = label.name.iter().position(|byte| *byte == 0).unwrap_or(label.name.len());
        write!(f, "{:?}", String::from_utf8_lossy(label.name.get(..end).unwrap_or_default()))
    }
}

/// Wakes by stray accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StrayWakes {
    /// Number of times that a region was not awake when it was accessed.
    pub count: u64,
    /// The first of these accesses.
    pub first: Option<StrayAccess>,
}

impl StrayWakes {
    pub(crate) fn add(&mut self, access: StrayAccess) {
        self.count += 1;
        self.first.get_or_insert(access);
    }
}

/// The threads that wake what stray accesses need. A drop ends them; later stray accesses end the process.
#[derive(Debug)]
pub struct Rescuer {
    stopper: Option<Stopper>,
    /// The serving thread, and the one that wakes what lacks room, which ends behind it.
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Rescuer {
    fn drop(&mut self) {
        drop(self.stopper.take());
        for thread in self.threads.drain(..) {
            // A panic was answered: by the listener, or by the end of the channel.
            let _panicked = thread.join();
        }
    }
}

/// A wake for the threads that wait for it.
struct Rescue {
    id: RegionId,
    access: StrayAccess,
    /// Its place among the wakes of this engine.
    number: u64,
    is_first_of_owner: bool,
    start_ns: u64,
    /// The end of the wake, if it lacked room and was handed over.
    end: Option<Receiver<Result<(), OffloadError>>>,
    requests: Vec<Request>,
}

/// A region that has no room to wake.
struct Shortage {
    id: RegionId,
    end: Sender<Result<(), OffloadError>>,
}

/// The wakes that are waited for.
struct Rescues {
    list: Vec<Rescue>,
    /// [`Counters::progress`](super::counters::Counters::progress) when it was last looked at.
    progress: u64,
    shortages: Sender<Shortage>,
}

impl<D: Device> Engine<D> {
    /// Starts the threads that wake sleeping memory when a thread of the program accesses it. The handler of the
    /// process must be [installed](guard::install). Without these threads such an access ends the process.
    ///
    /// # Errors
    /// `Argument` on a device whose accesses cannot be detected; `TooMany` if an engine of the process has such
    /// threads; `Thread`.
    pub fn rescue(self: &Arc<Self>) -> Result<Rescuer, OffloadError> {
        self.rescue_within(STRAY_WAIT_MAX)
    }

    /// As [`Engine::rescue`], with another limit of the time without progress.
    pub(crate) fn rescue_within(
        self: &Arc<Self>,
        wait_max: Duration,
    ) -> Result<Rescuer, OffloadError> {
        if self.device.kind() != DeviceKind::Host {
            let seen = format!("{:?}", self.device.kind());
            return Err(OffloadError::argument("device of stray accesses", seen, "Host"));
        }
        let listening = guard::listen(wait_max);
        let too_many = OffloadError::TooMany { what: "rescuers", limit: 1 };
        let (listener, stopper) = listening.ok_or(too_many)?;
        let (shortages, short) = channel();
        let engine = Arc::clone(self);
        let making_room = spawn("dormouse-room", move || engine.wake_short(&short))?;
        let engine = Arc::clone(self);
        let mut rescues = Rescues { list: Vec::new(), progress: 0, shortages };
        let serving = spawn("dormouse-rescue", move || {
            listener.serve(|requests| engine.rescue_all(requests, &mut rescues));
        })?;
        Ok(Rescuer { stopper: Some(stopper), threads: vec![serving, making_room] })
    }

    /// Wakes regions that lack room, one after the other.
    fn wake_short(&self, shortages: &Receiver<Shortage>) {
        let _own = guard::own_thread();
        for Shortage { id, end } in shortages {
            // Fails if the serving thread has panicked: it answered the accesses then.
            let _unheard = end.send(self.wake_with_room(&[id]));
        }
    }

    /// Starts to wake the regions of new requests, all at once, and answers requests whose region is awake or does not
    /// wake. Returns true if any are left.
    fn rescue_all(&self, requests: Vec<Request>, rescues: &mut Rescues) -> bool {
        // A panic drops all of them, which answers them.
        let mut under_way = std::mem::take(&mut rescues.list);
        self.take_up(requests, &mut under_way);
        let go_on = |rescue| self.go_on(rescue, &rescues.shortages);
        rescues.list = under_way.into_iter().filter_map(go_on).collect();
        let progress = self.counters.progress();
        if std::mem::replace(&mut rescues.progress, progress) != progress {
            guard::note_progress();
        }
        !rescues.list.is_empty()
    }

    /// Starts to wake the regions of requests.
    fn take_up(&self, requests: Vec<Request>, under_way: &mut Vec<Rescue>) {
        let mut ids = Vec::new();
        for request in requests {
            let Some(id) = self.region_at(request.address()) else {
                // Freed meanwhile, or asleep without an owner.
                request.failed("no region is there");
                continue;
            };
            if let Some(known) = under_way.iter_mut().find(|known| known.id == id) {
                known.requests.push(request);
            } else if self.are_awake(&[id]) {
                request.awake();
            } else {
                ids.push(id);
                under_way.push(self.note_stray(id, request));
            }
        }
        if !ids.is_empty() {
            self.wake(&ids);
        }
    }

    /// Answers the requests of a wake that is over, or returns it.
    fn go_on(&self, mut rescue: Rescue, shortages: &Sender<Shortage>) -> Option<Rescue> {
        let woken = match &rescue.end {
            Some(end) => match end.try_recv() {
                Err(TryRecvError::Empty) => return Some(rescue),
                Ok(woken) => woken,
                Err(TryRecvError::Disconnected) => Err(OffloadError::Broken),
            },
            None => match self.settled(rescue.id) {
                Ok(None) => return Some(rescue),
                Ok(Some(None)) => Ok(()),
                Ok(Some(Some(unwoken))) if unwoken.error.is_out_of_memory() => {
                    let (end, result) = channel();
                    // If that thread has panicked, `end` is dropped, which the next look sees.
                    let _unheard = shortages.send(Shortage { id: rescue.id, end });
                    rescue.end = Some(result);
                    return Some(rescue);
                }
                Ok(Some(Some(unwoken))) => Err(unwoken.error),
                Err(error) => Err(error),
            },
        };
        self.answer(rescue, woken.or_else(unless_asleep_again));
        None
    }

    fn answer(&self, mut rescue: Rescue, woken: Result<(), OffloadError>) {
        let ns = self.waited(rescue.start_ns, &[rescue.id]).stall_ns;
        if let Some(account) = self.body(rescue.id, |body| body.account.clone()) {
            account.stray_waited(ns);
        }
        for request in std::mem::take(&mut rescue.requests) {
            match &woken {
                Ok(()) => request.awake(),
                Err(error) => {
                    // First: the answer ends the process.
                    tracing::error!(
                        target: "offload", region = rescue.id.key(), address = %format_args!("{:#x}", request.address()),
                        thread = request.thread(), reason = %error, "a stray access was not rescued"
                    );
                    request.failed(&error.to_string());
                }
            }
        }
        self.log_rescue(&rescue);
    }

    /// Counts a stray access to a region that is not awake.
    fn note_stray(&self, id: RegionId, request: Request) -> Rescue {
        let found = self.table.with(id, |entry| {
            entry.data.stray_wakes = entry.data.stray_wakes.saturating_add(1);
            if entry.data.stray_wakes >= RECLAIMED_WAKES_MAX {
                entry.data.is_eligible = false;
            }
            (entry.data.label, entry.data.account.clone())
        });
        let (label, account) = found.unwrap_or_default();
        let access = StrayAccess {
            address: request.address(),
            access: request.access(),
            thread: request.thread(),
            label,
        };
        let is_first_of_owner = account.is_some_and(|account| account.note_stray(access));
        let number = {
            let mut counts = lock(&self.counts);
            counts.stray.add(access);
            counts.stray.count
        };
        self.timeline.instant(Lane::Notice, self.names.stray, id.key());
        let (start_ns, requests) = (self.timeline.now_ns(), vec![request]);
        Rescue { id, access, number, is_first_of_owner, start_ns, end: None, requests }
    }

    fn log_rescue(&self, rescue: &Rescue) {
        let Rescue { id, access, number, .. } = rescue;
        let (region, wakes) = (id.key(), *number);
        if rescue.is_first_of_owner || wakes <= WARNINGS_MAX {
            tracing::warn!(target: "offload", region, wakes, %access, "sleeping memory was accessed and woke");
        } else {
            tracing::debug!(target: "offload", region, wakes, %access, "sleeping memory was accessed and woke");
        }
    }
}

/// Returns the cause of a failed wake. A region that woke and was put to sleep again before its end was seen did not
/// fail: the access is repeated, and comes back if it meets the region asleep.
fn unless_asleep_again(error: OffloadError) -> Result<(), OffloadError> {
    let cause = match error {
        OffloadError::WakeFailed { source, .. } => (*source).clone(),
        cause => cause,
    };
    if matches!(cause, OffloadError::NotAwake { .. }) { Ok(()) } else { Err(cause) }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, OffloadError> {
    let builder = Builder::new().name(name.to_owned());
    let spawned = with_signals_blocked(|| builder.spawn(work));
    let failed = |e: std::io::Error| ThreadError { name: name.to_owned(), reason: e.to_string() };
    Ok(spawned.map_err(failed)?)
}
