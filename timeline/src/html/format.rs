//! Formatting of numbers, and escaping of HTML text.

/// Escapes `text` for HTML elements and attributes.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            plain => out.push(plain),
        }
    }
    out
}

/// Formats bytes with three significant digits and a binary unit: `1.25 GiB`.
pub(super) fn bytes(value_bytes: u64) -> String {
    scaled(value_bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// Formats a duration with three significant digits and a unit up to seconds: `12.5 ms`.
pub(super) fn duration(value_ns: u64) -> String {
    if value_ns == 0 {
        return "0 s".to_owned();
    }
    scaled(value_ns as f64, 1000.0, &["ns", "µs", "ms", "s"])
}

/// Formats a rate, `980 MiB/s`; a dash for 0.
pub(super) fn rate(bytes_per_s: u64) -> String {
    if bytes_per_s == 0 {
        return "–".to_owned();
    }
    bytes(bytes_per_s) + "/s"
}

/// Formats a ratio, `12.5 %`; a dash if `whole` is 0.
pub(super) fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "–".to_owned();
    }
    format!("{:.1} %", 100.0 * part as f64 / whole as f64)
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut at = 0;
    // 999.5 would be shown as 1000.
    while value >= step.min(999.5) && at + 1 < units.len() {
        value /= step;
        at += 1;
    }
    let unit = units[at];
    let decimals = match value {
        _ if at == 0 => 0,
        _ if value < 9.995 => 2,
        _ if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_keep_three_digits() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1.00 KiB");
        assert_eq!(bytes(64 << 20), "64.0 MiB");
        assert_eq!(bytes(5 << 30 | 1 << 28), "5.25 GiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(duration(0), "0 s");
        assert_eq!(duration(999), "999 ns");
        assert_eq!(duration(12_345_678), "12.3 ms");
        assert_eq!(duration(99_960_000), "100 ms");
        assert_eq!(duration(4_000_000_000_000), "4000 s");
    }

    #[test]
    fn zero_rates_and_empty_wholes_are_dashes() {
        assert_eq!((rate(0), share(1, 0)), ("–".to_owned(), "–".to_owned()));
        assert_eq!((rate(1 << 30), share(1, 8)), ("1.00 GiB/s".to_owned(), "12.5 %".to_owned()));
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(escaped("<b a='1'>&\"</b>"), "&lt;b a=&#39;1&#39;&gt;&amp;&quot;&lt;/b&gt;");
    }
}
