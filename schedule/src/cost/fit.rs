//! Fits rates to measured steps.

use serde::{Deserialize, Serialize};

use super::error::{CostError, SAMPLES_MAX, SECONDS_MAX, SECONDS_MIN};
use super::features::{FEATURES, Features};
use super::nnls::{Standing, nnls};
use super::rates::Rates;

/// Version of the JSON form. Fields are only added within a version.
pub const FIT_VERSION: u32 = 1;

/// A measured step or part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Its features.
    pub features: Features,
    /// Its duration in seconds.
    pub seconds: f64,
}

/// The error that a fit minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Weighting {
    /// The sum of squared errors in seconds: long steps count most.
    #[default]
    Absolute,
    /// The sum of squared relative errors: all steps count equally.
    Relative,
}

/// Rates fitted to measured steps, and their errors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// [`FIT_VERSION`].
    pub version: u32,
    /// Seconds per feature.
    pub rates: Rates,
    /// Reliability of each rate, in the order of [`super::FEATURE_NAMES`].
    pub standing: [Standing; FEATURES],
    /// The error that was minimised.
    pub weighting: Weighting,
    /// Number of steps.
    pub samples: u64,
    /// Median over the steps of |predicted − measured| / measured; the upper one of an even number.
    pub median_relative_error: f64,
    /// The largest relative error.
    pub worst_relative_error: f64,
}

impl Fit {
    /// Fits all rates by non-negative least squares. With fewer steps than features, or features that vary
    /// together, the result is one of the best fits, and `standing` marks the undetermined rates. Operations
    /// have a fixed order: equal samples give equal bits. Ranks with different measurements must share one fit.
    ///
    /// # Errors
    /// `SampleCount`, `Seconds`, `NothingCounted`, and `Unsettled` if rounding prevents convergence.
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
            standing: std::array::from_fn(|i| standing[i]),
            weighting,
            samples: samples.len() as u64,
            median_relative_error,
            worst_relative_error,
        })
    }
}

/// Returns the median and the largest relative error.
fn errors(rates: &Rates, samples: &[Sample]) -> (f64, f64) {
    let error = |s: &Sample| (rates.seconds(&s.features) - s.seconds).abs() / s.seconds;
    let mut errors: Vec<f64> = samples.iter().map(error).collect();
    errors.sort_by(f64::total_cmp);
    (errors[errors.len() / 2], errors[errors.len() - 1])
}
