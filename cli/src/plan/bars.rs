//! Tables with a bar per row, for a terminal of [`WIDTH`] columns.

use super::figures::WIDTH;

/// Maximum rows drawn; JSON has all.
const ROWS_MAX: usize = 16;
/// Minimum and maximum cells of a bar.
const BAR_MIN: usize = 8;
const BAR_MAX: usize = 40;

/// One row: a bar of `used` and `then` of the whole, the rest of which is idle.
#[derive(Debug, Default)]
pub(super) struct Bar {
    pub(super) used: f64,
    pub(super) then: f64,
    pub(super) cells: Vec<String>,
}

/// Draws a table: number, bar, cells under `heads`. The longest possible bar is `whole`.
pub(super) fn table(
    name: &str,
    plural: &str,
    heads: &[&str],
    bars: &[Bar],
    whole: f64,
) -> Vec<String> {
    let shown = bars.get(..bars.len().min(ROWS_MAX)).unwrap_or(bars);
    let mut widths: Vec<usize> = heads.iter().map(|head| head.chars().count()).collect();
    for bar in shown {
        for (width, cell) in widths.iter_mut().zip(&bar.cells) {
            *width = cell.chars().count().max(*width);
        }
    }
    let number = name.len().max(shown.len().saturating_sub(1).to_string().len());
    let beside: usize = number + 2 + widths.iter().map(|width| width + 2).sum::<usize>();
    let width = WIDTH.saturating_sub(2 + beside).clamp(BAR_MIN, BAR_MAX);
    let line = |first: &str, bar: &str, cells: &[&str]| {
        let mut line = format!("{first:>number$}  {bar:width$}");
        for (cell, width) in cells.iter().zip(&widths) {
            line.push_str(&format!("  {cell:>width$}"));
        }
        line
    };
    let mut lines = vec![line(name, "", heads)];
    for (at, bar) in shown.iter().enumerate() {
        let cells: Vec<&str> = bar.cells.iter().map(String::as_str).collect();
        lines.push(line(
            &at.to_string(),
            &drawn(bar.used / whole, bar.then / whole, width),
            &cells,
        ));
    }
    if bars.len() > ROWS_MAX {
        lines.push(format!("… {} more {plural}; --json lists all", bars.len() - ROWS_MAX));
    }
    lines
}

/// Returns a bar: `█` for the used share, `▒` for the next one, `░` for the rest. A used share below half a cell is
/// drawn as one.
fn drawn(used: f64, then: f64, width: usize) -> String {
    // A float cast saturates, and is 0 for NaN.
    let cells = |share: f64| ((share * width as f64).round() as usize).min(width);
    let first = if used > 0.0 { cells(used).max(1) } else { cells(used) };
    let second = cells(used + then).max(first);
    "█".repeat(first) + &"▒".repeat(second - first) + &"░".repeat(width - second)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(used: f64, cell: &str) -> Bar {
        Bar { used, cells: vec![cell.to_owned(), "1".to_owned()], ..Bar::default() }
    }

    #[test]
    fn labels_have_columns_of_their_own() {
        let long = "9".repeat(56);
        let bars = [bar(4.0, &long), bar(1.0, "7"), bar(0.001, ""), bar(0.0, "")];
        let lines = table("rank", "ranks", &["time", "rows"], &bars, 4.0);
        for (line, bar) in lines[1..].iter().zip(["████████", "██░░░░░░", "█░░░░░░░", "░░░░░░░░"])
        {
            assert!(line.contains(&format!("  {bar}  ")), "{line}");
        }
        assert!(lines.iter().all(|line| line.chars().count() == lines[0].chars().count()));
        assert!(lines[0].chars().count() <= WIDTH - 2);
    }

    #[test]
    fn rows_beyond_the_limit_are_counted() {
        let bars: Vec<Bar> = (0..ROWS_MAX + 3).map(|_| bar(1.0, "")).collect();
        let lines = table("stage", "stages", &["a", "b"], &bars, 1.0);
        assert_eq!(lines.len(), ROWS_MAX + 2);
        assert_eq!(lines[ROWS_MAX + 1], "… 3 more stages; --json lists all");
    }
}
