//! The search for the number of chunks and the admission rule with the smallest bubble that fits.
//!
//! A list that no stage has too little room for wins over one that exceeds it. If none fits, the search starts
//! over with half as many groups or microbatches in flight, whichever hold more on the stage that lacks most and
//! are several there. With one of each, more chunks are tried: an op holds less.

use std::collections::BTreeSet;

use super::PipelineError;
use super::chunks::Costs;
use super::exchange::{TransferPlace, lists};
use super::graph::Graph;
use super::greedy::{self, Limits};
use super::lists::{PipelineReport, StageList, StagePeak, Stages};
use super::meet::TransferReplay;
use super::peaks::peak;
use super::rules::rules;
use super::spec::{CHUNKS_MAX, MemoryBounds, Pipeline, PipelineOrder};

/// Numbers of chunks tried if the plan chooses.
const CHUNKS_TRIED: [u32; 9] = [8, 16, 4, 12, 6, 24, 32, 2, 1];
/// Numbers tried besides while none of those has room for one group and one microbatch at a time.
const MORE_CHUNKS_TRIED: [u32; 5] = [64, 128, 256, 512, CHUNKS_MAX];
/// Maximum ops of all tried lists together, about a second of work: large pipelines try fewer lists. While none has
/// room, each number of chunks is tried all the same.
const SEARCH_OPS_MAX: usize = 1 << 21;
/// Share of the makespan, as a shift, within which fewer chunks are preferred.
const CHUNKS_SLACK_SHIFT: u32 = 9;

/// Maximum searches of a plan: halvings of two numbers of 32 bits.
const BOUND_STEPS_MAX: u32 = 64;

/// A candidate.
struct Found {
    /// Bytes that the stage with least room lacks.
    missing_bytes: u64,
    makespan_ns: u64,
    chunks: u32,
    bound_ns: u64,
    stages: Vec<StageList>,
}

impl Found {
    /// Returns the latest end with which lists of `chunks` chunks may be better.
    fn end_ns_max(&self, chunks: u32) -> u64 {
        let slack_ns = if chunks == self.chunks { 0 } else { slack_ns(self.makespan_ns) };
        if self.missing_bytes > 0 { u64::MAX } else { self.makespan_ns.saturating_add(slack_ns) }
    }
}

/// Returns the difference of ends within which fewer chunks win.
const fn slack_ns(makespan_ns: u64) -> u64 {
    makespan_ns >> CHUNKS_SLACK_SHIFT
}

/// Returns the peak memory of the worst stage, to break ties: bytes, groups alive, microbatches in flight.
fn memory(stages: &[StageList]) -> (u64, u32, u32) {
    let most = |of: fn(&StagePeak) -> u32| stages.iter().map(|s| of(&s.peak)).max().unwrap_or(0);
    let bytes = stages.iter().map(|stage| stage.peak.bytes).max().unwrap_or(0);
    (bytes, most(|peak| peak.live_groups), most(|peak| peak.in_flight_parts))
}

impl Pipeline {
    /// Returns the lists of all stages with the smallest bubble found within bounds and room.
    ///
    /// Time is proportional to the number of ops times the lists tried (`report.tried`): some hundred for
    /// small pipelines, and as many again each time that none of them fits.
    ///
    /// # Errors
    /// `Count`, `Group` or `Parts` for an invalid pipeline, `Room` if a stage has too little for one group and
    /// one microbatch at a time.
    pub fn plan(&self) -> Result<Stages, PipelineError> {
        self.check()?;
        let (mut bounds, mut tried) = (self.bounds, 0);
        for _ in 0..BOUND_STEPS_MAX {
            let found = self.search(bounds, &mut tried)?;
            let Some((missing_bytes, stage)) = self.shortage(&found.stages) else {
                return Ok(self.report(found, tried));
            };
            let peak = &found.stages[stage as usize].peak;
            let (needed_bytes, room_bytes) = (peak.bytes, peak.bytes - missing_bytes);
            let too_little = PipelineError::Room { stage, needed_bytes, room_bytes };
            bounds = halved(bounds, peak).ok_or(too_little)?;
        }
        // Unreachable: as many halvings leave one group and one microbatch.
        Err(PipelineError::Cycle { meeting: "no bounds", waits: Vec::new() })
    }

    /// Returns the most bytes that a stage lacks, and which; `None` if all have room.
    fn shortage(&self, stages: &[StageList]) -> Option<(u64, u32)> {
        let missing = |(stage, list): (u32, &StageList)| {
            Some((list.peak.bytes.saturating_sub(self.room_of(stage)?), stage))
        };
        (0..).zip(stages).filter_map(missing).max().filter(|(bytes, _)| *bytes > 0)
    }

    /// Returns the best lists within bounds, whether they fit or not. Adds the number of lists tried.
    fn search(&self, bounds: MemoryBounds, tried: &mut u32) -> Result<Found, PipelineError> {
        let rows = self.groups.iter().map(|group| group.prefix_rows).max().unwrap_or(1);
        let is_last = bounds == MemoryBounds { live_groups_max: 1, in_flight_max: 1 };
        let more = MORE_CHUNKS_TRIED.into_iter().filter(|_| is_last);
        let candidates: Vec<u32> = match self.chunks {
            0 => CHUNKS_TRIED.into_iter().chain(more).filter(|it| u64::from(*it) <= rows).collect(),
            chunks => vec![chunks],
        };
        let rules = rules(self, bounds);
        let mut spent = 0;
        let mut best: Option<Found> = None;
        let has_room = |best: &Option<Found>| best.as_ref().is_some_and(|it| it.missing_bytes == 0);
        for chunks in candidates {
            if has_room(&best) && MORE_CHUNKS_TRIED.contains(&chunks) {
                break;
            }
            let graph = match Graph::new(self, chunks) {
                // Fewer chunks have fewer ops and may fit.
                Err(error) if chunks == 1 || self.chunks > 0 => return Err(error),
                Err(_) => continue,
                Ok(graph) => graph,
            };
            // Rules often start all ops at the same times: their lists are the same.
            let mut seen = BTreeSet::new();
            let mut is_tried = false;
            for rule in &rules {
                if (has_room(&best) || is_tried) && spent + graph.len() > SEARCH_OPS_MAX {
                    break;
                }
                is_tried |= !rule.bound_parts;
                spent += graph.len();
                *tried += 1;
                let limits = self.limits(best.as_ref(), chunks);
                let Some(starts) = greedy::run(&graph, rule, &limits) else { continue };
                if seen.contains(&starts) {
                    continue;
                }
                if let Some(found) = self.listed(&graph, &starts, chunks)?
                    && best.as_ref().is_none_or(|best| better(&found, best))
                {
                    best = Some(found);
                }
                seen.insert(starts);
                if self.order == PipelineOrder::GroupByGroup
                    && best.as_ref().is_some_and(|best| best.chunks == chunks)
                {
                    break;
                }
            }
        }
        // Never none: a rule that bounds only admission never sticks, and one is tried.
        best.ok_or(PipelineError::Cycle { meeting: "no rule", waits: Vec::new() })
    }

    /// Returns beyond what lists of `chunks` chunks cannot be better than the best.
    fn limits(&self, best: Option<&Found>, chunks: u32) -> Limits {
        let Some(best) = best else {
            return Limits { end_ns_max: u64::MAX, peaks_max: Vec::new() };
        };
        let rooms = (0..).zip(&self.stage_room_bytes);
        let peaks_max = rooms.map(|(stage, room_bytes)| {
            (self.bytes_of(stage), room_bytes.saturating_add(best.missing_bytes))
        });
        Limits { end_ns_max: best.end_ns_max(chunks), peaks_max: peaks_max.collect() }
    }

    /// Returns the best lists of ops that start at `starts`.
    fn listed(
        &self,
        graph: &Graph,
        starts: &[u64],
        chunks: u32,
    ) -> Result<Option<Found>, PipelineError> {
        let places: &[TransferPlace] = if self.blocking {
            &[TransferPlace::Early, TransferPlace::Late]
        } else {
            &[TransferPlace::Early]
        };
        let mut best: Option<Found> = None;
        for &place in places {
            let (mut stages, ids) = lists(self, graph, starts, place);
            for (number, stage) in (0..).zip(&mut stages) {
                stage.peak = peak(&stage.ops, self, number);
            }
            let times = TransferReplay::new(graph, &stages, &ids, self.timing()).run()?;
            debug_assert!(
                starts.iter().zip(&graph.op_ns).all(|(start, ns)| start + ns <= times.makespan_ns),
                "lists end no sooner than their greedy run"
            );
            let missing_bytes = self.shortage(&stages).map_or(0, |(bytes, _)| bytes);
            let (makespan_ns, bound_ns) = (times.makespan_ns, bound_ns(graph));
            let found = Found { missing_bytes, makespan_ns, chunks, bound_ns, stages };
            if best.as_ref().is_none_or(|best| better(&found, best)) {
                best = Some(found);
            }
        }
        Ok(best)
    }

    fn report(&self, found: Found, tried: u32) -> Stages {
        let ideal_ns = Costs(self).ideal_ns();
        let bubble = |ns: u64| ns as f64 / ideal_ns.max(1) as f64 - 1.0;
        let report = PipelineReport {
            makespan_ns: found.makespan_ns,
            ideal_ns,
            bubble: bubble(found.makespan_ns),
            bubble_bound: bubble(found.bound_ns),
            chunks: found.chunks,
            tried,
            prefix_saved_asleep: false,
        };
        Stages { stages: found.stages, report }
    }
}

/// Returns bounds with half as many groups or microbatches in flight as at a peak, whichever hold more of those that
/// are several. If none are, one of each on all stages, which may change the order of parts; `None` if bounds are that.
fn halved(bounds: MemoryBounds, peak: &StagePeak) -> Option<MemoryBounds> {
    let larger = |groups: Option<u32>, microbatches: Option<u32>| {
        let groups = groups.map(|live_groups_max| MemoryBounds { live_groups_max, ..bounds });
        let microbatches =
            microbatches.map(|in_flight_max| MemoryBounds { in_flight_max, ..bounds });
        if peak.boundary_bytes.saturating_add(peak.prefix_bytes) > peak.microbatch_bytes {
            groups.or(microbatches)
        } else {
            microbatches.or(groups)
        }
    };
    let MemoryBounds { live_groups_max, in_flight_max } = bounds;
    let half = |seen: u32, most: u32| {
        (seen > 1).then_some(seen / 2).filter(|fewer| most == 0 || *fewer < most)
    };
    let one = |most: u32| (most != 1).then_some(1);
    larger(half(peak.live_groups, live_groups_max), half(peak.in_flight, in_flight_max))
        .or_else(|| larger(one(live_groups_max), one(in_flight_max)))
}

/// Compares by room, then time, then memory. Fewer chunks win if the time is nearly equal: small kernels have
/// costs that the model ignores.
fn better(found: &Found, best: &Found) -> bool {
    if found.missing_bytes != best.missing_bytes {
        return found.missing_bytes < best.missing_bytes;
    }
    if found.chunks != best.chunks {
        let near = found.makespan_ns.abs_diff(best.makespan_ns) <= slack_ns(best.makespan_ns);
        return if near {
            found.chunks < best.chunks
        } else {
            found.makespan_ns < best.makespan_ns
        };
    }
    let key = |found: &Found| (found.makespan_ns, memory(&found.stages));
    key(found) < key(best)
}

/// Returns a lower bound on the makespan of any order: a stage's first op follows a first chunk's forward
/// on every earlier part, its last op precedes a first chunk's backward on them, and all its work is
/// between.
fn bound_ns(graph: &Graph) -> u64 {
    let parts = graph.parts as usize;
    let mut work = vec![0_u64; graph.stages as usize];
    // Time of the first chunk's forward and backward, with the hop, per group and part.
    let mut ways = vec![[0_u64; 2]; graph.groups() as usize * parts];
    for id in 0..graph.len() {
        let unit = graph.unit(id);
        work[graph.stage(unit.part) as usize] += graph.op_ns[id];
        if unit.kind.is_prefix() && unit.index == 0 {
            let way = usize::from(!unit.kind.is_forward());
            let hop_ns = if graph.stages > 1 { graph.transfer_ns[id] } else { 0 };
            ways[unit.group as usize * parts + unit.part as usize][way] = graph.op_ns[id] + hop_ns;
        }
    }
    let least = |stage: usize, way: usize| {
        let of_group = |ways: &[[u64; 2]]| ways[..stage].iter().map(|ns| ns[way]).sum::<u64>();
        ways.chunks(parts).map(of_group).min().unwrap_or(0)
    };
    (0..work.len()).map(|stage| work[stage] + least(stage, 0) + least(stage, 1)).max().unwrap_or(0)
}
