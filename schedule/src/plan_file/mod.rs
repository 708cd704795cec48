//! Plan files: the plan of one rank, which a trainer runs without planning again.
//!
//! Two lines of JSON. The first states the version of the second, its bytes and its CRC-32 (as of zlib):
//!
//! ```text
//! {"dormouse_plan": 1, "bytes": 5120, "crc32": "89abcdef"}
//! {"rank": 0, "ranks": 4, "sequences": [{"number": 5, "name": "a", "tokens": 90, "crc32": 7}, …], "options": …, "plan": …}
//! ```
//!
//! A file is refused unless length and checksum are right and its ops are those of some plan: they run
//! nodes depth first, and score labels within sequences. It does not hold token ids, of which it has checksums,
//! nor exchanges between ranks: the plan of a rank computes all that its sequences need.

mod check;
mod error;

use serde::{Deserialize, Serialize};

pub use error::PlanFileError;

use crate::tree_planner::{PlanOptions, Planned};
use crate::{NODES_MAX, Plan, TOKENS_MAX, check_range};

/// Version of plan files. Fields are only added within a version.
pub const PLAN_FILE_VERSION: u32 = 1;
/// Maximum bytes of the first line.
const HEAD_BYTES_MAX: usize = 256;
/// Maximum number of ranks.
const RANKS_MAX: u32 = 1 << 20;

/// The user's name of a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SequenceName {
    /// A number.
    Number(i64),
    /// A string.
    Text(String),
}

/// A sequence of a plan; its index is the number that ops use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSequence {
    /// Its number in the whole batch.
    pub number: u32,
    /// The user's name of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<SequenceName>,
    /// Its tokens.
    pub tokens: u64,
    /// CRC-32 of its token ids as little-endian 32-bit integers, if they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<u32>,
}

/// The plan of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanFile {
    /// The rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Its sequences.
    pub sequences: Vec<FileSequence>,
    /// Its plan, with no op completed.
    pub plan: Plan,
}

#[derive(Serialize, Deserialize)]
struct Head {
    dormouse_plan: u32,
    bytes: u64,
    crc32: String,
}

#[derive(Serialize, Deserialize)]
struct Body<S, P> {
    rank: u32,
    ranks: u32,
    sequences: S,
    options: PlanOptions,
    plan: P,
}

fn checksum(body: &str) -> String {
    format!("{:08x}", crc32fast::hash(body.as_bytes()))
}

impl PlanFile {
    /// Returns the text of the file.
    #[must_use]
    pub fn to_text(&self) -> String {
        let Self { rank, ranks, sequences, plan } = self;
        let (options, plan) = (*plan.options(), plan.planned());
        let body = Body { rank: *rank, ranks: *ranks, sequences, options, plan };
        // Structs with string keys always serialise.
        let body = serde_json::to_string(&body).unwrap_or_default();
        let bytes = body.len() as u64;
        let head = Head { dormouse_plan: PLAN_FILE_VERSION, bytes, crc32: checksum(&body) };
        let head = serde_json::to_string(&head).unwrap_or_default();
        format!("{head}\n{body}\n")
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// See [`PlanFileError`].
    pub fn parse(text: &str) -> Result<Self, PlanFileError> {
        let (head, body) = text
            .split_once('\n')
            .filter(|(head, _)| head.len() <= HEAD_BYTES_MAX)
            .ok_or(PlanFileError::Head)?;
        let head: Head = serde_json::from_str(head).map_err(|_| PlanFileError::Head)?;
        if head.dormouse_plan != PLAN_FILE_VERSION {
            return Err(PlanFileError::Version { seen: head.dormouse_plan });
        }
        let body = body.strip_suffix('\n').unwrap_or(body);
        if body.len() as u64 != head.bytes {
            let seen = body.len() as u64;
            return Err(PlanFileError::Length { seen, stated: head.bytes });
        }
        let seen = checksum(body);
        if seen != head.crc32 {
            return Err(PlanFileError::Checksum { seen, stated: head.crc32 });
        }
        let body: Body<Vec<FileSequence>, Planned> = serde_json::from_str(body)?;
        let Body { rank, ranks, sequences, options, plan } = body;
        check_range("ranks", ranks, 1, RANKS_MAX)?;
        check_range("rank", rank, 0, ranks - 1)?;
        check_range("sequences", sequences.len() as u64, 1, NODES_MAX as u64)?;
        for sequence in &sequences {
            check_range("tokens", sequence.tokens, 1, TOKENS_MAX)?;
        }
        options.model.check(options.last_layer_dead)?;
        check::check(&plan, &sequences)?;
        let plan = Plan::of_planned(options, sequences.len(), plan);
        Ok(Self { rank, ranks, sequences, plan })
    }
}
