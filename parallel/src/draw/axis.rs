//! The time axis: margins, positions, ticks.

use std::fmt::Write as _;

use super::text::time;

/// Width of a picture and its margins, in pixels.
pub(super) const WIDTH: u64 = 1200;
pub(super) const LEFT: u64 = 76;
const RIGHT: u64 = 16;
/// Maximum ticks of an axis.
const TICKS_MAX: u64 = 12;

/// A time axis from 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub(super) end_ns: u64,
}

/// Formats hundredths of a pixel.
pub(super) fn pixels(hundredths: u64) -> String {
    let (whole, rest) = (hundredths / 100, hundredths % 100);
    match rest {
        0 => whole.to_string(),
        _ if rest % 10 == 0 => format!("{whole}.{}", rest / 10),
        _ => format!("{whole}.{rest:02}"),
    }
}

impl Axis {
    pub(super) const PLOT: u64 = WIDTH - LEFT - RIGHT;

    /// Returns the position of a time, in hundredths of a pixel.
    pub(super) fn at(self, ns: u64) -> u64 {
        let scaled = u128::from(ns.min(self.end_ns)) * u128::from(Self::PLOT * 100);
        let scaled = scaled / u128::from(self.end_ns.max(1));
        LEFT * 100 + u64::try_from(scaled).unwrap_or(0)
    }

    /// Returns the smallest tick distance, 1, 2 or 5 times a power of ten, within [`TICKS_MAX`].
    fn tick_ns(self) -> u64 {
        let mut power = 1_u64;
        loop {
            for factor in [1, 2, 5] {
                let tick_ns = power.saturating_mul(factor);
                if self.end_ns / tick_ns <= TICKS_MAX {
                    return tick_ns;
                }
            }
            power = power.saturating_mul(10);
        }
    }

    /// Draws tick lines from `top` to `bottom`, each with its time below.
    pub(super) fn draw(self, top: u64, bottom: u64, out: &mut String) {
        let tick_ns = self.tick_ns();
        for tick in 0..=self.end_ns / tick_ns {
            let (x, ns) = (pixels(self.at(tick * tick_ns)), tick * tick_ns);
            let _ = writeln!(
                out,
                "<line class=\"tick\" x1=\"{x}\" x2=\"{x}\" y1=\"{top}\" y2=\"{bottom}\"/>\
                 <text class=\"axis\" x=\"{x}\" y=\"{}\">{}</text>",
                bottom + 14,
                time(ns)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_few_and_round() {
        let ticks = [0, 1, 12, 13, 25, 26, 64, 65, 165_000_000, u64::MAX];
        let ticks = ticks.map(|end_ns| Axis { end_ns }.tick_ns());
        let wanted = [1, 1, 1, 2, 2, 5, 5, 10, 20_000_000, 2_000_000_000_000_000_000];
        assert_eq!(ticks, wanted);
    }

    #[test]
    fn positions_are_linear_in_time() {
        let axis = Axis { end_ns: u64::MAX };
        assert_eq!([axis.at(0), axis.at(u64::MAX)], [7600, 118_400]);
        assert_eq!(Axis { end_ns: 0 }.at(5), 7600);
        assert_eq!([pixels(7600), pixels(7650), pixels(7605)], ["76", "76.5", "76.05"]);
    }
}
