//! Arithmetic of embeddings.

/// Sums that a dot product keeps apart, so that the compiler uses vector registers.
const LANES: usize = 16;

#[cfg(test)]
thread_local! {
    /// Dot products that this thread took.
    pub(crate) static DOTS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns the dot product. Its order of additions depends on the length alone.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    #[cfg(test)]
    DOTS.set(DOTS.get() + 1);
    let (a_parts, a_rest) = a.as_chunks::<LANES>();
    let (b_parts, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_parts.iter().zip(b_parts) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// Scales to length 1. Zeros stay.
pub(crate) fn normalise(vector: &mut [f32]) {
    let length = vector.iter().map(|&it| f64::from(it).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        for it in vector {
            *it = (f64::from(*it) / length) as f32;
        }
    }
}
