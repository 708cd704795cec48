//! Bytes over time.

use std::fmt::Write as _;

use super::BARS_MAX;
use super::axis::{Axis, LEFT, WIDTH, pixels};
use super::rows::open;
use super::text::{bytes, escaped};

/// A named series of bytes over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// Name of the series.
    pub name: String,
    /// Start in nanoseconds and bytes, by time.
    pub points: Vec<(u64, u64)>,
}

const TOP: u64 = 12;
const PANEL: u64 = 64;
const GAP: u64 = 12;
const BOTTOM: u64 = 22;

/// Draws a panel per series on a common scale, over times from 0 to `end_ns`.
#[must_use]
pub fn memory_svg(series: &[Series], end_ns: u64) -> String {
    let axis = Axis { end_ns };
    let most = series.iter().flat_map(|s| &s.points).map(|point| point.1).max().unwrap_or(0);
    let bottom = TOP + (PANEL + GAP) * series.len() as u64;
    let mut out = String::new();
    open("Bytes over time", bottom + BOTTOM, &mut out);
    axis.draw(TOP, bottom, &mut out);
    // Each series has an equal share of the points.
    let points = BARS_MAX / series.len().max(1);
    for (y, one) in (TOP..).step_by((PANEL + GAP) as usize).zip(series) {
        let peak = one.points.iter().map(|point| point.1).max().unwrap_or(0);
        let _ = writeln!(
            out,
            "<text x=\"4\" y=\"{}\">{}</text><text x=\"4\" y=\"{}\">at most</text>\
             <text x=\"4\" y=\"{}\">{}</text>\n\
             <path class=\"bytes\" d=\"{}\"><title>{}: at most {}</title></path>",
            y + 18,
            escaped(&one.name),
            y + 34,
            y + 48,
            bytes(peak),
            path(axis, y, &one.points, points, most),
            escaped(&one.name),
            bytes(peak)
        );
        if one.points.len() > points {
            let _ = writeln!(
                out,
                "<text class=\"axis\" x=\"{}\" y=\"{}\">{points} of {} points drawn</text>",
                WIDTH - 150,
                y + PANEL + 10,
                one.points.len()
            );
        }
    }
    out.push_str("</svg>\n");
    out
}

/// Returns a closed step path through the first `most_points` points.
fn path(axis: Axis, y: u64, points: &[(u64, u64)], most_points: usize, most: u64) -> String {
    let height = |bytes: u64| {
        let up = u128::from(bytes) * u128::from(PANEL * 100) / u128::from(most.max(1));
        pixels((y + PANEL) * 100 - u64::try_from(up).unwrap_or(0))
    };
    let mut path = format!("M{LEFT} {}", height(0));
    for &(ns, bytes) in points.iter().take(most_points) {
        let _ = write!(path, "H{}V{}", pixels(axis.at(ns)), height(bytes));
    }
    let last = points.get(most_points).map_or(axis.end_ns, |next| next.0);
    let _ = write!(path, "H{}V{}Z", pixels(axis.at(last)), height(0));
    path
}
