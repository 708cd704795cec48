//! Memory for CUDA graphs. PyTorch announces the begin and end of a capture, and the release of its graph.
//!
//! A graph replays on the addresses of its capture. During a capture, requests of captured streams are
//! served from an arena of the pool that PyTorch names. The arena keeps its pages until PyTorch has
//! released the pool once per begin. Only the driver knows whether a stream is captured; the query
//! costs more than the rest of a request, so it is made only while the answer can be yes.
//!
//! One capture at a time runs on a GPU: with two, the owner of a request is unknown. Some versions of
//! PyTorch do not announce the end of a failed capture. It counts as ended when no stream is captured
//! any more. The stream of a capture without a request is unknown: such a capture counts as ended only for the thread
//! that began it, which begins no other one meanwhile. The pool of a failed capture is kept: PyTorch may release it later, and must not release that of other graphs.
//!
//! - **G1** A request served from an arena queried the driver after the begin of the capture.
//! - **G2** A refused or unannounced capture gets no memory: its graph would silently use memory of
//!   others.

#[cfg(test)]
mod tests;

use std::thread::{self, ThreadId};

use dormouse_alloc::ArenaId;
use dormouse_device::sync::Mutex;

use super::request_flags;
use crate::device::{AnyStream, GPUS_MAX};
use crate::fault::Fault;
use crate::heap::Heap;
use crate::{fork, status, stderr};

/// PyTorch's id of a memory pool.
pub(crate) type PoolId = (u64, u64);

/// Pools and captures of each GPU.
static GRAPHS: [Mutex<Graphs>; GPUS_MAX] = [const { Mutex::new(Graphs::NONE) }; GPUS_MAX];

/// A pool that graphs replay on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pool {
    id: PoolId,
    arena: ArenaId,
    /// Number of begins that were not released.
    graphs: u32,
}

/// The pools of a GPU, at most one per arena, and its open capture.
#[derive(Debug)]
struct Graphs {
    pools: Vec<Pool>,
    /// Pool of the open capture.
    open: Option<Pool>,
    /// Thread that began it.
    opener: Option<ThreadId>,
    /// A captured stream has requested memory of it: the heap knows the stream.
    is_stream_known: bool,
    /// Number of refused captures that have not ended.
    refused: u32,
}

/// Returns the arena that serves a request of `stream`, if the stream is being captured (G1).
pub(super) fn arena_for(heap: &Heap, stream: &AnyStream) -> Result<Option<ArenaId>, Fault> {
    if !heap.allocator().device().is_captured(stream)? {
        return Ok(None);
    }
    let (_, ordinal) = heap.device();
    let mut graphs = GRAPHS[ordinal as usize].lock();
    let arena = graphs.arena()?;
    graphs.is_stream_known = true;
    Ok(Some(arena))
}

/// `dormouse_torch_begin_pool`.
pub(crate) fn begin(device: i32, id: PoolId) {
    on_gpu("begin_pool", device, Heap::gpu, |heap, graphs| {
        // PyTorch begins the capture of the stream after this call: a captured one is of another.
        let is_nested = graphs.open_count() > 0 && (graphs.is_hidden() || heap.sees_capture());
        graphs.begin(id, is_nested, || Ok(heap.allocator().arena_create_kept()?))?;
        Ok(None)
    });
}

/// `dormouse_torch_end_pool`.
pub(crate) fn end(device: i32, id: PoolId) {
    on_gpu("end_pool", device, Heap::existing_gpu, |_, graphs| {
        graphs.end(id)?;
        Ok(None)
    });
}

/// `dormouse_torch_release_pool`.
pub(crate) fn release(device: i32, id: PoolId) {
    on_gpu("release_pool", device, Heap::existing_gpu, |_, graphs| graphs.release(id));
}

/// Returns the pool of an arena, unless it is released.
pub(crate) fn pool_of(heap: &Heap, arena: ArenaId) -> Option<PoolId> {
    let (_, ordinal) = heap.device();
    let graphs = GRAPHS[ordinal as usize].lock();
    graphs.pools.iter().find(|pool| pool.arena == arena).map(|pool| pool.id)
}

/// Runs `body` on the pools of a GPU, whose heap is found by `find`, and closes the arena that it
/// returns.
fn on_gpu(
    what: &str,
    device: i32,
    find: fn(i32) -> Result<&'static Heap, Fault>,
    body: impl FnOnce(&Heap, &mut Graphs) -> Result<Option<ArenaId>, Fault>,
) {
    if fork::in_child() {
        return;
    }
    stderr::guarded(what, || {
        let heap = find(device)?;
        let (_, ordinal) = heap.device();
        let mut graphs = GRAPHS[ordinal as usize].lock();
        let outcome = body(heap, &mut graphs);
        request_flags::set_open(ordinal as usize, graphs.open_count());
        drop(graphs);
        // Without the lock: it queries events of the device.
        if let Some(arena) = outcome? {
            heap.allocator().arena_close(arena);
        }
        Ok(())
    });
}

impl Graphs {
    const NONE: Self =
        Self { pools: Vec::new(), open: None, opener: None, is_stream_known: false, refused: 0 };

    /// Whether another thread has begun the open capture and its stream is unknown: no query tells that it has ended.
    fn is_hidden(&self) -> bool {
        let is_mine = self.opener == Some(thread::current().id());
        self.open.is_some() && !self.is_stream_known && !is_mine
    }

    fn open_count(&self) -> u32 {
        u32::from(self.open.is_some()).saturating_add(self.refused)
    }

    /// Returns the arena that serves captured streams (G2).
    fn arena(&self) -> Result<ArenaId, Fault> {
        let reason = match self.open {
            Some(pool) if self.refused == 0 => return Ok(pool.arena),
            Some(pool) => format!(
                "{} captures run on one GPU, the first into pool {:?}, and the owner of the request is \
                 unknown; accepted: one capture at a time",
                self.refused.saturating_add(1),
                pool.id,
            ),
            None if self.refused > 0 => {
                "its capture was refused, because it began while another one was running".to_owned()
            }
            None => {
                "no capture was announced; accepted: torch.cuda.graph after dormouse.install(), \
                     or dormouse_torch_begin_pool around the capture"
                    .to_owned()
            }
        };
        Err(Fault::new(
            status::DORMOUSE_ERR_STATE,
            format!("dormouse: no memory for a CUDA graph: {reason}"),
        ))
    }

    /// Opens a capture. Creates the arena of a new pool with `create`.
    fn begin(
        &mut self,
        id: PoolId,
        is_nested: bool,
        create: impl FnOnce() -> Result<ArenaId, Fault>,
    ) -> Result<(), Fault> {
        if !is_nested {
            // An open capture has failed.
            (self.open, self.refused) = (None, 0);
        }
        // Counted as refused until it is accepted: a refused capture runs, and gets no memory.
        self.refused = self.refused.saturating_add(1);
        let at = match self.find(id) {
            Some(at) => at,
            None => {
                self.pools.push(Pool { id, arena: create()?, graphs: 0 });
                self.pools.len() - 1
            }
        };
        // PyTorch releases the pool for a refused capture, too.
        let pool = &mut self.pools[at];
        pool.graphs = pool.graphs.saturating_add(1);
        if !is_nested {
            (self.open, self.refused) = (Some(*pool), 0);
            (self.opener, self.is_stream_known) = (Some(thread::current().id()), false);
            return Ok(());
        }
        let other = self
            .open
            .map_or_else(|| "a refused one".to_owned(), |pool| format!("one into {:?}", pool.id));
        Err(Fault::argument(format!(
            "a capture into pool {id:?} began while {other} was running; accepted: one at a time on a \
             GPU. Neither gets memory while both run"
        )))
    }

    /// Ends the capture into pool `id`.
    fn end(&mut self, id: PoolId) -> Result<(), Fault> {
        match self.open {
            Some(pool) if pool.id == id => self.open = None,
            _ if self.refused > 0 => self.refused -= 1,
            open => {
                let running = open.map_or_else(
                    || "no capture is running".to_owned(),
                    |pool| format!("the running one is into {:?}", pool.id),
                );
                return Err(Fault::argument(format!(
                    "a capture into pool {id:?} ended, but {running}; accepted: the id of a begin"
                )));
            }
        }
        Ok(())
    }

    /// Releases one graph of pool `id`. Returns the arena after the last one.
    fn release(&mut self, id: PoolId) -> Result<Option<ArenaId>, Fault> {
        let Some(at) = self.find(id) else {
            return Err(Fault::argument(format!(
                "pool {id:?} was released, but is unknown ({} pools exist); accepted: the id of a begin, \
                 once per begin",
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
