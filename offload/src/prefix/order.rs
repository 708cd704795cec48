//! The order of a prefix's phases and marks, and the layers that a backward needs. Pure.
//!
//! ```text
//!  enter(A)  (ForwardBegin l, ForwardEnd l) for l = 0, 1, …   enter(B)   enter(C)
//!            (BackwardBegin l, BackwardEnd l) for l falling; layers may be left out
//! ```

use crate::error::OffloadError;
use crate::places::{Edge, Phase};

/// The phase and marks so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MarkOrder {
    layers: u32,
    phase: Option<Phase>,
    open: Option<u32>,
    next_forward: u32,
    /// Layer of the latest backward; `layers` before the first.
    backward: u32,
}

impl MarkOrder {
    pub(super) const fn new(layers: u32) -> Self {
        Self { layers, phase: None, open: None, next_forward: 0, backward: layers }
    }

    pub(super) const fn phase(&self) -> Option<Phase> {
        self.phase
    }

    /// Returns the next state, if `phase` may be entered now.
    pub(super) fn enter(&self, phase: Phase) -> Result<Self, OffloadError> {
        let expected = match self.phase {
            None => Some(Phase::A),
            Some(Phase::A) => Some(Phase::B),
            Some(Phase::B) => Some(Phase::C),
            Some(Phase::C) => None,
        };
        let words = match (self.open, expected) {
            (Some(layer), _) => format!("the end of layer {layer} first"),
            (None, Some(expected)) if expected == phase => {
                return Ok(Self { phase: Some(phase), ..*self });
            }
            (None, Some(expected)) => format!("phase {expected:?}"),
            (None, None) => "no phase after C".to_owned(),
        };
        Err(OffloadError::Order { what: "phase", seen: format!("{phase:?}"), expected: words })
    }

    /// Returns the next state, if this mark may come now.
    pub(super) fn mark(&self, edge: Edge, layer: u32) -> Result<Self, OffloadError> {
        self.check_layer(layer)?;
        let next = match (self.phase, edge, self.open) {
            (Some(Phase::A), Edge::ForwardBegin, None) if layer == self.next_forward => {
                Self { open: Some(layer), ..*self }
            }
            (Some(Phase::A), Edge::ForwardEnd, Some(open)) if layer == open => {
                Self { open: None, next_forward: layer + 1, ..*self }
            }
            (Some(Phase::C), Edge::BackwardBegin, None) if layer < self.backward => {
                Self { open: Some(layer), backward: layer, ..*self }
            }
            (Some(Phase::C), Edge::BackwardEnd, Some(open)) if layer == open => {
                Self { open: None, ..*self }
            }
            _ => {
                let seen = format!("{edge:?} of layer {layer}");
                return Err(OffloadError::Order { what: "mark", seen, expected: self.expected() });
            }
        };
        Ok(next)
    }

    /// Returns true if the backward of `layer` is over: it, or that of a layer below, has ended.
    pub(super) const fn is_done_with(&self, layer: u32) -> bool {
        self.open.is_none() && self.backward <= layer
    }

    fn expected(&self) -> String {
        match (self.phase, self.open) {
            (None, _) => "phase A first".to_owned(),
            (Some(Phase::A), Some(l)) => format!("ForwardEnd of layer {l}"),
            (Some(Phase::A), None) if self.next_forward < self.layers => {
                format!("ForwardBegin of layer {} or phase B", self.next_forward)
            }
            (Some(Phase::A), None) => "phase B".to_owned(),
            (Some(Phase::B), _) => "phase C".to_owned(),
            (Some(Phase::C), Some(l)) => format!("BackwardEnd of layer {l}"),
            (Some(Phase::C), None) if self.backward == 0 => "no mark after layer 0's".to_owned(),
            (Some(Phase::C), None) => format!("BackwardBegin of a layer below {}", self.backward),
        }
    }

    /// # Errors
    /// `Argument` for a layer the prefix does not have.
    pub(super) fn check_layer(&self, layer: u32) -> Result<(), OffloadError> {
        if layer < self.layers {
            return Ok(());
        }
        Err(OffloadError::argument("layer", layer, format!("0 to {}", self.layers - 1)))
    }
}

/// Returns the layers that must be awake before the backward of `layer`: itself, and the one below, which
/// allocated its input.
pub(super) fn needed(layer: u32) -> impl Iterator<Item = u32> {
    [Some(layer), layer.checked_sub(1)].into_iter().flatten()
}

/// Returns the layers to wake while the backward of `layer` runs, the one needed first in front.
pub(super) fn ahead(layer: u32, window: u32) -> impl Iterator<Item = u32> {
    (layer.saturating_sub(window)..layer.saturating_sub(1)).rev()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(iterator: impl Iterator<Item = u32>) -> Vec<u32> {
        iterator.collect()
    }

    #[test]
    fn windows() {
        assert_eq!(all(needed(5)), [5, 4]);
        assert_eq!(all(needed(0)), [0]);
        assert_eq!(all(ahead(5, 3)), [3, 2]);
        assert_eq!(all(ahead(5, 1)), [0; 0]);
        assert_eq!(all(ahead(1, 9)), [0; 0]);
        assert_eq!(all(ahead(2, 9)), [0]);
        assert_eq!(all(ahead(0, 9)), [0; 0]);
    }

    fn play(order: MarkOrder, marks: &[(Edge, u32)]) -> Result<MarkOrder, OffloadError> {
        marks.iter().try_fold(order, |o, &(edge, layer)| o.mark(edge, layer))
    }

    #[test]
    fn marks_in_order_are_accepted() {
        use Edge::*;
        let order = MarkOrder::new(2).enter(Phase::A).unwrap();
        let order =
            play(order, &[(ForwardBegin, 0), (ForwardEnd, 0), (ForwardBegin, 1), (ForwardEnd, 1)])
                .unwrap();
        let order = order.enter(Phase::B).unwrap().enter(Phase::C).unwrap();
        assert!(!order.is_done_with(1));
        let in_1 = play(order, &[(BackwardBegin, 1)]).unwrap();
        assert!(!in_1.is_done_with(1));
        let after_1 = play(in_1, &[(BackwardEnd, 1)]).unwrap();
        assert!(after_1.is_done_with(1) && !after_1.is_done_with(0));
        let after_0 = play(after_1, &[(BackwardBegin, 0), (BackwardEnd, 0)]).unwrap();
        assert!(after_0.is_done_with(0));
        // A layer without a backward is skipped.
        play(order, &[(BackwardBegin, 0), (BackwardEnd, 0)]).unwrap();
    }

    #[test]
    fn marks_out_of_order_are_refused_with_the_expected_mark() {
        use Edge::*;
        let new = MarkOrder::new(3);
        let a = new.enter(Phase::A).unwrap();
        let in_0 = a.mark(ForwardBegin, 0).unwrap();
        let c = a.enter(Phase::B).unwrap().enter(Phase::C).unwrap();
        let after_1 = play(c, &[(BackwardBegin, 1), (BackwardEnd, 1)]).unwrap();
        let cases: [(Result<MarkOrder, OffloadError>, &str); 12] = [
            (new.mark(ForwardBegin, 0), "phase A first"),
            (new.enter(Phase::B), "phase A"),
            (a.enter(Phase::A), "phase B"),
            (a.enter(Phase::C), "phase B"),
            (a.mark(ForwardBegin, 1), "ForwardBegin of layer 0 or phase B"),
            (a.mark(ForwardEnd, 0), "ForwardBegin of layer 0 or phase B"),
            (a.mark(BackwardBegin, 0), "ForwardBegin of layer 0 or phase B"),
            (in_0.mark(ForwardBegin, 1), "ForwardEnd of layer 0"),
            (in_0.enter(Phase::B), "the end of layer 0 first"),
            (after_1.mark(BackwardBegin, 1), "BackwardBegin of a layer below 1"),
            (after_1.mark(BackwardEnd, 1), "BackwardBegin of a layer below 1"),
            (c.enter(Phase::C), "no phase after C"),
        ];
        for (result, words) in cases {
            match result {
                Err(OffloadError::Order { expected, .. }) => assert_eq!(expected, words),
                other => panic!("expected an order error with {words:?}, got {other:?}"),
            }
        }
        let far = a.mark(ForwardBegin, 3).unwrap_err();
        assert_eq!(far.to_string(), "layer is 3; accepted: 0 to 2");
    }
}
