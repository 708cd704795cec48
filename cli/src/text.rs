//! Formatting of figures.

use std::path::Path;

use serde::{Serialize, Serializer};

/// Units by powers of 1000.
const OPERATIONS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];

/// The same for parameters of models, as model cards write them.
const PARAMETERS: [&str; 5] = ["", " K", " M", " B", " T"];

/// Maximum characters of a line on standard error.
const LINE_CHARS_MAX: usize = 2000;

/// Formats text that may quote a file as one line for a terminal.
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

/// Formats a count in groups of three digits.
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

/// Formats a count with a noun.
pub(crate) fn things(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// Formats floating-point operations with a unit.
pub(crate) fn operations(mut flops: f64) -> String {
    let mut unit = 0;
    while flops >= 1000.0 && unit + 1 < OPERATIONS.len() {
        (flops, unit) = (flops / 1000.0, unit + 1);
    }
    format!("{flops:.2} {}FLOP", OPERATIONS[unit])
}

/// Formats a number of parameters in thousands, millions, ….
pub(crate) fn parameters(number: u64) -> String {
    let (mut number, mut unit) = (number as f64, 0);
    while number >= 1000.0 && unit + 1 < PARAMETERS.len() {
        (number, unit) = (number / 1000.0, unit + 1);
    }
    let digits = if unit == 0 { 0 } else { 2 };
    format!("{number:.digits$}{}", PARAMETERS[unit])
}

/// Formats seconds with a unit.
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

/// Breaks text into lines of at most `width` characters at its spaces; a longer word is not broken.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Formats a value as JSON.
pub(crate) fn as_json(it: &impl Serialize) -> serde_json::Result<String> {
    let mut text = serde_json::to_string_pretty(it)?;
    text.push('\n');
    Ok(text)
}

/// Serialises a path as text. A path need not be Unicode, JSON must: other bytes become U+FFFD.
pub(crate) fn lossy<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn what_json_cannot_say_is_an_error() {
        assert_eq!(as_json(&[1]).unwrap(), "[\n  1\n]\n");
        let refused = as_json(&BTreeMap::from([([1_u8], 2)])).unwrap_err();
        assert!(refused.to_string().contains("key must be a string"), "{refused}");
    }

    #[test]
    fn a_line_is_escaped_and_bounded() {
        assert_eq!(line("a \u{1b}[31mb\nc\u{9b}é"), "a \\u{1b}[31mb\\nc\\u{9b}é");
        assert_eq!(line(&"é".repeat(LINE_CHARS_MAX)), "é".repeat(LINE_CHARS_MAX));
        assert_eq!(line(&"é".repeat(LINE_CHARS_MAX + 1)), "é".repeat(LINE_CHARS_MAX) + "…");
    }

    #[test]
    fn text_is_wrapped_at_spaces() {
        assert_eq!(wrapped("a bb ccc é", 4), ["a bb", "ccc", "é"]);
        assert_eq!(wrapped("abcdef é", 3), ["abcdef", "é"]);
        assert_eq!(wrapped("", 3), [""]);
    }

    #[test]
    fn figures_have_units() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567, u64::MAX].map(count),
            ["0", "999", "1,000", "1,234,567", "18,446,744,073,709,551,615"]
        );
        assert_eq!([things(1, "tree", "trees"), things(2, "tree", "trees")], ["1 tree", "2 trees"]);
        assert_eq!([950, 30_532_122_624].map(parameters), ["950", "30.53 B"]);
        assert_eq!([950.0, 2.5e13].map(operations), ["950.00 FLOP", "25.00 TFLOP"]);
        assert_eq!(
            [0.0, 12.0, 0.0015, 2.5e-6, 3e-9].map(seconds),
            ["0 s", "12.000 s", "1.500 ms", "2.500 µs", "3.000 ns"]
        );
    }
}
