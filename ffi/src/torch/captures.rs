//! Memory for CUDA graphs: torch says when a capture begins and ends, and when its graph is gone.
//!
//! A graph replays on the addresses its capture was given. So while a capture is open, requests of
//! captured streams are served from an arena of the pool that torch names, and the arena keeps its
//! pages until torch has released the pool as often as it began it. Whether a stream is captured
//! only the driver knows, and asking it costs more than the rest of a request: it is asked where the
//! answer can be yes.
//!
//! One capture at a time on a GPU, as torch has it: which of two a request belongs to could not be
//! told. One that failed may never end (not every torch tells of the end then); it is told from one
//! that runs by no stream being captured any more. Its pool is not given up for it: a torch that does
//! release it later would take the pool from other graphs.
//!
//! - **G1** Whoever is served from an arena has asked the driver after its capture was opened.
//! - **G2** A capture that was refused gets no memory, and neither does one that nobody announced:
//!   a graph on memory of others would be wrong without a word.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dormouse_alloc::ArenaId;

use super::{Failure, guarded};
use crate::device::AnyStream;
use crate::fault::Fault;
use crate::fork;
use crate::heap::{GPUS_MAX, Heap};

/// Torch's name of a memory pool.
pub(crate) type PoolId = (u64, u64);

/// By GPU: captures that are open, refused ones included, and [`UNANNOUNCED`] where there may be
/// others. One word, because every request looks at it.
static OPEN: [AtomicU32; GPUS_MAX] = [const { AtomicU32::new(UNANNOUNCED) }; GPUS_MAX];
/// Nobody has promised that captures are announced.
const UNANNOUNCED: u32 = 1 << 31;
/// By GPU: pools and captures.
static GRAPHS: [Mutex<Graphs>; GPUS_MAX] = [const { Mutex::new(Graphs::NONE) }; GPUS_MAX];

/// A pool that graphs replay on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pool {
    id: PoolId,
    arena: ArenaId,
    /// Captures that began with it and were not released.
    graphs: u32,
}

/// The pools of a GPU, as many as there are arenas at most, and the capture that is open.
#[derive(Debug)]
struct Graphs {
    pools: Vec<Pool>,
    /// The pool of the capture that is open.
    open: Option<Pool>,
    /// Captures that were refused and did not end.
    refused: u32,
}

/// Whether a request on GPU `device` has to ask the driver if its stream is being captured. Loads
/// only.
#[inline]
pub(crate) fn must_query_driver(device: i32) -> bool {
    // Acquire: pairs with `show`. Whoever works for a capture was handed its work after it began.
    let open = usize::try_from(device).ok().and_then(|device| OPEN.get(device));
    open.is_none_or(|open| open.load(Ordering::Acquire) > 0)
}

/// `dormouse_torch_set_graph_hooks`.
pub(crate) fn set_announced(are_announced: bool) {
    for open in &OPEN {
        // Relaxed: the promise is given before the first request.
        if are_announced {
            open.fetch_and(!UNANNOUNCED, Ordering::Relaxed);
        } else {
            open.fetch_or(UNANNOUNCED, Ordering::Relaxed);
        }
    }
}

/// The arena that a request of `stream` is served from, where that is being captured (G1).
pub(super) fn arena_for(heap: &Heap, stream: &AnyStream) -> Result<Option<ArenaId>, Failure> {
    let asked = heap.allocator().device().is_captured(stream);
    if !asked.map_err(|error| Failure::other(error.to_string()))? {
        return Ok(None);
    }
    let (_, ordinal) = heap.device();
    let graphs = lock(ordinal as usize).map_err(|fault| Failure::other(fault.sentence))?;
    graphs.serving().map(Some).map_err(Failure::other)
}

/// `dormouse_torch_begin_pool`.
pub(crate) fn begin(device: i32, id: PoolId) {
    on_gpu(
        "begin_pool",
        || super::heap(device),
        |heap, device| {
            let mut graphs = lock(device)?;
            // Torch begins the capture of the stream after this: any that is captured is another's.
            let is_nested = graphs.is_any_open() && heap.sees_capture();
            let began = graphs.begin(id, is_nested, || Ok(heap.allocator().arena_create_kept()?));
            graphs.show(device);
            began
        },
    );
}

/// `dormouse_torch_end_pool`.
pub(crate) fn end(device: i32, id: PoolId) {
    on_gpu(
        "end_pool",
        || super::made_heap(device),
        |_, device| {
            let mut graphs = lock(device)?;
            let ended = graphs.end(id);
            graphs.show(device);
            ended
        },
    );
}

/// `dormouse_torch_release_pool`.
pub(crate) fn release(device: i32, id: PoolId) {
    on_gpu(
        "release_pool",
        || super::made_heap(device),
        |heap, device| {
            let given_up = lock(device)?.release(id)?;
            // With no lock of ours held: the device is asked for events.
            if let Some(arena) = given_up {
                heap.allocator().arena_close(arena);
            }
            Ok(())
        },
    );
}

/// Runs `body` with the heap that `find` has, and its place here; what is refused is said.
fn on_gpu(
    what: &str,
    find: impl FnOnce() -> Result<&'static Heap, Fault>,
    body: impl FnOnce(&Heap, usize) -> Result<(), Fault>,
) {
    if fork::in_child() {
        return;
    }
    guarded(what, || {
        let heap = find()?;
        let (_, ordinal) = heap.device();
        body(heap, ordinal as usize)
    });
}

fn lock(device: usize) -> Result<MutexGuard<'static, Graphs>, Fault> {
    let Some(graphs) = GRAPHS.get(device) else {
        let last = GPUS_MAX - 1;
        return Err(Fault::argument(format!("CUDA device {device}; 0 to {last} are accepted")));
    };
    Ok(graphs.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Graphs {
    const NONE: Self = Self { pools: Vec::new(), open: None, refused: 0 };

    const fn is_any_open(&self) -> bool {
        self.open.is_some() || self.refused > 0
    }

    /// Lets requests know how many captures are open.
    fn show(&self, device: usize) {
        let open = u32::from(self.open.is_some()).saturating_add(self.refused);
        let show = |shown: u32| Some(shown & UNANNOUNCED | open.min(!UNANNOUNCED));
        // Release: pairs with `must_query_driver`.
        let _always = OPEN[device].fetch_update(Ordering::Release, Ordering::Relaxed, show);
    }

    /// The arena that captured streams are served from, or why there is none (G2).
    fn serving(&self) -> Result<ArenaId, String> {
        match self.open {
            Some(pool) if self.refused == 0 => Ok(pool.arena),
            Some(pool) => Err(format!(
                "dormouse: memory for a CUDA graph was asked for while {} captures run on one GPU, \
                 and which of them it is for cannot be told (the first is that of pool {:?}); \
                 accepted: one at a time",
                self.refused.saturating_add(1),
                pool.id,
            )),
            None if self.refused > 0 => {
                Err("dormouse: memory for a CUDA graph was asked for whose capture was refused, \
                     since it began while another one was running"
                    .to_owned())
            }
            None => Err("dormouse: memory for a CUDA graph was asked for, but no capture was \
                         announced: accepted is torch.cuda.graph under dormouse.install(), or \
                         dormouse_torch_begin_pool around the capture"
                .to_owned()),
        }
    }

    /// Opens a capture, with a new arena where its pool has none.
    fn begin(
        &mut self,
        id: PoolId,
        is_nested: bool,
        create: impl FnOnce() -> Result<ArenaId, Fault>,
    ) -> Result<(), Fault> {
        if !is_nested {
            // Whatever was open has failed.
            (self.open, self.refused) = (None, 0);
        }
        // A capture that is refused runs all the same, and must not be served what is another's.
        self.refused = self.refused.saturating_add(1);
        let at = match self.find(id) {
            Some(at) => at,
            None => {
                self.pools.push(Pool { id, arena: create()?, graphs: 0 });
                self.pools.len() - 1
            }
        };
        // Torch releases the pool for a capture that was refused, too.
        let pool = &mut self.pools[at];
        pool.graphs = pool.graphs.saturating_add(1);
        if !is_nested {
            (self.open, self.refused) = (Some(*pool), 0);
            return Ok(());
        }
        let other = self.open.map_or_else(
            || "one that was refused".to_owned(),
            |pool| format!("one into {:?}", pool.id),
        );
        Err(Fault::argument(format!(
            "a capture into pool {id:?} began while {other} was running; accepted: one at a time \
             on a GPU. It gets no memory, nor does the other one while it runs"
        )))
    }

    /// Ends the capture that `id` began.
    fn end(&mut self, id: PoolId) -> Result<(), Fault> {
        match self.open {
            Some(pool) if pool.id == id => self.open = None,
            _ if self.refused > 0 => self.refused -= 1,
            open => {
                return Err(Fault::argument(format!(
                    "a capture into pool {id:?} ended, but {}; accepted: the id of a begin",
                    match open {
                        Some(pool) => format!("the one that runs is into {:?}", pool.id),
                        None => "none is running".to_owned(),
                    }
                )));
            }
        }
        Ok(())
    }

    /// A graph of pool `id` is gone. The arena, where it was the last.
    fn release(&mut self, id: PoolId) -> Result<Option<ArenaId>, Fault> {
        let Some(at) = self.find(id) else {
            return Err(Fault::argument(format!(
                "pool {id:?} was released, but it is none of the {} there are; accepted: the id \
                 of a begin, as often as it began",
                self.pools.len(),
            )));
        };
        let pool = &mut self.pools[at];
        pool.graphs = pool.graphs.saturating_sub(1);
        Ok((pool.graphs == 0).then(|| self.pools.swap_remove(at).arena))
    }

    fn find(&self, id: PoolId) -> Option<usize> {
        self.pools.iter().position(|pool| pool.id == id)
    }
}
