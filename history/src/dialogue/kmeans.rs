//! Clusters of directions: k-means by cosine, the same for the same embeddings.

use super::vectors::{dot, normalise};

/// Rounds of a clustering.
const ROUNDS: usize = 8;
/// Embeddings for each cluster that a clustering looks at. Of more, evenly spaced ones.
const SAMPLES_PER_CLUSTER: usize = 64;

/// Returns at most `count` directions, to one of which each of `rows` is near; at least one if there are rows.
pub(crate) fn cluster(rows: &[&[f32]], count: usize) -> Vec<Vec<f32>> {
    let count = count.clamp(1, rows.len().max(1));
    let samples = spread(rows, count * SAMPLES_PER_CLUSTER);
    let mut centroids: Vec<Vec<f32>> =
        spread(&samples, count).iter().map(|row| row.to_vec()).collect();
    for _ in 0..ROUNDS {
        let nearest: Vec<(usize, f32)> =
            samples.iter().map(|row| nearest(row, centroids.iter().map(Vec::as_slice))).collect();
        let mut sums =
            vec![vec![0.0_f32; rows.first().map_or(0, |row| row.len())]; centroids.len()];
        let mut members = vec![0_usize; centroids.len()];
        for (row, &(cluster, _)) in samples.iter().zip(&nearest) {
            members[cluster] += 1;
            sums[cluster].iter_mut().zip(*row).for_each(|(sum, it)| *sum += it);
        }
        // A cluster that lost all of its members begins again where the others fit least.
        let mut worst: Vec<usize> = (0..samples.len()).collect();
        worst.sort_by(|&a, &b| nearest[b].1.total_cmp(&nearest[a].1));
        for (sum, _) in sums.iter_mut().zip(&members).filter(|(_, members)| **members == 0) {
            if let Some(at) = worst.pop() {
                sum.copy_from_slice(samples[at]);
            }
        }
        sums.iter_mut().for_each(|sum| normalise(sum));
        if sums == centroids {
            break;
        }
        centroids = sums;
    }
    centroids
}

/// Returns the index of the direction that is nearest to a row, and its cosine. The first of equal ones.
pub(crate) fn nearest<'a>(
    row: &[f32],
    directions: impl Iterator<Item = &'a [f32]>,
) -> (usize, f32) {
    directions
        .map(|it| dot(row, it))
        .enumerate()
        .fold((0, f32::NEG_INFINITY), |best, it| if it.1 > best.1 { it } else { best })
}

/// Returns at most `count` of `rows`, evenly spaced.
fn spread<'a>(rows: &[&'a [f32]], count: usize) -> Vec<&'a [f32]> {
    let count = count.min(rows.len());
    (0..count).map(|it| rows[it * rows.len() / count]).collect()
}
