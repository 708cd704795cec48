//! The one order of features, wherever they stand in a row: counts, rates, a fit's matrix.

use super::{Features, Rates};

/// `of`, a struct with a field for each feature, as an array in their order and back.
macro_rules! arrays {
    ($of:ty, $number:ty, [$($name:ident),*]) => {
        impl $of {
            /// In the order of [`FEATURE_NAMES`].
            #[must_use]
            pub const fn to_array(self) -> [$number; FEATURES] {
                [$(self.$name),*]
            }

            /// From the order of [`FEATURE_NAMES`].
            #[must_use]
            pub const fn from_array([$($name),*]: [$number; FEATURES]) -> Self {
                Self { $($name),* }
            }
        }
    };
}

macro_rules! in_order {
    ($($name:ident),* $(,)?) => {
        /// Names of the features, in the order of [`Features::to_array`].
        pub const FEATURE_NAMES: [&str; FEATURES] = [$(stringify!($name)),*];

        arrays!(Features, u64, [$($name),*]);
        arrays!(Rates, f64, [$($name),*]);
    };
}

/// How many features there are.
pub const FEATURES: usize = 9;

in_order!(
    steps,
    nodes,
    leaves,
    microbatches,
    rows,
    forward_only_rows,
    prefix_pairs,
    causal_pairs,
    logit_rows,
);
