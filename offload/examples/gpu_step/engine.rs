//! The engine and the prefix of one step, simulated: what their marks do without a plan on a stream-ordered device
//! (`offload/src/prefix/{marks,waking}.rs`). Each copy takes its bytes over the link; the calls are the real ones.

use std::collections::VecDeque;
use std::ops::Range;

use dormouse_alloc::{Block, PeakWatch};
use dormouse_device::cuda::Staged;
use dormouse_device::{Device, Fill, SpanId, SpanLabel};
use dormouse_offload::{EngineConfig, UNUSED_BYTES_MAX};

use crate::geometry::{LAYERS, LINK};
use crate::machine::{Machine, Outcome};

/// A dormant tensor.
#[derive(Clone, Copy)]
struct Dormant {
    block: Block,
    /// Without the rest of its last page.
    bytes: u64,
    /// While it sleeps.
    span: Option<SpanId>,
}

/// A sleep that has not begun.
struct Falling {
    layer: usize,
    at: usize,
    /// When its last use is over.
    ready_ns: u64,
}

#[derive(Default)]
struct Layer {
    dormant: Vec<Dormant>,
    /// When its pages are there, and when its bytes are.
    staged_ns: u64,
    arrived_ns: u64,
}

/// The thread that stages pages.
#[derive(Clone, Copy)]
enum Stager {
    /// The trainer's, at the mark that needs them.
    Host,
    /// An I/O thread, ahead of need.
    Ahead,
}

pub(crate) struct Engine {
    config: EngineConfig,
    layers: Vec<Layer>,
    falling: VecDeque<Falling>,
    /// Regions that are being copied out: bytes, and when the copy ends.
    inflight: VecDeque<(u64, u64)>,
    /// Times of the allocator at the begins of the two microbatches before.
    unused_from: [Option<u64>; 2],
    microbatch_watch: PeakWatch,
    /// Allocated bytes when the last microbatch began, if all that is dormant had left.
    microbatch_base_bytes: Option<u64>,
    /// The most bytes that a microbatch has taken.
    microbatch_bytes: Option<u64>,
    has_gradients: bool,
    is_last_microbatch: bool,
    /// Whether the window of the first backward was requested.
    has_window: bool,
    /// This layer and those above it were requested.
    awake_from: usize,
    /// Bytes that began to wake with the last microbatch.
    pub(crate) woken_beside_bytes: u64,
}

impl Engine {
    pub(crate) fn new(machine: &Machine) -> Self {
        Self {
            config: EngineConfig::default(),
            layers: (0..LAYERS).map(|_| Layer::default()).collect(),
            falling: VecDeque::new(),
            inflight: VecDeque::new(),
            unused_from: [None; 2],
            microbatch_watch: machine.allocator.watch_peak(),
            microbatch_base_bytes: None,
            microbatch_bytes: None,
            has_gradients: false,
            is_last_microbatch: false,
            has_window: false,
            awake_from: LAYERS,
            woken_beside_bytes: 0,
        }
    }

    pub(crate) fn end(self, machine: &Machine) {
        machine.allocator.unwatch_peak(self.microbatch_watch);
    }

    /// Names what a layer saved: it may sleep.
    pub(crate) fn name(&mut self, layer: usize, saved: impl Iterator<Item = (Block, usize)>) {
        let dormant =
            saved.map(|(block, bytes)| Dormant { block, bytes: bytes as u64, span: None });
        self.layers[layer].dormant = dormant.collect();
    }

    /// Lets a layer fall asleep behind what the GPU was given so far.
    pub(crate) fn let_sleep(&mut self, layer: usize, ready_ns: u64) {
        let tensors = 0..self.layers[layer].dormant.len();
        self.falling.extend(tensors.map(|at| Falling { layer, at, ready_ns }));
    }

    /// The sleeps whose pages leave by the host's time: a copy, then the pages.
    pub(crate) fn fall_asleep(&mut self, machine: &mut Machine) -> Outcome<()> {
        let until_ns = machine.times.host;
        while let Some(&Falling { layer, at, ready_ns }) = self.falling.front() {
            let Dormant { block, bytes, .. } = self.layers[layer].dormant[at];
            let mut begin_ns = machine.times.copies_out.max(ready_ns);
            let mut inflight_bytes: u64 = self.inflight.iter().map(|(bytes, _)| bytes).sum();
            while inflight_bytes > 0 && inflight_bytes + bytes > self.config.inflight_bytes_max {
                let Some(&(ended_bytes, end_ns)) = self.inflight.front() else { break };
                if end_ns > until_ns {
                    return Ok(());
                }
                begin_ns = begin_ns.max(end_ns);
                inflight_bytes -= ended_bytes;
                self.inflight.pop_front();
            }
            let copied_ns = begin_ns + bytes / LINK;
            let seal_ns = copied_ns.max(machine.times.sealer);
            if seal_ns > until_ns {
                return Ok(());
            }
            self.falling.pop_front();
            let (span, end_ns) = machine.calls(seal_ns, |allocator| {
                let device = allocator.device();
                allocator.claim(block.range.start, 1)?;
                let span = device.freeze(block.range, SpanLabel::default())?;
                device.seal(span)?;
                allocator.set_asleep(block.id)?;
                Ok(span)
            })?;
            machine.times.copies_out = copied_ns;
            machine.times.sealer = end_ns;
            self.inflight.push_back((bytes, copied_ns));
            self.layers[layer].dormant[at].span = Some(span);
        }
        Ok(())
    }

    /// The mark of a microbatch, with `after` more to come.
    pub(crate) fn begin_microbatch(&mut self, machine: &mut Machine, after: usize) -> Outcome<()> {
        self.note_microbatch_memory(machine);
        self.is_last_microbatch = after == 0;
        self.give_back_unused(machine)?;
        if let Some(microbatch_bytes) = self.microbatch_bytes
            && self.is_last_microbatch
            && self.has_gradients
        {
            let asleep_bytes = self.asleep_bytes(0..LAYERS);
            self.wake_into_spare(machine, microbatch_bytes)?;
            self.woken_beside_bytes = asleep_bytes - self.asleep_bytes(0..LAYERS);
        }
        Ok(())
    }

    /// Returns the bytes of these layers that sleep.
    fn asleep_bytes(&self, layers: Range<usize>) -> u64 {
        let dormant = self.layers[layers].iter().flat_map(|layer| &layer.dormant);
        let asleep = dormant.filter(|one| one.span.is_some());
        asleep.map(|one| one.block.range.bytes as u64).sum()
    }

    /// Notes what the microbatch before took, and where the next one begins.
    fn note_microbatch_memory(&mut self, machine: &Machine) {
        let peak_bytes = machine.allocator.watched_peak(self.microbatch_watch);
        if let Some(base_bytes) = self.microbatch_base_bytes {
            let taken_bytes = peak_bytes.saturating_sub(base_bytes);
            self.microbatch_bytes = self.microbatch_bytes.max(Some(taken_bytes));
        }
        let base_bytes = machine.allocator.stats().allocated_bytes.current;
        let mut dormant = self.layers.iter().flat_map(|layer| &layer.dormant);
        let have_left = dormant.all(|one| one.span.is_some());
        self.microbatch_base_bytes = have_left.then_some(base_bytes);
    }

    /// Pages that neither of the last two microbatches has used leave, but not for the last one.
    fn give_back_unused(&mut self, machine: &mut Machine) -> Outcome<()> {
        if machine.allocator.stats().asleep_bytes.current == 0 {
            return Ok(());
        }
        let now = machine.allocator.watch_unused();
        let [since, last] = std::mem::take(&mut self.unused_from);
        self.unused_from = [last, Some(now)];
        if let Some(since) = since.filter(|_| !self.is_last_microbatch) {
            machine.host_calls(|it| Ok(it.trim_unused(since, UNUSED_BYTES_MAX)))?;
        }
        Ok(())
    }

    /// A gradient of a boundary tensor arrives.
    pub(crate) fn gradient(&mut self, machine: &mut Machine) -> Outcome<()> {
        self.has_gradients = true;
        match (self.is_last_microbatch, self.has_window) {
            (false, _) => Ok(()),
            (true, false) => self.begin_wake(machine),
            (true, true) => self.wake_into_spare(machine, 0),
        }
    }

    /// Wakes the window of the first backward, at the last microbatch's first gradient or at the begin of phase C.
    pub(crate) fn begin_wake(&mut self, machine: &mut Machine) -> Outcome<()> {
        if std::mem::replace(&mut self.has_window, true) {
            return Ok(());
        }
        self.wake(machine, needed(LAYERS - 1), Stager::Ahead)?;
        self.wake_window(machine, LAYERS - 1)
    }

    /// The mark of a layer's backward: the host waits until it and the layer below are staged, the GPU until their
    /// bytes are there.
    pub(crate) fn begin_backward(&mut self, machine: &mut Machine, layer: usize) -> Outcome<()> {
        self.wake(machine, needed(layer), Stager::Host)?;
        self.wake_window(machine, layer)?;
        for needed in needed(layer).map(|layer| &self.layers[layer]) {
            machine.times.host = machine.times.host.max(needed.staged_ns);
            machine.times.gpu = machine.times.gpu.max(needed.arrived_ns);
        }
        Ok(())
    }

    fn wake_window(&mut self, machine: &mut Machine, layer: usize) -> Outcome<()> {
        let lowest = layer.saturating_sub(self.config.wake_window_layers as usize);
        self.wake(machine, (lowest..layer.saturating_sub(1)).rev(), Stager::Ahead)?;
        self.awake_from = self.awake_from.min(lowest);
        self.wake_into_spare(machine, 0)
    }

    /// Wakes further layers, in the order of need, as long as `reserve_bytes` stay spare.
    fn wake_into_spare(&mut self, machine: &mut Machine, reserve_bytes: u64) -> Outcome<()> {
        while let Some(next) = self.awake_from.checked_sub(1) {
            let spare_bytes = machine.allocator.spare_bytes();
            if self.asleep_bytes(next..next + 1) > spare_bytes.saturating_sub(reserve_bytes) {
                break;
            }
            self.awake_from = next;
            self.wake(machine, std::iter::once(next), Stager::Ahead)?;
        }
        Ok(())
    }

    /// Wakes layers, unless they are awake. The trainer's thread reserves room for all of them; then one thread maps
    /// the pages, and copies in follow. A sleep that has not begun is withdrawn.
    fn wake(
        &mut self,
        machine: &mut Machine,
        layers: impl Iterator<Item = usize>,
        stager: Stager,
    ) -> Outcome<()> {
        let mut waking = Vec::new();
        for layer in layers {
            self.falling.retain(|one| one.layer != layer);
            for (at, one) in self.layers[layer].dormant.iter().enumerate() {
                if let Some(span) = one.span {
                    let bytes = one.block.range.bytes as u64;
                    machine.host_calls(|allocator| Ok(allocator.reserve_awake(bytes)?))?;
                    waking.push((layer, at, span));
                }
            }
        }
        for (layer, at, span) in waking {
            self.stage(machine, layer, at, span, stager)?;
        }
        Ok(())
    }

    fn stage(
        &mut self,
        machine: &mut Machine,
        layer: usize,
        at: usize,
        span: SpanId,
        stager: Stager,
    ) -> Outcome<()> {
        let Dormant { block, bytes, .. } = self.layers[layer].dormant[at];
        let from_ns = match stager {
            Stager::Host => machine.times.host,
            Stager::Ahead => machine.times.stager.max(machine.times.host),
        };
        let ((), end_ns) = machine.calls(from_ns, |allocator| {
            let device = allocator.device();
            let staged = match allocator.info(block.id)?.wakes_large {
                true => device.stage_large(span, Fill::Any)?,
                false => device.stage(span, Fill::Any)?,
            };
            device.publish(staged).map_err(|(error, _): (_, Staged)| error)?;
            allocator.set_awake(block.id)?;
            allocator.unclaim(block.id)?;
            Ok(())
        })?;
        match stager {
            Stager::Host => machine.times.host = end_ns,
            Stager::Ahead => machine.times.stager = end_ns,
        }
        machine.times.copies_in = machine.times.copies_in.max(end_ns) + bytes / LINK;
        let layer = &mut self.layers[layer];
        layer.dormant[at].span = None;
        (layer.staged_ns, layer.arrived_ns) = (end_ns, machine.times.copies_in);
        Ok(())
    }
}

/// Returns the layers that must be awake before the backward of `layer`: itself, and the one below, which allocated its
/// input.
fn needed(layer: usize) -> impl Iterator<Item = usize> {
    [Some(layer), layer.checked_sub(1)].into_iter().flatten()
}
