//! Arithmetic of embeddings.

/// Sums that a dot product keeps apart, so that the compiler uses vector registers.
const LANES: usize = 16;

/// Returns the dot product. Its order of additions depends on the length alone.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
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

/// Returns the softmax of `query · W · embedding` over candidates, by which their texts are weighed. `query`: the
/// query's embedding times W, which is the caller's; the authors' code has none. `candidates`: embeddings, one after
/// the other, of passages and of entries alike. The weights sum to 1; there are none without candidates.
#[must_use]
pub fn attention(query: &[f32], candidates: &[f32]) -> Vec<f32> {
    let rows = candidates.chunks_exact(query.len().max(1));
    let scores: Vec<f64> = rows.map(|row| f64::from(dot(query, row))).collect();
    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| (power / sum) as f32).collect()
}
