//! Chains.

use super::{DIMENSION, options, record_one};
use crate::dialogue::Dialogue;

/// The direction at an angle in the plane of the first two axes.
fn at(degrees: f32) -> Vec<f32> {
    let mut own = vec![0.0; DIMENSION];
    (own[1], own[0]) = degrees.to_radians().sin_cos();
    own
}

#[test]
fn a_chain_goes_on_from_what_it_found() {
    let dialogue = Dialogue::new(options()).unwrap();
    let ids: Vec<u64> =
        [60.0, 85.0, 110.0, 170.0].iter().map(|it| record_one(&dialogue, &at(*it), 1.0)).collect();
    let direct = dialogue.retrieve(&at(0.0), 9.0, 7).unwrap();
    assert_eq!(direct.iter().filter(|it| it.relevance >= 0.4).count(), 1, "by itself it finds one");
    let chain = dialogue.chain(&at(0.0), 9.0, 5).unwrap();
    let found: Vec<u64> = chain.iter().map(|it| it.entry.id).collect();
    assert_eq!(found, ids[..3], "170 degrees are too far from the others");
    // From 0, from 30 between 0 and 60, and from 49.56, where the sum of 0, 60 and 85 degrees leads.
    for (own, degrees) in chain.iter().zip([60.0_f32, 55.0, 60.440_697]) {
        assert!((own.relevance - degrees.to_radians().cos()).abs() < 1e-5, "{own:?}");
        let wanted = 0.5 * own.relevance + 0.5 * (-8.0_f32 / 100.0).exp();
        assert!((own.weight - wanted).abs() < 1e-5, "{own:?}");
    }
    assert_eq!(dialogue.chain(&at(0.0), 9.0, 1).unwrap().len(), 1);
    assert!(dialogue.chain(&at(-10.0), 9.0, 5).unwrap().is_empty(), "0.34 is not near");
    assert!(dialogue.chain(&at(0.0), 9.0, 65).is_err());
}
