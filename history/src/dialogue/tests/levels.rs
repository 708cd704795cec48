//! The work of building levels.

use super::{DIMENSION, embedding};
use crate::dialogue::index::{Index, Row};
use crate::dialogue::vectors::{DOTS, normalise};

/// Returns the dot products that new levels of equal embeddings take.
fn dots_of(entries: u64) -> u64 {
    let mut own = embedding(1);
    normalise(&mut own);
    let mut index = Index::new(DIMENSION);
    for id in 0..entries {
        index.insert(Row { id, time_s: 0.0, embedding: &own });
    }
    let before = DOTS.get();
    assert_eq!(index.rebuilt().unwrap().len() as u64, entries);
    DOTS.get() - before
}

/// They are one category, which would have a summary for each 64 of them.
#[test]
fn levels_of_equal_embeddings_take_less_than_quadratic_time() {
    let (once, twice) = (dots_of(4096), dots_of(8192));
    assert!(twice < 3 * once, "{once} and {twice}");
}
