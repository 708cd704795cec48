//! Suggests what an unknown name may mean.

use super::load::PREFIX;
use super::table::{RENAMED, TABLE};

/// Settings that answer what users try in other programs, by a word of the name.
const OTHER_PROGRAMS: &[(&str, &str)] =
    &[("DEBUG", "DORMOUSE_LOG=debug"), ("VERBOSE", "DORMOUSE_LOG=info")];
/// Words that users write for others.
const WORDS: &[(&str, &str)] = &[("GPU", "CUDA"), ("DISK", "NVME"), ("SSD", "NVME")];
/// Distance up to which a name is a slip of the pen.
const SLIP_MAX: usize = 2;
/// Maximum number of names in a suggestion.
const NAMES_MAX: usize = 4;

/// Returns the nearest settings as text, such as `A, B or C`. `None` if no name is near enough.
pub(crate) fn suggestion(unknown: &str) -> Option<String> {
    // Earlier names mean the present ones.
    let known = TABLE.iter().map(|param| (param.name(), param.name()));
    let known = known.chain(RENAMED.iter().map(|(earlier, key)| (*earlier, key.name())));
    let known: Vec<(&str, &str)> = known.collect();
    let near = known.iter().map(|(spelled, name)| (distance(unknown, spelled), *name));
    let (distance, nearest) = near.min_by_key(|(distance, _)| *distance)?;
    if distance <= SLIP_MAX {
        return Some(nearest.to_owned());
    }
    let words = words(unknown);
    let tried = OTHER_PROGRAMS.iter().find(|(word, _)| words.contains(word));
    if let Some((_, setting)) = tried {
        return Some((*setting).to_owned());
    }
    let mut names = named_by(&words, &known);
    if names.is_empty() && distance <= (nearest.len() - PREFIX.len()) / 3 {
        names.push(nearest);
    }
    let (last, others) = names.split_last()?;
    if others.is_empty() {
        Some((*last).to_owned())
    } else {
        Some(format!("{} or {last}", others.join(", ")))
    }
}

/// Returns the words of a name, as parameters spell them.
fn words(name: &str) -> Vec<&str> {
    let bare = name.strip_prefix(PREFIX).unwrap_or(name);
    let meant = |word| {
        let other = WORDS.iter().find(|(said, _)| *said == word);
        other.map_or(word, |(_, meant)| *meant)
    };
    bare.split('_').filter(|word| !word.is_empty()).map(meant).collect()
}

/// Returns the names that have all of `tried`, or else the one with the most words, all of them in `tried`.
fn named_by<'a>(tried: &[&str], known: &[(&'a str, &'a str)]) -> Vec<&'a str> {
    let mut longer = Vec::new();
    let mut shorter: Option<(usize, &str)> = None;
    for (spelled, name) in known {
        let words = words(spelled);
        if !tried.is_empty() && tried.iter().all(|word| words.contains(word)) {
            if !longer.contains(name) && longer.len() < NAMES_MAX {
                longer.push(*name);
            }
        } else if words.iter().all(|word| tried.contains(word))
            && shorter.is_none_or(|(count, _)| words.len() > count)
        {
            shorter = Some((words.len(), *name));
        }
    }
    if longer.is_empty() { shorter.into_iter().map(|(_, name)| name).collect() } else { longer }
}

/// Levenshtein distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        if let Some(first) = row.first_mut() {
            *first = left;
        }
        for (cell, to) in row.iter_mut().skip(1).zip(b.bytes()) {
            let replaced = diagonal + usize::from(from != to);
            diagonal = *cell;
            left = replaced.min(left + 1).min(diagonal + 1);
            *cell = left;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn misspelled_names_are_recognised_and_others_are_not() {
        for (slip, meant) in [
            ("DORMOUSE_ALOC_BUDGET_BYTES", "DORMOUSE_CPU_BUDGET_BYTES"),
            ("DORMOUSE_ALLOC_BUDGET", "DORMOUSE_CPU_BUDGET_BYTES"),
            ("DORMOUSE_NVMEDIR", "DORMOUSE_NVME_DIR"),
            ("DORMOUSE_WINDOW_LAYERS", "DORMOUSE_OFFLOAD_WINDOW_LAYERS"),
            ("DORMOUSE_LOG_LEVEL", "DORMOUSE_LOG"),
            ("DORMOUSE_LOGFILE", "DORMOUSE_LOG_FILE"),
            ("DORMOUSE_LOG_FIEL", "DORMOUSE_LOG_FILE"),
            ("DORMOUSE_LOG_FILE_PATH", "DORMOUSE_LOG_FILE"),
            ("DORMOUSE_DEBUG", "DORMOUSE_LOG=debug"),
            ("DORMOUSE_VERBOSE", "DORMOUSE_LOG=info"),
            ("DORMOUSE_GPU_BUDGET", "DORMOUSE_CUDA_BUDGET_BYTES"),
            ("DORMOUSE_DISK_DIR", "DORMOUSE_NVME_DIR"),
            ("DORMOUSE_DUMP_FOLDER", "DORMOUSE_DUMP"),
            (
                "DORMOUSE_BUDGET",
                "DORMOUSE_CPU_BUDGET_BYTES, DORMOUSE_CUDA_BUDGET_BYTES, \
                 DORMOUSE_HOST_BUDGET_BYTES or DORMOUSE_NVME_WRITE_BUDGET_BYTES",
            ),
        ] {
            assert_eq!(suggestion(slip).as_deref(), Some(meant), "{slip}");
        }
        for other in ["DORMOUSE_COLOUR_OF_THE_TEAPOT", "DORMOUSE_", "DORMOUSE_X"] {
            assert_eq!(suggestion(other), None, "{other}");
        }
    }

    /// The recursive definition.
    fn naive(a: &[u8], b: &[u8]) -> usize {
        match (a, b) {
            ([], rest) | (rest, []) => rest.len(),
            ([x, a_rest @ ..], [y, b_rest @ ..]) => (naive(a_rest, b_rest) + usize::from(x != y))
                .min(naive(a_rest, b) + 1)
                .min(naive(a, b_rest) + 1),
        }
    }

    proptest! {
        #[test]
        fn distance_agrees_with_its_definition(a in "[abc]{0,6}", b in "[abc]{0,6}") {
            prop_assert_eq!(distance(&a, &b), naive(a.as_bytes(), b.as_bytes()));
        }
    }
}
