//! A prefix across the three phases: the layer of its memory, when it sleeps and when it wakes.
//!
//! The trainer marks the begin and end of each layer and names the storages that autograd saved. Memory
//! that was allocated in a layer's window *and* named is dormant; all other memory stays awake. A layer
//! sleeps after the next one has run, and is awake again before its backward begins.
//!
//! A prefix is exclusive: one thread at a time. It may be closed (or dropped) in any phase.

mod boundary;
mod dormant;
mod explain;
mod marks;
mod order;
mod plan_follower;
mod report;
mod waking;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use crate::places::{Edge, Phase};
pub use boundary::{SLOTS_MAX, Tensor};
pub use dormant::{Named, Refused, RefusedReason};
pub use report::{LayerReport, Planned, PrefixReport};
pub use waking::UNUSED_BYTES_MAX;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dormouse_alloc::{ArenaId, PeakWatch};
use dormouse_device::Device;
use dormouse_timeline::{Lane, Slice};
use tracing::Span;

use crate::config::WINDOW_LAYERS_MAX;
use crate::engine::{Account, BytesToLoad, Engine, Progress};
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use crate::step_profile::{Clock, MarkPoint, MarkTime, Part, Recorder};
use boundary::BoundarySlot;
use dormouse_residency::plan::{ResidencyPlan, StepWork};
use dormouse_residency::{LayerLoad, stall_bound_ns};
use order::MarkOrder;
use plan_follower::PlanFollower;

/// Limit on layers per prefix.
pub const LAYERS_MAX: u32 = 1 << 16;

/// One layer's memory and times.
#[derive(Debug, Default)]
struct Layer {
    regions: Vec<RegionId>,
    /// All of them sleep, are about to, or wait for a place, unless a sleep of the prefix ended since.
    is_settled: bool,
    /// Bytes to load when waking began.
    bytes_to_load: BytesToLoad,
    report: LayerReport,
}

/// One prefix across phases A, B and C. Exclusive.
#[derive(Debug)]
pub struct Prefix<D: Device> {
    engine: Arc<Engine<D>>,
    label: String,
    number: u32,
    order: MarkOrder,
    /// Its place in the step, for reports of other threads.
    progress: Arc<Progress>,
    window: u32,
    /// The plan, if there is one.
    follow: Option<PlanFollower>,
    recorder: Recorder,
    /// Dormant bytes of its layers, in any tier.
    held_bytes: u64,
    layers: Vec<Layer>,
    slots: BTreeMap<(u32, u32), BoundarySlot>,
    account: Arc<Account>,
    /// Value of `Account::awakenings` when layers were last checked.
    awakenings_before: u64,
    phase_began_ns: u64,
    /// Number of microbatches after the one that began last.
    microbatches_after: Option<u32>,
    /// Number of microbatches that have begun.
    microbatches_begun: u32,
    /// The peak of each microbatch.
    microbatch_watch: PeakWatch,
    /// Allocated bytes when the last microbatch began; `None` while dormant memory has yet to leave, which hides
    /// what a microbatch takes.
    microbatch_base_bytes: Option<u64>,
    /// The most bytes that a microbatch has taken so far.
    microbatch_bytes: Option<u64>,
    /// Whether a microbatch has run a backward.
    has_gradients: bool,
    /// Times of the allocator at the begins of the two microbatches before, the earlier one first.
    unused_from: [Option<u64>; 2],
    /// Number of gradients of the last microbatch so far; `None` before it begins.
    last_microbatch_gradients: Option<usize>,
    wake_began_ns: Option<u64>,
    /// Whether the window of the first backward was asked to wake, without a plan.
    has_asked_window: bool,
    /// This layer and those above it were asked to wake, without a plan.
    awake_from: u32,
    /// Times of the trainer's marks.
    clock: Clock<D>,
    /// Time that threads waited elsewhere than at the begin of a backward.
    other_stall_ns: u64,
    phase_peak_bytes: [u64; 3],
    peak_watch: PeakWatch,
    left_asleep_bytes: u64,
    /// Arena of the blocks allocated in the layers' windows: the pages of a finished layer go to the layers
    /// that wake next. `None` after phase A, or at the limit on arenas.
    arena: Option<ArenaId>,
    /// Spans of the phase entered last and of the layer between its marks.
    phase_span: Span,
    layer_span: Span,
    is_closed: bool,
}

impl<D: Device> Engine<D> {
    /// Creates a prefix of `layers` layers. Errors and reports call it `label`. A later prefix with the same
    /// label and number of layers is planned from the profile of this one.
    ///
    /// # Errors
    /// `Argument` for no layers or more than [`LAYERS_MAX`]; `TooMany` after 2³² prefixes.
    pub fn prefix(self: &Arc<Self>, layers: u32, label: &str) -> Result<Prefix<D>, OffloadError> {
        static NUMBERS: AtomicU32 = AtomicU32::new(1);
        if layers == 0 || layers > LAYERS_MAX {
            let accepted = format!("1 to {LAYERS_MAX}");
            return Err(OffloadError::argument("layers", layers, accepted));
        }
        // Relaxed: only uniqueness matters. Scopes must never be reused, so no wrapping.
        let number = NUMBERS
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_add(1))
            .map_err(|n| OffloadError::TooMany { what: "prefixes", limit: u64::from(n) })?;
        Ok(Prefix {
            engine: Arc::clone(self),
            label: label.to_owned(),
            number,
            order: MarkOrder::new(layers),
            progress: self.begin_progress(number, label),
            window: self.window_layers(),
            follow: None,
            recorder: Recorder::default(),
            held_bytes: 0,
            layers: (0..layers).map(|_| Layer::default()).collect(),
            slots: BTreeMap::new(),
            account: Arc::new(Account::default()),
            awakenings_before: 0,
            phase_began_ns: 0,
            microbatches_after: None,
            microbatches_begun: 0,
            microbatch_watch: self.allocator().watch_peak(),
            microbatch_base_bytes: None,
            microbatch_bytes: None,
            has_gradients: false,
            unused_from: [None; 2],
            last_microbatch_gradients: None,
            wake_began_ns: None,
            has_asked_window: false,
            awake_from: layers,
            clock: Clock::default(),
            other_stall_ns: 0,
            phase_peak_bytes: [0; 3],
            peak_watch: self.allocator().watch_peak(),
            left_asleep_bytes: 0,
            arena: self.allocator().arena_create().ok(),
            phase_span: Span::none(),
            layer_span: Span::none(),
            is_closed: false,
        })
    }
}

impl<D: Device> Prefix<D> {
    /// Returns the `Request::scope` of blocks allocated in this layer's window.
    ///
    /// # Errors
    /// `Argument` for a layer the prefix does not have.
    pub fn scope(&self, layer: u32) -> Result<u64, OffloadError> {
        self.order.check_layer(layer)?;
        Ok(self.scope_of(layer))
    }

    /// Returns the arena for blocks of the layers' windows; `None` from phase B on, when such blocks come
    /// from the general pool.
    #[must_use]
    pub const fn arena(&self) -> Option<ArenaId> {
        self.arena
    }

    /// Closes the arena: no layer allocates any more.
    fn close_arena(&mut self) {
        if let Some(arena) = self.arena.take() {
            self.engine.allocator().arena_close(arena);
        }
    }

    /// Prefix numbers begin at 1, so no scope is 0, which means none.
    const fn scope_of(&self, layer: u32) -> u64 {
        ((self.number as u64) << 32) | layer as u64
    }

    /// Returns the number of layers.
    #[must_use]
    pub const fn layers(&self) -> u32 {
        self.layers.len() as u32
    }

    /// Sets the number of layers to wake ahead, clamped to 1 to [`WINDOW_LAYERS_MAX`].
    pub fn set_window(&mut self, wake_window_layers: u32) {
        self.window = wake_window_layers.clamp(1, WINDOW_LAYERS_MAX);
    }

    /// Follows a plan from now on. Layers that it keeps stay awake, unless an allocation reclaims them. The
    /// others sleep in its tiers and wake as room allows, instead of a window of layers at a time.
    ///
    /// The work's groups are the prefix's layers. Its operations are their forwards, the microbatches, and the
    /// backwards from the top. The last microbatch is `last_microbatch_parts` operations: one before its
    /// first gradient, the others as gradients arrive.
    ///
    /// # Errors
    /// `Argument` if the figures do not match each other or the prefix.
    pub fn follow(
        &mut self,
        work: StepWork,
        plan: ResidencyPlan,
        last_microbatch_parts: usize,
    ) -> Result<(), OffloadError> {
        self.follow = Some(PlanFollower::new(work, plan, self.layers(), last_microbatch_parts)?);
        Ok(())
    }

    /// Reports on the prefix so far. Waits until the streams have passed its latest marks, because their
    /// waits are known only then.
    #[must_use]
    pub fn report(&mut self) -> PrefixReport {
        self.clock.wait(self.engine.allocator().device());
        self.settle_clock();
        self.report_so_far()
    }

    fn report_so_far(&self) -> PrefixReport {
        let (boundary_bytes, accumulator_bytes) = self.boundary_bytes();
        let owner = &self.account;
        let layer: Vec<LayerReport> = self.layers.iter().map(|l| l.report).collect();
        PrefixReport {
            layers: self.layers(),
            dormant_bytes: layer.iter().map(|l| l.dormant_bytes).sum(),
            boundary_bytes,
            accumulator_bytes,
            asleep_bytes_at_b: layer.iter().map(|l| l.asleep_bytes_at_b).sum(),
            asleep_bytes_peak: owner.asleep.peak_bytes(),
            host_bytes_peak: owner.tiers[Tier::Host.index()].peak_bytes(),
            nvme_bytes_peak: owner.tiers[Tier::Nvme.index()].peak_bytes(),
            written_bytes: owner.written.stats().bytes,
            read_bytes: owner.read.stats().bytes,
            write_bytes_per_s: owner.written.bytes_per_s(),
            read_bytes_per_s: owner.read.bytes_per_s(),
            link_rates: self.engine.link_rates(),
            stall_ns: self.other_stall_ns
                + owner.stray_ns()
                + layer.iter().map(|l| l.stall_ns).sum::<u64>(),
            stall_bound_ns: self.bound_ns(),
            planned: self.follow.as_ref().map(PlanFollower::planned),
            layer,
            declined: owner.reasons(),
            peak_phase: self.peak_phase(),
            phase_peak_bytes: self.phase_peak_bytes,
            left_asleep_bytes: self.left_asleep_bytes,
            stray: owner.stray(),
        }
    }

    /// Reads the times of the marks that the trainer's streams have passed.
    fn settle_clock(&mut self) {
        self.clock.settle(self.engine.allocator().device(), self.engine.timeline());
        for (at, layer) in self.layers.iter_mut().enumerate() {
            let times = self.clock.times().layer(at);
            layer.report.forward_ns = times.forward_ns;
            layer.report.backward_ns = times.backward_ns;
            layer.report.stall_ns = times.stall_ns;
        }
    }

    /// Records that the trainer is at `point` on the stream.
    fn came_to(&mut self, point: MarkPoint, stream: &D::Stream) {
        let now = self.moment(stream);
        self.clock.came_to(point, now, self.engine.timeline());
    }

    fn moment(&self, stream: &D::Stream) -> MarkTime<D> {
        let now_ns = self.engine.timeline().now_ns();
        self.clock.moment(self.engine.allocator().device(), stream, now_ns)
    }

    /// Begins a part of the step, on this stream. Without a stream the host's time counts: an earlier
    /// stream may no longer exist.
    fn begin_part(&mut self, part: Part, stream: Option<&D::Stream>) {
        self.recorder.begin(part);
        let now = match stream {
            Some(stream) => self.moment(stream),
            None => MarkTime::At(self.engine.timeline().now_ns()),
        };
        self.clock.came_to(MarkPoint::Began(part), now, self.engine.timeline());
    }

    /// Returns the lower bound of the stall of the layers whose backward was due, in that order: the larger
    /// bound of the two links. Copies overlap with all work between two backwards.
    fn bound_ns(&self) -> u64 {
        let Some(began_ns) = self.wake_began_ns else { return 0 };
        let times = self.clock.times();
        let due = |(at, layer)| Some((times.layer(at).unstalled_due_ns?, layer));
        let layers: Vec<(u64, &Layer)> =
            self.layers.iter().enumerate().rev().filter_map(due).collect();
        let Some(&(first_ns, _)) = layers.first() else { return 0 };
        let next_ns = layers.iter().skip(1).map(|&(next_ns, _)| next_ns).chain([u64::MAX]);
        let over = |link: fn(&BytesToLoad) -> u64, bytes_per_s| {
            let consumed: Vec<LayerLoad> = (layers.iter().zip(next_ns.clone()))
                .map(|(&(due_ns, layer), next_ns)| LayerLoad {
                    bytes: link(&layer.bytes_to_load),
                    compute_ns: next_ns.saturating_sub(due_ns),
                })
                .collect();
            stall_bound_ns(&consumed, bytes_per_s, first_ns.saturating_sub(began_ns))
        };
        let rates = self.engine.best_rates();
        let from_file_ns = over(|it| it.from_file_bytes, rates.nvme_to_device_bytes_per_s);
        from_file_ns.max(over(|it| it.from_host_bytes, rates.host_to_device_bytes_per_s))
    }

    fn peak_phase(&self) -> Option<Phase> {
        let phases = [Phase::A, Phase::B, Phase::C];
        let peaks = phases.into_iter().zip(self.phase_peak_bytes);
        peaks.filter(|&(_, bytes)| bytes > 0).max_by_key(|&(_, bytes)| bytes).map(|(p, _)| p)
    }

    /// Takes the peak of device memory in use since the last sample for the phase, and samples what is in use now.
    fn sample(&mut self) {
        let allocator = self.engine.allocator();
        let peak_bytes = allocator.watched_peak(self.peak_watch);
        if let Some(phase) = self.order.phase() {
            let bytes = allocator.stats().allocated_bytes.current;
            let peak = &mut self.phase_peak_bytes[phase.index()];
            *peak = (*peak).max(peak_bytes);
            self.engine.note_level(bytes);
            let resident_bytes = self.held_bytes.saturating_sub(self.account.asleep.bytes());
            self.recorder.hot(bytes.saturating_sub(resident_bytes));
        }
    }

    /// Ends the prefix in any phase: wakes its sleeping memory, releases it to its owner and frees the
    /// accumulators. Memory that cannot wake stays asleep until its owner frees it and is counted in
    /// `left_asleep_bytes`; no byte is lost. Waits for no stream: marks that a stream has not passed have no
    /// times in this report.
    #[must_use]
    pub fn close(mut self) -> PrefixReport {
        self.end();
        self.report_so_far()
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.is_closed, true) {
            return;
        }
        self.sample();
        self.engine.allocator().unwatch_peak(self.peak_watch);
        self.engine.allocator().unwatch_peak(self.microbatch_watch);
        self.record_phase();
        self.keep_profile();
        self.close_arena();
        let ids: Vec<RegionId> =
            self.layers.iter_mut().flat_map(|l| std::mem::take(&mut l.regions)).collect();
        self.engine.forbid_reclaim(&ids);
        // All at once; then one at a time, so that one failure does not leave others asleep.
        self.engine.wake(&ids);
        for id in ids {
            match self.wait(|engine| engine.wait_awake(&[id])) {
                Ok(()) => {
                    let _ = self.engine.release(id);
                }
                Err(e) => {
                    self.account.decline(&e.to_string());
                    let bytes = self.engine.region_info(id).map_or(0, |i| i.bytes);
                    self.left_asleep_bytes += bytes;
                }
            }
        }
        self.drop_slots();
        self.engine.end_progress(self.number);
        self.layer_span = Span::none();
        self.phase_span = Span::none();
        self.log_summary();
    }

    /// Emits one log event with the figures of the prefix.
    fn log_summary(&self) {
        if !tracing::enabled!(target: "offload", tracing::Level::INFO) {
            return;
        }
        let report = self.report_so_far();
        tracing::info!(
            target: "offload",
            prefix = self.number,
            label = self.label,
            layers = report.layers,
            dormant_bytes = report.dormant_bytes,
            asleep_bytes_peak = report.asleep_bytes_peak,
            host_bytes_peak = report.host_bytes_peak,
            nvme_bytes_peak = report.nvme_bytes_peak,
            written_bytes = report.written_bytes,
            read_bytes = report.read_bytes,
            stall_ns = report.stall_ns,
            stall_bound_ns = report.stall_bound_ns,
            left_asleep_bytes = report.left_asleep_bytes,
            peak_phase = ?report.peak_phase,
            declined = report.declined.join("; "),
            "prefix ended"
        );
    }

    /// Records the phase that ends now on the timeline.
    fn record_phase(&self) {
        let Some(phase) = self.order.phase() else { return };
        let timeline = self.engine.timeline();
        let name = timeline.intern(phase_name(phase));
        self.engine.allocator().record_levels();
        let end_ns = timeline.now_ns();
        timeline.slice(Slice::new(Lane::Phase, name, self.phase_began_ns, end_ns));
    }

    /// Records that a phase, a microbatch or the work on a layer begins on this thread: where memory runs out,
    /// what has begun has not ended.
    fn record_begin(&self, lane: Lane, name: &str, number: u32) {
        let timeline = self.engine.timeline();
        timeline.instant(lane, timeline.intern(name), number.into());
    }
}

/// Returns the name of a phase on the timeline.
const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::A => "A: prefix forward",
        Phase::B => "B: suffixes",
        Phase::C => "C: prefix backward",
    }
}

impl<D: Device> Drop for Prefix<D> {
    fn drop(&mut self) {
        self.end();
    }
}
