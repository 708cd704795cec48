//! Numbers with units, for people.

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
#[must_use]
pub fn time(ns: u64) -> String {
    scaled(ns, 1000.0, &TIMES)
}

/// Formats bytes with a unit.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    scaled(bytes, 1024.0, &BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units() {
        assert_eq!(
            [time(0), time(999), time(1500), time(2_000_000)],
            ["0 ns", "999 ns", "1.50 µs", "2 ms"]
        );
        assert_eq!(time(7_260_000_000_000), "7260 s");
        assert_eq!([bytes(1023), bytes(1536)], ["1023 B", "1.50 KiB"]);
        assert_eq!(bytes(u64::MAX), "16384 PiB");
    }
}
