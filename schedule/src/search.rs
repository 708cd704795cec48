//! Search by bisection.

/// Returns the smallest number in `low..=high` that is accepted, if all larger ones are; `high` counts as
/// accepted and is not tried.
pub fn bisect(mut low: u64, mut high: u64, accepts: impl Fn(u64) -> bool) -> u64 {
    while low < high {
        let middle = low.midpoint(high);
        if accepts(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}
