//! Who says when layers sleep and wake.

use std::str::FromStr;

use dormouse_offload::{OffloadError, Prefix};
use dormouse_residency::plan::{ResidencyPlan, StepWork};

use crate::device::Paced;

/// What a prefix is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Policy {
    /// The plan.
    Planned,
    /// All sleep; while one layer's backward runs, one more than it reads is on its way.
    OneLayerAhead,
    /// All sleep; what a layer's backward reads comes when it begins.
    OnDemand,
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "planned" => Ok(Self::Planned),
            "one_layer_ahead" => Ok(Self::OneLayerAhead),
            "on_demand" => Ok(Self::OnDemand),
            _ => Err(format!("{name}; planned, one_layer_ahead and on_demand are accepted")),
        }
    }
}

impl Policy {
    /// Before phase A.
    pub(crate) fn prepare(
        self,
        prefix: &mut Prefix<Paced>,
        work: &StepWork,
        plan: &ResidencyPlan,
    ) -> Result<(), OffloadError> {
        match self {
            Self::Planned => prefix.follow(work.clone(), plan.clone(), 1)?,
            // A backward reads two layers: its own and the one below.
            Self::OneLayerAhead => prefix.set_window(2),
            Self::OnDemand => prefix.set_window(1),
        }
        Ok(())
    }

    /// Called before each microbatch; `after` is the number of microbatches after it. Without a plan this would
    /// start waking.
    pub(crate) fn microbatch(self, prefix: &mut Prefix<Paced>, after: u32) {
        if self == Self::Planned {
            prefix.microbatch(after);
        }
    }
}
