//! Rows of bars over time.

use std::fmt::Write as _;

use super::BARS_MAX;
use super::axis::{Axis, LEFT, WIDTH, pixels};
use super::page::STYLE;
use super::text::{escaped, time};

/// An interval of time.
#[derive(Clone, Debug)]
pub(super) struct Bar {
    /// CSS classes.
    pub(super) class: String,
    /// Text drawn inside if it fits.
    pub(super) label: String,
    /// Tooltip, shown before the times.
    pub(super) tooltip: String,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) bars: Vec<Bar>,
}

const TOP: u64 = 30;
const ROW: u64 = 34;
const BAR: u64 = 28;
const BOTTOM: u64 = 22;
/// Width of a label's letter in pixels.
const LETTER: u64 = 7;
/// Width of a legend entry in pixels.
const LEGEND: u64 = 170;

/// Draws rows over times from 0 to `end_ns`.
pub(super) fn svg(title: &str, rows: &[Row], legend: &[(&str, &str)], end_ns: u64) -> String {
    let axis = Axis { end_ns };
    let bottom = TOP + ROW * rows.len() as u64;
    let mut out = String::new();
    open(title, bottom + BOTTOM, &mut out);
    for (place, (class, words)) in (0..).zip(legend) {
        let x = LEFT + place * LEGEND;
        let _ = writeln!(
            out,
            "<rect class=\"{class} g0\" x=\"{x}\" y=\"6\" width=\"14\" height=\"14\"/>\
             <text x=\"{}\" y=\"17\">{}</text>",
            x + 20,
            escaped(words)
        );
    }
    let idle = LEFT + legend.len() as u64 * LEGEND;
    let _ = writeln!(
        out,
        "<rect fill=\"url(#idle)\" x=\"{idle}\" y=\"6\" width=\"14\" height=\"14\"/>\
         <text x=\"{}\" y=\"17\">idle</text>",
        idle + 20
    );
    axis.draw(TOP, bottom, &mut out);
    let (mut drawn, all) = (0, rows.iter().map(|row| row.bars.len()).sum::<usize>());
    // Each row has an equal share of the bars.
    let most = BARS_MAX / rows.len().max(1);
    for (y, row) in (TOP..).step_by(ROW as usize).zip(rows) {
        drawn += row.bars.len().min(most);
        draw_row(axis, y, row, most, &mut out);
    }
    if drawn < all {
        let _ = writeln!(
            out,
            "<text class=\"axis\" x=\"{}\" y=\"17\">{drawn} of {all} bars drawn; grey: not drawn</text>",
            WIDTH - 150
        );
    }
    out.push_str("</svg>\n");
    out
}

/// Writes the head of a picture: size, title, style and the idle pattern.
pub(super) fn open(title: &str, height: u64, out: &mut String) {
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\" class=\"chart\">\n\
         <title>{}</title>\n<style>{STYLE}</style>\n\
         <defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">\
         <path class=\"idle\" d=\"M0 6L6 0\"/></pattern></defs>\n",
        escaped(title)
    );
}

/// Returns the times in which no bar of a row is drawn, up to the first bar that is left out, and that bar's start.
fn gaps(row: &Row, most: usize, end_ns: u64) -> (Vec<(u64, u64)>, u64) {
    let omitted = row.bars.iter().skip(most).map(|bar| bar.start_ns).min();
    let known_ns = omitted.unwrap_or(end_ns);
    let mut drawn: Vec<(u64, u64)> =
        row.bars.iter().take(most).map(|bar| (bar.start_ns, bar.end_ns)).collect();
    drawn.sort_unstable();
    let (mut gaps, mut end) = (Vec::new(), 0);
    for (start_ns, end_ns) in drawn.into_iter().chain([(known_ns, known_ns)]) {
        let start_ns = start_ns.min(known_ns);
        if start_ns > end {
            gaps.push((end, start_ns));
        }
        end = end.max(end_ns);
    }
    (gaps, known_ns)
}

fn draw_row(axis: Axis, y: u64, row: &Row, most: usize, out: &mut String) {
    let _ = writeln!(out, "<text x=\"4\" y=\"{}\">{}</text>", y + 18, escaped(&row.name));
    let (gaps, known_ns) = gaps(row, most, axis.end_ns);
    let mut idle = String::new();
    for (begin, end) in gaps {
        let (begin, end) = (pixels(axis.at(begin)), pixels(axis.at(end)));
        if begin != end {
            let _ = write!(idle, "M{begin} {y}H{end}v{BAR}H{begin}Z");
        }
    }
    if !idle.is_empty() {
        let _ = writeln!(out, "<path fill=\"url(#idle)\" d=\"{idle}\"/>");
    }
    if row.bars.len() > most {
        let (begin, end) = (axis.at(known_ns), axis.at(axis.end_ns));
        let _ = writeln!(
            out,
            "<rect class=\"omitted\" x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{BAR}\">\
             <title>{} bars from {} on are not drawn</title></rect>",
            pixels(begin),
            pixels(end - begin),
            row.bars.len() - most,
            time(known_ns)
        );
    }
    for bar in row.bars.iter().take(most) {
        let (x, end) = (axis.at(bar.start_ns), axis.at(bar.end_ns.max(bar.start_ns)));
        let _ = writeln!(
            out,
            "<rect class=\"{}\" x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{BAR}\">\
             <title>{}: {} to {}</title></rect>",
            escaped(&bar.class),
            pixels(x),
            pixels((end - x).max(1)),
            escaped(&bar.tooltip),
            time(bar.start_ns),
            time(bar.end_ns)
        );
        if end - x >= LETTER * 100 * bar.label.chars().count() as u64 {
            let _ = writeln!(
                out,
                "<text class=\"label\" x=\"{}\" y=\"{}\">{}</text>",
                pixels(x + (end - x) / 2),
                y + 18,
                escaped(&bar.label)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(bars: &[(u64, u64)]) -> Row {
        let bar = |&(start_ns, end_ns): &(u64, u64)| {
            let (class, label, tooltip) = (String::new(), String::new(), String::new());
            Bar { class, label, tooltip, start_ns, end_ns }
        };
        Row { name: String::new(), bars: bars.iter().map(bar).collect() }
    }

    #[test]
    fn only_time_without_bars_is_idle() {
        let bars = row(&[(10, 20), (15, 17), (20, 30), (40, 50)]);
        assert_eq!(gaps(&bars, 9, 60), (vec![(0, 10), (30, 40), (50, 60)], 60));
        // The last two bars are left out: nothing is known from the first of them on.
        assert_eq!(gaps(&bars, 2, 60), (vec![(0, 10)], 20));
        assert_eq!(gaps(&bars, 3, 60), (vec![(0, 10), (30, 40)], 40));
        assert_eq!(gaps(&row(&[]), 9, 60), (vec![(0, 60)], 60));
        assert_eq!(gaps(&row(&[(0, 60)]), 9, 60), (vec![], 60));
    }
}
