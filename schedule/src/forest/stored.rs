//! Deserialises forests and checks them.

use serde::Deserialize;

use super::{Ending, Forest, NO_PARENT, Node};
use crate::PlanError;

/// The fields of a [`Forest`], unchecked.
#[derive(Debug, Deserialize)]
pub(super) struct Stored {
    nodes: Vec<Node>,
    endings: Vec<Ending>,
}

impl TryFrom<Stored> for Forest {
    type Error = PlanError;

    fn try_from(stored: Stored) -> Result<Self, PlanError> {
        let Stored { nodes, endings } = stored;
        if nodes.is_empty() && endings.is_empty() {
            return Ok(Self::default());
        }
        let parents: Vec<u32> =
            nodes.iter().map(|node| node.parent.map_or(NO_PARENT, |parent| parent.0)).collect();
        let length = |node: &Node| node.tokens.end.saturating_sub(node.tokens.begin);
        let lengths: Vec<u64> = nodes.iter().map(length).collect();
        let forest = Self::from_nodes_with(&parents, &lengths, &endings)?;
        let differs = |(stored, found): (&Node, &Node)| stored != found;
        let Some(id) = nodes.iter().zip(&forest.nodes).position(differs) else {
            return Ok(forest);
        };
        let accepted = format!("{:?}", forest.nodes[id]);
        Err(PlanError::Count { what: "first inconsistent node", seen: id as u64, accepted })
    }
}
