//! The JSON form of a forest.

use serde::{Deserialize, Serialize};

use dormouse_schedule::PlanError;
use dormouse_schedule::forest::{Ending, Forest, NO_PARENT};

/// A forest by its nodes, depth first; see [`Forest::from_nodes_with`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trees {
    /// Each node's parent; `null` for a root.
    pub parents: Vec<Option<u32>>,
    /// Each node's tokens.
    pub lengths: Vec<u64>,
    /// Where each sequence ends; omitted or empty if each leaf ends one, in order.
    #[serde(default)]
    pub endings: Vec<Ending>,
}

impl Trees {
    /// Returns the forest as JSON, as requests take it.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Plain structs with string keys: serialising them cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl From<&Forest> for Trees {
    fn from(forest: &Forest) -> Self {
        let nodes = forest.nodes();
        Self {
            parents: nodes.iter().map(|node| node.parent.map(|parent| parent.0)).collect(),
            lengths: nodes.iter().map(|node| node.tokens.count()).collect(),
            endings: forest.endings().to_vec(),
        }
    }
}

impl TryFrom<Trees> for Forest {
    type Error = PlanError;

    fn try_from(trees: Trees) -> Result<Self, PlanError> {
        let Trees { parents, lengths, endings } = trees;
        let parents: Vec<u32> =
            parents.into_iter().map(|parent| parent.unwrap_or(NO_PARENT)).collect();
        if endings.is_empty() {
            Self::from_nodes(&parents, &lengths)
        } else {
            Self::from_nodes_with(&parents, &lengths, &endings)
        }
    }
}
