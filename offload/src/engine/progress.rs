//! Where each live prefix is in its step, and the names of tags and layers, for reports of other threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_device::Device;
use dormouse_storage::sync::lock;

use super::{Engine, TagId};
use crate::places::{Edge, Phase};

/// The live prefixes of an engine, by number.
pub(super) type Prefixes = BTreeMap<u32, Arc<Progress>>;

/// Bits of [`Progress::place`] below the mark, which hold its layer, and below the phase.
const LAYER_BITS: u32 = 32;
const MARK_BITS: u32 = 8;
const PHASES: [Phase; 3] = [Phase::A, Phase::B, Phase::C];
const EDGES: [Edge; 4] =
    [Edge::ForwardBegin, Edge::ForwardEnd, Edge::BackwardBegin, Edge::BackwardEnd];

/// The latest phase and mark of one prefix. Written by its thread, read by any; relaxed, since a report needs no more
/// than a recent state.
#[derive(Debug)]
pub(crate) struct Progress {
    label: String,
    /// Phase and edge, from 1; 0: none yet.
    place: AtomicU64,
    /// Time of the latest change.
    changed_ns: AtomicU64,
}

impl Progress {
    /// Notes that the prefix enters `phase`, and within it comes to a mark of a layer.
    pub(crate) fn set(&self, phase: Option<Phase>, mark: Option<(Edge, u32)>, now_ns: u64) {
        let phase = phase.map_or(0, |phase| phase.index() as u64 + 1);
        let (edge, layer) = mark.map_or((0, 0), |(edge, layer)| (edge as u64 + 1, layer));
        let place = (phase << MARK_BITS | edge) << LAYER_BITS | u64::from(layer);
        self.place.store(place, Ordering::Relaxed);
        self.changed_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Describes the place in the step; `None` before the first phase.
    fn text(&self) -> Option<String> {
        let place = self.place.load(Ordering::Relaxed);
        let layer = place as u32;
        let of = |number: u64| usize::try_from(number).ok()?.checked_sub(1);
        let edge = of(place >> LAYER_BITS & ((1 << MARK_BITS) - 1));
        let phase = PHASES.get(of(place >> (LAYER_BITS + MARK_BITS))?)?;
        let at = match edge.and_then(|edge| EDGES.get(edge)) {
            None => String::new(),
            Some(Edge::ForwardBegin) => format!(", forward of layer {layer}"),
            Some(Edge::ForwardEnd) => format!(", after the forward of layer {layer}"),
            Some(Edge::BackwardBegin) => format!(", backward of layer {layer}"),
            Some(Edge::BackwardEnd) => format!(", after the backward of layer {layer}"),
        };
        Some(format!("phase {phase:?} of {}{at}", self.label))
    }
}

impl<D: Device> Engine<D> {
    /// Adds a prefix to those that reports name.
    pub(crate) fn begin_progress(&self, number: u32, label: &str) -> Arc<Progress> {
        let progress = Arc::new(Progress {
            label: label.to_owned(),
            place: AtomicU64::new(0),
            changed_ns: AtomicU64::new(0),
        });
        lock(&self.prefixes).insert(number, Arc::clone(&progress));
        progress
    }

    pub(crate) fn end_progress(&self, number: u32) {
        // Freed after the lock is released.
        let _ended = lock(&self.prefixes).remove(&number);
    }

    /// Describes where the prefix is whose latest phase or mark came last.
    pub(super) fn progress_text(&self) -> Option<String> {
        let live: Vec<Arc<Progress>> = lock(&self.prefixes).values().map(Arc::clone).collect();
        live.iter().max_by_key(|it| it.changed_ns.load(Ordering::Relaxed))?.text()
    }

    /// Names a tag and the layer of a scope. `None` for neither, and for what has ended.
    pub(super) fn name_of(&self, tag: u32, scope: u64) -> Option<String> {
        let tag = (tag != 0).then(|| self.tag_name(TagId(tag))).flatten();
        let tag = tag.map(|name| format!("tag {name:?}"));
        let (number, layer) = ((scope >> LAYER_BITS) as u32, scope as u32);
        let prefix = lock(&self.prefixes).get(&number).map(Arc::clone);
        let layer = prefix.map(|prefix| format!("layer {layer} of {}", prefix.label));
        match (tag, layer) {
            (Some(tag), Some(layer)) => Some(format!("{tag}, {layer}")),
            (tag, layer) => tag.or(layer),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn every_phase_and_mark_has_its_words() {
        let changed_ns = AtomicU64::new(0);
        let progress =
            Progress { label: "prefix 3".to_owned(), place: AtomicU64::new(0), changed_ns };
        assert_eq!(progress.text(), None);
        let last = u32::MAX;
        for (phase, mark, words) in [
            (Phase::A, None, "phase A of prefix 3"),
            (Phase::A, Some((Edge::ForwardBegin, 0)), "phase A of prefix 3, forward of layer 0"),
            (Phase::B, None, "phase B of prefix 3"),
            (
                Phase::C,
                Some((Edge::BackwardBegin, 11)),
                "phase C of prefix 3, backward of layer 11",
            ),
        ] {
            progress.set(Some(phase), mark, 5);
            assert_eq!(progress.text().as_deref(), Some(words));
        }
        for (edge, words) in [(Edge::ForwardEnd, "forward"), (Edge::BackwardEnd, "backward")] {
            progress.set(Some(Phase::C), Some((edge, last)), 6);
            let text = format!("phase C of prefix 3, after the {words} of layer {last}");
            assert_eq!(progress.text(), Some(text));
        }
        assert_eq!(progress.changed_ns.into_inner(), 6);
    }
}
