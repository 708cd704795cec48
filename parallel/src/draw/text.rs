//! Escaping of text, and numbers with units.

pub use dormouse_residency::units::bytes;
pub(super) use dormouse_residency::units::time;

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

/// Returns lines of text for a page, aligned as in a terminal.
#[must_use]
pub fn text_block(lines: &[String]) -> String {
    format!("<pre>{}</pre>\n", escaped(&lines.join("\n")))
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
    fn shares_are_percentages() {
        assert_eq!(percent(0.0577), "5.8 %");
    }
}
