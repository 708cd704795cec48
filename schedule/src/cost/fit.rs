//! Seconds of each feature, from measured steps.

use serde::{Deserialize, Serialize};

use super::CostError;
use super::features::Features;
use super::nnls::{Column, nnls};
use super::order::FEATURES;
use super::rates::Rates;

/// Most measured steps of one fit.
pub const SAMPLES_MAX: usize = 1 << 20;
/// Least seconds of a measured step: below, no clock tells.
pub const SECONDS_MIN: f64 = 1e-12;
/// Most seconds of a measured step.
pub const SECONDS_MAX: f64 = 1e12;
/// Version of the JSON form. Fields are only added within a version.
pub const FIT_VERSION: u32 = 1;

/// One measured step, or part of a step: what it held and what it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// What it held.
    pub features: Features,
    /// What it took, seconds.
    pub seconds: f64,
}

/// Which error a fit makes small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weighting {
    /// The sum of squared seconds of error: long steps count most.
    #[default]
    Absolute,
    /// The sum of squared relative errors: every step counts alike.
    Relative,
}

/// What a fit says of one feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Standing {
    /// Its rate is above 0.
    Positive,
    /// Its rate is 0: any more would fit worse.
    Zero,
    /// Its rate is 0 because no step had any of it: nothing is known.
    Absent,
    /// Its rate is 0 because those of other features say as much; with steps that vary it apart
    /// from them, it would have one.
    Dependent,
}

/// Rates fitted to measured steps, and how well they fit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// [`FIT_VERSION`].
    pub version: u32,
    /// Seconds of one of each feature.
    pub rates: Rates,
    /// What is known of each rate, in the order of [`super::FEATURE_NAMES`].
    pub standing: [Standing; FEATURES],
    /// Which error was made small.
    pub weighting: Weighting,
    /// Steps fitted to.
    pub samples: u64,
    /// Median over the steps of |predicted − measured| ÷ measured; of an even number, the upper.
    pub median_relative_error: f64,
    /// The largest of them.
    pub worst_relative_error: f64,
}

impl Fit {
    /// Non-negative least squares over all features. Fewer steps than features, or features that
    /// vary together, give one of the best fits, and `standing` says which rates to doubt.
    /// Only sums, products, quotients and square roots in a fixed order: equal samples give equal
    /// bits everywhere. Ranks that measured for themselves let one fit and send its rates.
    ///
    /// # Errors
    /// `SampleCount`, `Seconds`, `NothingCounted`, and `Unsettled` where rounding wins.
    pub fn new(samples: &[Sample], weighting: Weighting) -> Result<Self, CostError> {
        if samples.is_empty() || samples.len() > SAMPLES_MAX {
            return Err(CostError::SampleCount { seen: samples.len() });
        }
        let accepted = SECONDS_MIN..=SECONDS_MAX;
        if let Some(index) = samples.iter().position(|s| !accepted.contains(&s.seconds)) {
            return Err(CostError::Seconds { index, seen: samples[index].seconds });
        }
        let weight = |sample: &Sample| match weighting {
            Weighting::Absolute => 1.0,
            Weighting::Relative => 1.0 / sample.seconds,
        };
        let column = |feature: usize| {
            samples.iter().map(|s| s.features.to_array()[feature] as f64 * weight(s)).collect()
        };
        let columns: Vec<Vec<f64>> = (0..FEATURES).map(column).collect();
        if columns.iter().flatten().all(|n| *n == 0.0) {
            return Err(CostError::NothingCounted { samples: samples.len() });
        }
        let target: Vec<f64> = samples.iter().map(|s| s.seconds * weight(s)).collect();
        let (rates, standing) = nnls(&columns, &target)?;
        let rates = Rates::from_array(std::array::from_fn(|i| rates[i]));
        let (median_relative_error, worst_relative_error) = errors(&rates, samples);
        Ok(Self {
            version: FIT_VERSION,
            rates,
            standing: std::array::from_fn(|i| standing[i].into()),
            weighting,
            samples: samples.len() as u64,
            median_relative_error,
            worst_relative_error,
        })
    }
}

/// Median and largest relative error.
fn errors(rates: &Rates, samples: &[Sample]) -> (f64, f64) {
    let error = |s: &Sample| (rates.seconds(&s.features) - s.seconds).abs() / s.seconds;
    let mut errors: Vec<f64> = samples.iter().map(error).collect();
    errors.sort_by(f64::total_cmp);
    (errors[errors.len() / 2], errors[errors.len() - 1])
}

impl From<Column> for Standing {
    fn from(column: Column) -> Self {
        match column {
            Column::Positive => Self::Positive,
            Column::Zero => Self::Zero,
            Column::Absent => Self::Absent,
            Column::Dependent => Self::Dependent,
        }
    }
}
