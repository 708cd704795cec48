//! A trainer that touches what it must, sleeps where it would compute, and counts what it waits.

use std::error::Error;
use std::time::{Duration, Instant};

use dormouse_alloc::Request;
use dormouse_kernels::DType;
use dormouse_offload::{Edge, Phase, Prefix, Tensor};
use dormouse_residency::plan::{ResidencyPlan, StepWork};

use crate::case::{Case, PAGE_BYTES, Tiers, blocks};
use crate::device::Paced;
use crate::fixture::Fixture;
use crate::pace::sleep_until;
use crate::policy::Policy;

/// The boundary tensor, its accumulator and its gradient: a page each.
const SMALL_BYTES: usize = PAGE_BYTES as usize;
const SMALL_BLOCKS: u64 = 3;
const ELEMS: usize = SMALL_BYTES / size_of::<f32>();
const PHASES: [Phase; 3] = [Phase::A, Phase::B, Phase::C];

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How a step went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) total_ns: u64,
    /// The part of it in which something was computed.
    pub(crate) compute_ns: u64,
    /// The part of each phase in which nothing was computed.
    pub(crate) stall_ns: [u64; 3],
    /// Bytes copied out of device memory.
    pub(crate) slept_bytes: u64,
    /// Bytes written to the file.
    pub(crate) written_bytes: u64,
}

/// A fixture for steps of the case. One has been played in it: a trainer has thousands, and only its
/// first waits for threads to be started and for memory to be touched and pinned.
///
/// # Errors
/// As [`run`].
pub(crate) fn fixture(case: &Case, plan: &ResidencyPlan, policy: Policy) -> Result<Fixture> {
    let fixture = Fixture::new(case, SMALL_BYTES as u64 * SMALL_BLOCKS)?;
    run(&fixture, case, plan, policy)?;
    Ok(fixture)
}

/// Plays one step of the case.
///
/// # Errors
/// What any call of the runtime said; bytes of a layer that are not what was written.
pub(crate) fn run(
    fixture: &Fixture,
    case: &Case,
    plan: &ResidencyPlan,
    policy: Policy,
) -> Result<Outcome> {
    let before = fixture.engine.stats();
    let mut prefix = fixture.engine.prefix(u32::try_from(case.layers())?, "stall")?;
    let work = case.work();
    policy.prepare(&mut prefix, &work, plan)?;
    let mut trainer = Trainer {
        gradient: fixture.allocator.allocate(&Request::new(SMALL_BYTES))?.range.start,
        fixture,
        work,
        case,
        policy,
        prefix,
        saved: Vec::new(),
        boundary: None,
        computed: Duration::ZERO,
        late: Duration::ZERO,
    };
    let began = Instant::now();
    let mut outcome = Outcome::default();
    for (phase, stall_ns) in PHASES.into_iter().zip(&mut outcome.stall_ns) {
        *stall_ns = trainer.play(phase)?.as_nanos() as u64;
    }
    outcome.total_ns = began.elapsed().as_nanos() as u64;
    outcome.compute_ns = trainer.computed.as_nanos() as u64;
    let stats = fixture.engine.stats();
    outcome.written_bytes = stats.nvme_write.bytes - before.nvme_write.bytes;
    outcome.slept_bytes = match case.tiers {
        Tiers::Direct => outcome.written_bytes,
        Tiers::Host | Tiers::Three => stats.device_to_host.bytes - before.device_to_host.bytes,
    };
    trainer.end()?;
    Ok(outcome)
}

struct Trainer<'a> {
    fixture: &'a Fixture,
    case: &'a Case,
    work: StepWork,
    policy: Policy,
    prefix: Prefix<Paced>,
    /// By layer: its blocks' first addresses, and their bytes.
    saved: Vec<Vec<(usize, usize)>>,
    boundary: Option<usize>,
    gradient: usize,
    computed: Duration,
    /// What was computed for longer than it should take, not made up for yet.
    late: Duration,
}

impl Trainer<'_> {
    /// One phase. How long nothing was computed in it.
    fn play(&mut self, phase: Phase) -> Result<Duration> {
        let (began, computed) = (Instant::now(), self.computed);
        self.prefix.enter(phase, &self.fixture.stream)?;
        let layers = u32::try_from(self.case.layers())?;
        match phase {
            Phase::A => (0..layers).try_for_each(|layer| self.forward(layer))?,
            Phase::B => (0..self.case.microbatches)
                .try_for_each(|microbatch| self.microbatch(microbatch))?,
            Phase::C => (0..layers).rev().try_for_each(|layer| self.backward(layer))?,
        }
        Ok(began.elapsed().saturating_sub(self.computed - computed))
    }

    /// Works, and sleeps for what is left of the time. All of it is compute, an oversleep too; the
    /// next one is shorter by that, or copies would have more time to hide in than they are given.
    fn compute(&mut self, ns: u64, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let (began, due) = (Instant::now(), Duration::from_nanos(ns));
        work(self)?;
        sleep_until(began + due.saturating_sub(self.late));
        let took = began.elapsed();
        self.computed += took;
        self.late = (self.late + took).saturating_sub(due);
        Ok(())
    }

    fn forward(&mut self, layer: u32) -> Result<()> {
        let (fixture, at) = (self.fixture, layer as usize);
        self.prefix.mark(Edge::ForwardBegin, layer, &fixture.stream)?;
        let saved = blocks(self.case.layer_bytes[at])
            .into_iter()
            .map(|bytes| Ok((self.allocate(layer, bytes as usize)?, bytes as usize)))
            .collect::<Result<Vec<_>>>()?;
        if layer == 0 {
            self.declare_boundary()?;
        }
        self.compute(self.work.operations[at].compute_ns, |_| {
            saved.iter().for_each(|&(start, bytes)| write(start, bytes));
            Ok(())
        })?;
        let addresses: Vec<usize> = saved.iter().map(|&(start, _)| start).collect();
        let named = self.prefix.dormant(layer, &addresses)?;
        if let Some(refused) = named.refused.first() {
            return Err(format!("layer {layer}: {refused:?}").into());
        }
        self.saved.push(saved);
        self.prefix.mark(Edge::ForwardEnd, layer, &fixture.stream)?;
        Ok(())
    }

    /// A block of a layer's window.
    fn allocate(&self, layer: u32, bytes: usize) -> Result<usize> {
        let (scope, arena) = (self.prefix.scope(layer)?, self.prefix.arena());
        let request = Request { scope, arena, ..Request::new(bytes) };
        Ok(self.fixture.allocator.allocate(&request)?.range.start)
    }

    fn declare_boundary(&mut self) -> Result<()> {
        let address = self.allocate(0, SMALL_BYTES)?;
        self.boundary = Some(address);
        let tensor = Tensor { address, bytes: SMALL_BYTES, elems: ELEMS, dtype: DType::F32 };
        Ok(self.prefix.boundary(0, 0, tensor, &self.fixture.stream)?)
    }

    /// Its gradient comes when it is half over.
    fn microbatch(&mut self, microbatch: usize) -> Result<()> {
        let operation = self.case.layers() + microbatch;
        self.policy
            .microbatch(&mut self.prefix, u32::try_from(self.case.microbatches - microbatch - 1)?);
        let hot_bytes = self.case.hot_bytes as usize;
        let hot =
            (hot_bytes > 0).then(|| self.fixture.allocator.allocate(&Request::new(hot_bytes)));
        let hot = hot.transpose()?;
        let ns = self.work.operations[operation].compute_ns;
        self.compute(ns / 2, |_| Ok(()))?;
        self.compute(ns - ns / 2, Self::give_gradient)?;
        if let Some(block) = hot {
            self.fixture.engine.free(block.range.start, 0)?;
        }
        Ok(())
    }

    fn give_gradient(&mut self) -> Result<()> {
        // SAFETY: a live block of this many elements, with no other user.
        unsafe {
            let stream = &self.fixture.stream;
            self.prefix.accumulate(0, 0, self.gradient, ELEMS, DType::F32, stream)?;
        }
        Ok(())
    }

    fn backward(&mut self, layer: u32) -> Result<()> {
        let (fixture, at) = (self.fixture, layer as usize);
        let operation = self.work.operations.len() - 1 - at;
        self.prefix.mark(Edge::BackwardBegin, layer, &fixture.stream)?;
        let saved = std::mem::take(&mut self.saved[at]);
        self.compute(self.work.operations[operation].compute_ns, |_| {
            match saved.iter().find(|&&(start, bytes)| !holds(start, bytes)) {
                Some((start, _)) => Err(format!("layer {layer} lost bytes at {start:#x}").into()),
                None => Ok(()),
            }
        })?;
        for (start, _) in saved {
            fixture.engine.free(start, 0)?;
        }
        self.prefix.mark(Edge::BackwardEnd, layer, &fixture.stream)?;
        Ok(())
    }

    fn end(self) -> Result<()> {
        let report = self.prefix.close();
        for small in self.boundary.into_iter().chain([self.gradient]) {
            self.fixture.engine.free(small, 0)?;
        }
        match report.left_asleep_bytes {
            0 => Ok(()),
            bytes => Err(format!("{bytes} bytes were left asleep").into()),
        }
    }
}

/// A word of each page, which says where it is.
fn words(start: usize, bytes: usize) -> impl Iterator<Item = *mut usize> {
    (start..start + bytes).step_by(PAGE_BYTES as usize).map(|page| page as *mut usize)
}

fn write(start: usize, bytes: usize) {
    for word in words(start, bytes) {
        // SAFETY: a live, awake block of the trainer's own.
        unsafe { word.write_volatile(!word.addr()) };
    }
}

fn holds(start: usize, bytes: usize) -> bool {
    // SAFETY: as above.
    words(start, bytes).all(|word| unsafe { word.read_volatile() } == !word.addr())
}

#[cfg(test)]
mod tests {
    use dormouse_offload::Tier;

    use super::*;

    const LAYER_BYTES: u64 = 64 << 10;
    const LAYERS: usize = 5;

    /// Copies take no time; microbatches need all the memory there is.
    fn case(tiers: &str, cap_layers: u64) -> Case {
        let cap_kib = cap_layers * (LAYER_BYTES >> 10);
        let rates = ["out", "in", "write", "read"].map(|way| format!("{way}_mb_s=1000000"));
        format!(
            "tiers={tiers} layers={LAYERS} layer_kib=64 forward_us=1 backward_us=1 microbatches=2 microbatch_us=1 \
             cap_kib={cap_kib} hot_kib={cap_kib} host_kib=1024 {}",
            rates.join(" ")
        )
        .parse()
        .unwrap()
    }

    fn plan(case: &Case, choice: Tier) -> ResidencyPlan {
        ResidencyPlan::new(&case.work(), &[choice; LAYERS], LAYERS + 2)
    }

    #[test]
    fn every_policy_plays_a_whole_step_and_all_that_has_no_room_sleeps() {
        let all = LAYER_BYTES * LAYERS as u64;
        for tiers in ["host", "three", "direct"] {
            let case = case(tiers, 3);
            let choice = if tiers == "direct" { Tier::Nvme } else { Tier::Host };
            for policy in [Policy::Planned, Policy::OneLayerAhead, Policy::OnDemand] {
                let plan = plan(&case, choice);
                let fixture = fixture(&case, &plan, policy).unwrap();
                let outcome = run(&fixture, &case, &plan, policy).unwrap();
                assert_eq!(outcome.slept_bytes, all, "{tiers}, {policy:?}");
                let written_bytes = if tiers == "direct" { all } else { 0 };
                assert_eq!(outcome.written_bytes, written_bytes, "{tiers}, {policy:?}");
                let stall_ns: u64 = outcome.stall_ns.iter().sum();
                assert!(0 < stall_ns && stall_ns <= outcome.total_ns - outcome.compute_ns);
            }
        }
    }

    #[test]
    fn what_the_plan_keeps_stays() {
        let mut case = case("host", LAYERS as u64);
        case.hot_bytes = 0;
        let plan = plan(&case, Tier::Device);
        let slept = |policy| {
            let fixture = fixture(&case, &plan, policy).unwrap();
            run(&fixture, &case, &plan, policy).unwrap().slept_bytes
        };
        assert_eq!(slept(Policy::Planned), 0);
        assert!(slept(Policy::OnDemand) > 0);
    }

    #[test]
    fn bytes_that_are_not_what_was_written_are_seen() {
        let mut page = vec![0_usize; 2 * SMALL_BYTES / size_of::<usize>()];
        let (start, bytes) = (page.as_mut_ptr() as usize, 2 * SMALL_BYTES);
        assert!(!holds(start, bytes));
        write(start, bytes);
        assert!(holds(start, bytes));
        page[SMALL_BYTES / size_of::<usize>()] = 0;
        assert!(!holds(start, bytes));
    }
}
