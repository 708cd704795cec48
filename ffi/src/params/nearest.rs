//! Suggests a known name for an unknown one.

use super::table::TABLE;

/// Returns the nearest known name, if it is near enough.
pub(crate) fn name(unknown: &str) -> Option<&'static str> {
    let near = TABLE.iter().map(|param| (distance(unknown, param.name()), param.name()));
    let (distance, name) = near.min_by_key(|(distance, _)| *distance)?;
    // Up to a third of the name: a missing unit suffix is six letters.
    (distance <= name.len() / 3).then_some(name)
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
            ("DORMOUSE_ALOC_BUDGET_BYTES", "DORMOUSE_ALLOC_BUDGET_BYTES"),
            ("DORMOUSE_ALLOC_BUDGET", "DORMOUSE_ALLOC_BUDGET_BYTES"),
            ("DORMOUSE_NVMEDIR", "DORMOUSE_NVME_DIR"),
            ("DORMOUSE_WINDOW_LAYERS", "DORMOUSE_OFFLOAD_WINDOW_LAYERS"),
        ] {
            assert_eq!(name(slip), Some(meant), "{slip}");
        }
        assert_eq!(name("DORMOUSE_COLOUR_OF_THE_TEAPOT"), None);
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
