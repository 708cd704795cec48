//! Rates: counted, or fitted to measured steps.

use serde::Deserialize;

use super::{Query, QueryError};
use dormouse_schedule::cost::{Fit, Rates, Sample, Weighting};
use dormouse_schedule::{Machine, ModelShape};

#[derive(Deserialize)]
pub(super) struct Counted {
    model: ModelShape,
    machine: Machine,
}

impl Query for Counted {
    type Answer = Rates;

    fn answer(self) -> Result<Rates, QueryError> {
        Ok(Rates::counted(&self.model, &self.machine)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Fitted {
    samples: Vec<Sample>,
    #[serde(default)]
    weighting: Weighting,
}

impl Query for Fitted {
    type Answer = Fit;

    fn answer(self) -> Result<Fit, QueryError> {
        Ok(Fit::new(&self.samples, self.weighting)?)
    }
}
