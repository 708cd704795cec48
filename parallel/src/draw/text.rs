//! Escaping of text, and numbers with units.

/// Escapes text for an element or a quoted attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML has no other control characters, escaped or not.
            letter if letter.is_control() && !matches!(letter, '\n' | '\t') => out.push('\u{fffd}'),
            letter => out.push(letter),
        }
    }
    out
}

/// Units by powers of 1000 and 1024.
const TIMES: [&str; 4] = ["ns", "µs", "ms", "s"];
const BYTES: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

fn scaled(value: u64, base: f64, names: &[&str]) -> String {
    let (mut shown, mut at) = (value as f64, 0);
    while shown >= base && at + 1 < names.len() {
        shown /= base;
        at += 1;
    }
    let digits = if at == 0 || shown.fract() == 0.0 { 0 } else { 2 };
    format!("{shown:.digits$} {}", names[at])
}

/// Formats nanoseconds with a unit.
pub(super) fn time(ns: u64) -> String {
    scaled(ns, 1000.0, &TIMES)
}

/// Returns lines of text for a page, aligned as in a terminal.
#[must_use]
pub fn text_block(lines: &[String]) -> String {
    format!("<pre>{}</pre>\n", escaped(&lines.join("\n")))
}

/// Formats bytes with a unit.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    scaled(bytes, 1024.0, &BYTES)
}

/// Formats a share as a percentage.
#[must_use]
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_markup_and_control_characters() {
        assert_eq!(escaped("a<b>&\"'\u{1}c\n"), "a&lt;b&gt;&amp;&quot;&#39;\u{fffd}c\n");
    }

    #[test]
    fn numbers_have_units() {
        assert_eq!(
            [time(0), time(999), time(1500), time(2_000_000)],
            ["0 ns", "999 ns", "1.50 µs", "2 ms"]
        );
        assert_eq!(time(7_260_000_000_000), "7260 s");
        assert_eq!([bytes(1023), bytes(1536)], ["1023 B", "1.50 KiB"]);
        assert_eq!(bytes(u64::MAX), "16384 PiB");
        assert_eq!(percent(0.0577), "5.8 %");
    }
}
