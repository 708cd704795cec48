//! Values: parsing and formatting.

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing_subscriber::filter::Targets;

use super::cgroup;
use super::table::{AUTOMATIC, Kind, Param};

/// Targets of log events.
pub(crate) const LOG_TARGETS: &[&str] =
    &["alloc", "device", "ffi", "offload", "schedule", "storage"];

/// Read of `/proc/meminfo` at most; the line of the available memory is the third.
const MEMINFO_BYTES_MAX: usize = 512;
/// Maximum number of digits behind the point of a size.
const FRACTION_DIGITS_MAX: usize = 9;

/// A parsed value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// A size in bytes or a count.
    Number(u64),
    Switch(bool),
    /// A path; `None`: not set.
    Path(Option<PathBuf>),
    /// A word of a choice, or a filter.
    Text(String),
    /// A number that the runtime chooses.
    Automatic,
}

/// Parses `text` as a value of `param`. `None`: not accepted.
pub(crate) fn parse(param: &Param, text: &str, memory_bytes: u64) -> Option<Value> {
    let text = text.trim();
    if param.is_automatic() && text.eq_ignore_ascii_case(AUTOMATIC) {
        return Some(Value::Automatic);
    }
    match param.kind {
        Kind::Size { min, max, percent } => {
            let bytes = match text.strip_suffix('%') {
                Some(share) if percent => of_memory(share.trim_end(), memory_bytes)?,
                Some(_) => return None,
                None => size(text)?,
            };
            (min..=max).contains(&bytes).then_some(Value::Number(bytes))
        }
        Kind::PowerOfTwo { max } => {
            let bytes = size(text)?;
            let is_accepted = bytes == 0 || (bytes.is_power_of_two() && bytes <= max);
            is_accepted.then_some(Value::Number(bytes))
        }
        Kind::Count { min, max } => {
            let count = digits(text)?;
            (min..=max).contains(&count).then_some(Value::Number(count))
        }
        Kind::Switch => match text.to_ascii_lowercase().as_str() {
            "1" | "on" | "true" | "yes" => Some(Value::Switch(true)),
            "0" | "off" | "false" | "no" => Some(Value::Switch(false)),
            _ => None,
        },
        Kind::Choice(words) => words
            .iter()
            .find(|word| word.eq_ignore_ascii_case(text))
            .map(|word| Value::Text((*word).to_owned())),
        Kind::Set(words) => set(words, text).map(Value::Text),
        Kind::Filter => parse_filter(text).map(|_| Value::Text(text.to_owned())),
        Kind::Path => Some(Value::Path((!text.is_empty()).then(|| PathBuf::from(text)))),
    }
}

/// Parses words separated by commas, or `off`. Returns them in the order of `words`. `None`: not accepted.
fn set(words: &[&str], text: &str) -> Option<String> {
    if text.eq_ignore_ascii_case("off") {
        return Some("off".to_owned());
    }
    let seen: Vec<&str> = text.split(',').map(str::trim).collect();
    let is_one = |word: &&str| words.iter().any(|known| known.eq_ignore_ascii_case(word));
    let is_seen = |known: &&&str| seen.iter().any(|word| known.eq_ignore_ascii_case(word));
    let chosen: Vec<&str> = words.iter().filter(is_seen).copied().collect();
    seen.iter().all(is_one).then(|| chosen.join(","))
}

/// Parses a filter such as `info,offload=debug`. `None`: not accepted.
pub(crate) fn parse_filter(text: &str) -> Option<Targets> {
    let targets: Targets = text.parse().ok()?;
    // The parser takes a word that is no level for a target.
    let is_known = |name: &str| LOG_TARGETS.contains(&name.split("::").next().unwrap_or(name));
    targets.iter().all(|(name, _)| is_known(name)).then_some(targets)
}

/// `4096`, `4K`, `4 KB`, `1.5GiB`; powers of 1024, letters of either case. A fraction needs a unit, and a part of a byte
/// is dropped.
fn size(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    let Some((whole, fraction)) = number.split_once('.') else {
        return digits(number)?.checked_mul(1 << shift);
    };
    if shift == 0 || fraction.len() > FRACTION_DIGITS_MAX {
        return None;
    }
    let scale = 10_u128.pow(fraction.len() as u32);
    let bytes = (u128::from(digits(fraction)?) << shift) / scale;
    digits(whole)?.checked_mul(1 << shift)?.checked_add(u64::try_from(bytes).ok()?)
}

/// 1 to 100 percent of `memory_bytes`.
fn of_memory(share: &str, memory_bytes: u64) -> Option<u64> {
    let share = digits(share).filter(|share| (1..=100).contains(share))?;
    Some((u128::from(memory_bytes) * u128::from(share) / 100) as u64)
}

/// Decimal digits only: no sign, no spaces, no overflow.
fn digits(text: &str) -> Option<u64> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// Formats bytes in the largest unit that divides them.
pub(crate) fn format_bytes(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes != 0 && bytes.trailing_zeros() >= *shift) {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Memory of this machine that this process may use, in bytes: the physical memory, or less if a cgroup limits it. Read
/// once. Allocates nothing.
#[unsafe(link_section = ".text.constructor")]
pub(crate) fn total_memory_bytes() -> u64 {
    static TOTAL: AtomicU64 = AtomicU64::new(0);
    let known = TOTAL.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: sysconf reads a number and takes any name.
    let (pages, page) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let bytes = u64::try_from(pages).unwrap_or(1 << 20) * u64::try_from(page).unwrap_or(4096);
    let bytes = cgroup::limit_bytes(read_start).map_or(bytes, |limit| limit.min(bytes));
    TOTAL.store(bytes, Ordering::Relaxed);
    bytes
}

/// Memory that this process can still take, in bytes: what the system has available, or less if a cgroup limits it.
/// `None` if the system does not say. Allocates nothing.
pub(crate) fn available_memory_bytes() -> Option<u64> {
    let mut text = [0; MEMINFO_BYTES_MAX];
    let length = read_start(c"/proc/meminfo", &mut text)?;
    let of_system = available_of(text.get(..length)?)?;
    Some(cgroup::available_bytes(read_start).map_or(of_system, |bytes| bytes.min(of_system)))
}

/// Returns the bytes of the line `MemAvailable` of `/proc/meminfo`.
fn available_of(meminfo: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(meminfo).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    digits(line.trim().strip_suffix("kB")?.trim_end())?.checked_mul(1024)
}

/// Fills `buffer` from the file at `path`. `None` if it cannot be read.
#[inline]
fn read_start(path: &CStr, buffer: &mut [u8]) -> Option<usize> {
    // SAFETY: a string, and a buffer of that length; the descriptor is closed once.
    unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return None;
        }
        let mut length = 0;
        while length < buffer.len() {
            let rest = &mut buffer[length..];
            match usize::try_from(libc::read(file, rest.as_mut_ptr().cast(), rest.len())) {
                Ok(0) | Err(_) => break,
                Ok(read) => length += read,
            }
        }
        libc::close(file);
        Some(length)
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::{Key, TABLE};
    use super::*;
    use proptest::prelude::*;
    use tracing::Level;

    fn read(key: Key, text: &str) -> Option<Value> {
        parse(&TABLE[key as usize], text, 1000 << 20)
    }

    #[test]
    fn sizes_are_parsed_with_units() {
        for (text, bytes) in [
            ("4GiB", 4 << 30),
            ("4G", 4 << 30),
            ("4096M", 4 << 30),
            ("4096 mib", 4 << 30),
            ("4294967296", 4 << 30),
            (" 1MiB ", 1 << 20),
            ("4 GB", 4 << 30),
            ("4gb", 4 << 30),
            ("4 G", 4 << 30),
            ("1.5G", 3 << 29),
            ("1.5 GiB", 3 << 29),
            ("0.5T", 512 << 30),
            ("80%", 800 << 20),
        ] {
            assert_eq!(read(Key::CpuBudget, text), Some(Value::Number(bytes)), "{text}");
        }
        for text in [
            "",
            "0",
            "-1",
            "+5M",
            "4GBs",
            "4 G B",
            "1.5",
            "1.5B",
            "1.G",
            ".5G",
            "1.2.3G",
            "1,5G",
            "1.0000000001G",
            "101%",
            "0%",
            "G",
            "1e9",
            "99999999999G",
            "16777216.5T",
        ] {
            assert_eq!(read(Key::CpuBudget, text), None, "{text}");
        }
        assert_eq!(size("2.000000001K"), Some(2048), "a part of a byte is dropped");
        for (text, bytes) in [("0", 0), ("2MiB", 2 << 20), ("1GiB", 1 << 30)] {
            assert_eq!(read(Key::CudaPage, text), Some(Value::Number(bytes)), "{text}");
        }
        for text in ["3", "3MiB", "2GiB", "-2"] {
            assert_eq!(read(Key::CudaPage, text), None, "{text}");
        }
        assert_eq!(read(Key::HeapMin, "50%"), None, "only budgets take a share of memory");
    }

    #[test]
    fn available_memory_is_read_from_the_system() {
        let text =
            "MemTotal:       16303428 kB\nMemFree:          312 kB\nMemAvailable:   8000 kB\nBuf";
        assert_eq!(available_of(text.as_bytes()), Some(8000 << 10));
        for text in ["", "MemAvailable: 8000", "MemAvailable: x kB", "MemFree: 8000 kB"] {
            assert_eq!(available_of(text.as_bytes()), None, "{text:?}");
        }
        assert!(available_memory_bytes().unwrap() <= total_memory_bytes());
    }

    #[test]
    fn numbers_that_the_runtime_chooses_may_be_given_to_it() {
        assert_eq!(read(Key::Window, " Auto "), Some(Value::Automatic));
        assert_eq!(read(Key::HostBudget, "auto"), Some(Value::Automatic));
        assert_eq!(read(Key::CpuBudget, "auto"), None);
        assert_eq!(read(Key::NvmeEngine, "auto"), Some(Value::Text("auto".to_owned())));
    }

    #[test]
    fn counts_switches_choices_and_paths() {
        assert_eq!(read(Key::Window, "4"), Some(Value::Number(4)));
        assert_eq!(read(Key::Window, "0"), None);
        assert_eq!(read(Key::Window, "4K"), None, "a count is no size");
        assert_eq!(read(Key::Checksum, "Off"), Some(Value::Switch(false)));
        assert_eq!(read(Key::Checksum, "maybe"), None);
        assert_eq!(read(Key::NvmeEngine, "URing"), Some(Value::Text("uring".to_owned())));
        assert_eq!(read(Key::NvmeEngine, "io_uring"), None);
        assert_eq!(read(Key::NvmeDir, ""), Some(Value::Path(None)));
    }

    #[test]
    fn sets_take_known_words_in_any_order_or_off() {
        let set = |text: &str| match read(Key::Dump, text) {
            Some(Value::Text(words)) => Some(words),
            _ => None,
        };
        assert_eq!(set("oom").as_deref(), Some("oom"));
        assert_eq!(set("Signal, oom,signal").as_deref(), Some("oom,signal"));
        assert_eq!(set("trigger,exit,signal,oom").as_deref(), Some("oom,exit,signal,trigger"));
        assert_eq!(set("OFF").as_deref(), Some("off"));
        for text in ["", ",", "oom,", "oom exit", "oom,off", "all", "oom;exit"] {
            assert_eq!(set(text), None, "{text}");
        }
    }

    #[test]
    fn filters_take_levels_and_known_targets_only() {
        let filter = parse_filter("info,offload=debug").unwrap();
        assert!(filter.would_enable("offload", &Level::DEBUG));
        assert!(!filter.would_enable("alloc", &Level::DEBUG));
        assert!(filter.would_enable("alloc", &Level::INFO));
        assert!(!parse_filter("off").unwrap().would_enable("ffi", &Level::ERROR));
        assert!(parse_filter("offload::engine=trace").is_some());
        for text in ["verbose", "info,teapot=debug", "offload=loud", "info;offload=debug", "=info"]
        {
            assert!(parse_filter(text).is_none(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn formatted_sizes_parse_to_the_same_value(bytes in (1_u64 << 20)..(64 << 40)) {
            prop_assert_eq!(read(Key::CpuBudget, &format_bytes(bytes)), Some(Value::Number(bytes)));
        }

        #[test]
        fn any_text_is_refused_or_parsed_within_the_range(text in "\\PC{0,24}") {
            if let Some(Value::Number(bytes)) = read(Key::CpuBudget, &text) {
                prop_assert!((1 << 20..=64 << 40).contains(&bytes));
            }
        }
    }
}
