//! Union, length and overlap of time spans.

/// A half-open range of time in nanoseconds.
pub(crate) type Span = (u64, u64);

/// Returns the union of `spans` as ordered disjoint spans.
pub(crate) fn merge(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut merged: Vec<Span> = Vec::with_capacity(spans.len());
    for (start, end) in spans {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}

/// Returns the total length of disjoint spans.
pub(crate) fn length_ns(spans: &[Span]) -> u64 {
    spans.iter().map(|(start, end)| end.saturating_sub(*start)).sum()
}

/// Returns the total overlap of two lists of ordered disjoint spans.
pub(crate) fn overlap_ns(left: &[Span], right: &[Span]) -> u64 {
    let (mut i, mut j, mut total_ns) = (0, 0, 0);
    while let (Some(a), Some(b)) = (left.get(i), right.get(j)) {
        total_ns += a.1.min(b.1).saturating_sub(a.0.max(b.0));
        if a.1 <= b.1 {
            i += 1;
        } else {
            j += 1;
        }
    }
    total_ns
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const END: u64 = 80;

    fn spans() -> impl Strategy<Value = Vec<Span>> {
        let span = (0..END, 0..20u64).prop_map(|(from, len)| (from, (from + len).min(END)));
        proptest::collection::vec(span, 0..20)
    }

    /// Whether each nanosecond is covered.
    fn covered(spans: &[Span]) -> Vec<bool> {
        (0..END).map(|ns| spans.iter().any(|(from, to)| (*from..*to).contains(&ns))).collect()
    }

    fn count(moments: &[bool]) -> u64 {
        moments.iter().filter(|covered| **covered).count() as u64
    }

    proptest! {
        #[test]
        fn union_and_overlap_agree_with_counting_moments(left in spans(), right in spans()) {
            let (in_left, in_right) = (covered(&left), covered(&right));
            let (left, right) = (merge(left), merge(right));
            prop_assert_eq!(covered(&left), in_left.clone());
            prop_assert!(left.windows(2).all(|pair| pair[0].1 < pair[1].0));
            prop_assert_eq!(length_ns(&left), count(&in_left));
            let both: Vec<bool> = in_left.iter().zip(&in_right).map(|(a, b)| *a && *b).collect();
            prop_assert_eq!(overlap_ns(&left, &right), count(&both));
        }
    }
}
