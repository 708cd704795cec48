//! Figures in words.

/// Names of powers of 1024.
const BYTES: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
/// Names of powers of 1000.
const OPERATIONS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];

/// Characters of a line on standard error.
const LINE_CHARS_MAX: usize = 2000;

/// One line for a terminal of a text that may quote a file.
pub(crate) fn line(text: &str) -> String {
    let mut line = String::new();
    for (at, character) in text.chars().enumerate() {
        if at == LINE_CHARS_MAX {
            line.push('…');
            break;
        }
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    line
}

/// A count, in groups of three digits.
pub(crate) fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count of things, in one or many.
pub(crate) fn things(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// Bytes with a unit.
pub(crate) fn bytes(bytes: u64) -> String {
    let (value, unit) = scaled(bytes as f64, 1024.0, &BYTES);
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.2} {unit}") }
}

/// Floating-point operations with a unit.
pub(crate) fn operations(flops: f64) -> String {
    let (value, unit) = scaled(flops, 1000.0, &OPERATIONS);
    format!("{value:.2} {unit}FLOP")
}

/// Seconds with a unit.
pub(crate) fn seconds(seconds: f64) -> String {
    let (factor, unit) = match seconds.abs() {
        0.0 => return "0 s".to_owned(),
        s if s >= 1.0 => (1.0, "s"),
        s if s >= 1e-3 => (1e3, "ms"),
        s if s >= 1e-6 => (1e6, "µs"),
        _ => (1e9, "ns"),
    };
    format!("{:.3} {unit}", seconds * factor)
}

/// A share in per cent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn scaled<'a>(mut value: f64, base: f64, names: &[&'a str]) -> (f64, &'a str) {
    let mut at = 0;
    while value >= base && at + 1 < names.len() {
        value /= base;
        at += 1;
    }
    (value, names.get(at).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_and_ends() {
        assert_eq!(line("a \u{1b}[31mb\nc\u{9b}é"), "a \\u{1b}[31mb\\nc\\u{9b}é");
        assert_eq!(line(&"é".repeat(LINE_CHARS_MAX)), "é".repeat(LINE_CHARS_MAX));
        assert_eq!(line(&"é".repeat(LINE_CHARS_MAX + 1)), "é".repeat(LINE_CHARS_MAX) + "…");
    }

    #[test]
    fn figures_read_well() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567, u64::MAX].map(count),
            ["0", "999", "1,000", "1,234,567", "18,446,744,073,709,551,615"]
        );
        assert_eq!([things(1, "tree", "trees"), things(2, "tree", "trees")], ["1 tree", "2 trees"]);
        assert_eq!([0, 1023, 1536, 3 << 40].map(bytes), ["0 B", "1023 B", "1.50 KiB", "3.00 TiB"]);
        assert_eq!([950.0, 2.5e13].map(operations), ["950.00 FLOP", "25.00 TFLOP"]);
        assert_eq!(
            [0.0, 12.0, 0.0015, 2.5e-6, 3e-9].map(seconds),
            ["0 s", "12.000 s", "1.500 ms", "2.500 µs", "3.000 ns"]
        );
        assert_eq!(percent(0.1234), "12.3 %");
    }
}
