//! All ops of a pipeline, numbered, and their dependencies.

use super::PipelineError;
use super::chunks::{Costs, cut};
use super::lists::{StageOp, StageOpKind};
use super::spec::{OPS_MAX, Pipeline};
use dormouse_schedule::check_range;

/// Identifies an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PipelineUnit {
    pub(super) kind: StageOpKind,
    pub(super) group: u32,
    /// Chunk or microbatch number.
    pub(super) index: u32,
    pub(super) part: u32,
}

impl PipelineUnit {
    /// Returns the op of another part whose result this one receives: the same chunk or microbatch on the
    /// previous part (forward) or the next (backward).
    fn source(self) -> Option<Self> {
        self.on_part(!self.kind.is_forward())
    }

    /// Returns the op of another part that receives this op's result.
    pub(crate) fn target(self) -> Option<Self> {
        self.on_part(self.kind.is_forward())
    }

    /// Returns the same chunk or microbatch on the next part, or on the previous one.
    fn on_part(self, next: bool) -> Option<Self> {
        let part = if next { self.part + 1 } else { self.part.checked_sub(1)? };
        Some(Self { part, ..self })
    }
}

impl StageOp {
    pub(crate) const fn unit(&self) -> PipelineUnit {
        let Self { kind, group, index, part, .. } = *self;
        PipelineUnit { kind, group, index, part }
    }
}

/// One group's range of op numbers: part by part, each with its chunk forwards, microbatch forwards,
/// microbatch backwards and chunk backwards.
#[derive(Clone, Debug)]
struct GroupOps {
    base: usize,
    /// Ends of its chunks.
    ends: Vec<u64>,
    microbatches: u32,
}

impl GroupOps {
    fn chunks(&self) -> u32 {
        self.ends.len() as u32
    }

    fn rows(&self, chunk: u32) -> [u64; 2] {
        let chunk = chunk as usize;
        [if chunk == 0 { 0 } else { self.ends[chunk - 1] }, self.ends[chunk]]
    }

    fn part_ops(&self) -> usize {
        2 * (self.ends.len() + self.microbatches as usize)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Graph {
    pub(super) stages: u32,
    pub(super) parts: u32,
    places: Vec<GroupOps>,
    units: Vec<PipelineUnit>,
    /// Time of each op, in nanoseconds.
    pub(super) op_ns: Vec<u64>,
    /// Time of the transfer of each op's result, in nanoseconds.
    pub(super) transfer_ns: Vec<u64>,
    /// Rows of each op.
    pub(super) rows: Vec<u64>,
}

impl Graph {
    /// Numbers the ops of a valid pipeline whose prefixes are cut into `chunks`.
    pub(super) fn new(pipeline: &Pipeline, chunks: u32) -> Result<Self, PipelineError> {
        let parts = pipeline.parts();
        let mut graph = Self {
            stages: pipeline.stages,
            parts,
            places: Vec::with_capacity(pipeline.groups.len()),
            units: Vec::new(),
            op_ns: Vec::new(),
            transfer_ns: Vec::new(),
            rows: Vec::new(),
        };
        let mut base = 0;
        for group in &pipeline.groups {
            let ends = cut(pipeline, group, chunks);
            let place = GroupOps { base, ends, microbatches: group.microbatches.len() as u32 };
            base += place.part_ops() * parts as usize;
            // Checked per group: cutting all groups may take minutes.
            check_range("ops of the first groups", base as u64, 1, OPS_MAX as u64)?;
            graph.places.push(place);
        }
        graph.fill(pipeline);
        Ok(graph)
    }

    fn fill(&mut self, pipeline: &Pipeline) {
        let costs = Costs(pipeline);
        for (number, group) in (0..).zip(&pipeline.groups) {
            let place = self.places[number as usize].clone();
            for part in 0..self.parts {
                for kind in StageOpKind::ALL {
                    let count = if kind.is_prefix() { place.chunks() } else { place.microbatches };
                    for index in 0..count {
                        let (ns, rows) = if kind.is_prefix() {
                            let rows = place.rows(index);
                            let share =
                                if kind.is_forward() { group.forward } else { group.backward };
                            (costs.prefix_ns(group, share, rows, part), rows[1] - rows[0])
                        } else {
                            let microbatch = &group.microbatches[index as usize];
                            let ns = if kind.is_forward() {
                                microbatch.forward_ns
                            } else {
                                microbatch.backward_ns
                            };
                            (costs.microbatch_ns(ns, part), microbatch.rows)
                        };
                        self.units.push(PipelineUnit { kind, group: number, index, part });
                        self.op_ns.push(costs.op_ns(ns));
                        self.transfer_ns.push(costs.transfer_ns(rows));
                        self.rows.push(rows);
                    }
                }
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    pub(super) fn groups(&self) -> u32 {
        self.places.len() as u32
    }

    pub(super) fn unit(&self, id: usize) -> PipelineUnit {
        self.units[id]
    }

    pub(super) fn chunks(&self, group: u32) -> u32 {
        self.places[group as usize].chunks()
    }

    pub(super) fn microbatches(&self, group: u32) -> u32 {
        self.places[group as usize].microbatches
    }

    /// Returns the first row of a chunk and the row after its last.
    pub(super) fn chunk_rows(&self, group: u32, chunk: u32) -> [u64; 2] {
        self.places[group as usize].rows(chunk)
    }

    pub(super) fn stage(&self, part: u32) -> u32 {
        part % self.stages
    }

    /// Returns the number of an op; `None` if it does not exist.
    pub(super) fn id(&self, unit: PipelineUnit) -> Option<usize> {
        let place = self.places.get(unit.group as usize)?;
        let (chunks, microbatches) = (place.ends.len(), place.microbatches as usize);
        let (begin, count) = match unit.kind {
            StageOpKind::PrefixForward => (0, chunks),
            StageOpKind::MicrobatchForward => (chunks, microbatches),
            StageOpKind::MicrobatchBackward => (chunks + microbatches, microbatches),
            StageOpKind::PrefixBackward => (chunks + 2 * microbatches, chunks),
        };
        let exists = unit.part < self.parts && (unit.index as usize) < count;
        exists.then(|| {
            place.base + unit.part as usize * place.part_ops() + begin + unit.index as usize
        })
    }

    /// See [`PipelineUnit::source`].
    pub(super) fn source(&self, id: usize) -> Option<usize> {
        self.id(self.unit(id).source()?)
    }

    /// See [`PipelineUnit::target`].
    pub(super) fn target(&self, id: usize) -> Option<usize> {
        self.id(self.unit(id).target()?)
    }

    /// Returns whether an op's result is sent to another stage.
    pub(super) fn sends(&self, id: usize) -> bool {
        self.target(id).is_some() && self.stages > 1
    }

    /// Visits the ops of the same part that this one needs, each once.
    pub(super) fn local_needs(&self, id: usize, mut visit: impl FnMut(usize)) {
        use StageOpKind::{MicrobatchBackward, MicrobatchForward, PrefixBackward, PrefixForward};
        let unit = self.unit(id);
        let (chunks, microbatches) = (self.chunks(unit.group), self.microbatches(unit.group));
        let mut need = |kind, index| {
            if let Some(needed) = self.id(PipelineUnit { kind, index, ..unit }) {
                visit(needed);
            }
        };
        match unit.kind {
            PrefixForward if unit.index > 0 => need(PrefixForward, unit.index - 1),
            PrefixForward => {}
            MicrobatchForward => need(PrefixForward, chunks - 1),
            MicrobatchBackward => need(MicrobatchForward, unit.index),
            PrefixBackward if unit.index + 1 < chunks => need(PrefixBackward, unit.index + 1),
            PrefixBackward => {
                (0..microbatches).for_each(|microbatch| need(MicrobatchBackward, microbatch))
            }
        }
    }

    /// Visits the ops of the same part that need this one, each once.
    pub(super) fn local_needed_by(&self, id: usize, mut visit: impl FnMut(usize)) {
        use StageOpKind::{MicrobatchBackward, MicrobatchForward, PrefixBackward, PrefixForward};
        let unit = self.unit(id);
        let (chunks, microbatches) = (self.chunks(unit.group), self.microbatches(unit.group));
        let mut needed_by = |kind, index| {
            if let Some(needing) = self.id(PipelineUnit { kind, index, ..unit }) {
                visit(needing);
            }
        };
        match unit.kind {
            PrefixForward if unit.index + 1 < chunks => needed_by(PrefixForward, unit.index + 1),
            PrefixForward => {
                (0..microbatches).for_each(|microbatch| needed_by(MicrobatchForward, microbatch))
            }
            MicrobatchForward => needed_by(MicrobatchBackward, unit.index),
            MicrobatchBackward => needed_by(PrefixBackward, chunks - 1),
            PrefixBackward if unit.index > 0 => needed_by(PrefixBackward, unit.index - 1),
            PrefixBackward => {}
        }
    }

    /// Returns the name of an op.
    pub(super) fn name(&self, id: usize) -> String {
        self.unit(id).to_string()
    }
}

impl std::fmt::Display for PipelineUnit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, group, index, part } = self;
        let what = if kind.is_prefix() { "chunk" } else { "microbatch" };
        let way = if kind.is_forward() { "forward" } else { "backward" };
        write!(f, "{what} {index} {way} of group {group}, part {part}")
    }
}
