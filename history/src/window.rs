//! How many tokens to draft next.

use crate::limits::{WINDOW_TOKENS_MAX, WINDOW_TOKENS_MIN, WINDOW_TOKENS_STEP};

/// The window of one sequence: it starts at [`WINDOW_TOKENS_MIN`], grows by [`WINDOW_TOKENS_STEP`] up to
/// [`WINDOW_TOKENS_MAX`] when a draft is accepted as a whole, and starts again after a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    tokens: u32,
}

impl Default for Window {
    fn default() -> Self {
        Self { tokens: WINDOW_TOKENS_MIN }
    }
}

impl Window {
    /// Returns a window of `tokens`, in the range that windows have.
    #[must_use]
    pub fn of(tokens: u32) -> Self {
        Self { tokens: tokens.clamp(WINDOW_TOKENS_MIN, WINDOW_TOKENS_MAX) }
    }

    /// Returns the most tokens of the next draft.
    #[must_use]
    pub const fn tokens(self) -> u32 {
        self.tokens
    }

    /// Returns the window after a draft of `drafted` tokens of which the first `accepted` were accepted. An
    /// empty draft changes nothing.
    #[must_use]
    pub fn after(self, drafted: u32, accepted: u32) -> Self {
        match drafted {
            0 => self,
            _ if accepted >= drafted => Self::of(self.tokens + WINDOW_TOKENS_STEP),
            _ => Self::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_grows_by_two_up_to_thirty_two_and_starts_again() {
        let mut window = Window::default();
        let mut seen = vec![window.tokens()];
        for _ in 0..17 {
            window = window.after(window.tokens(), window.tokens());
            seen.push(window.tokens());
        }
        let wanted: Vec<u32> = (1..=16).map(|step| 2 * step).chain([32, 32]).collect();
        assert_eq!(seen, wanted);
        assert_eq!(window.after(32, 31).tokens(), 2);
        assert_eq!(window.after(0, 0).tokens(), 32);
        assert_eq!(
            window.after(3, 3).tokens(),
            32,
            "a short draft that is accepted is no rejection"
        );
    }
}
