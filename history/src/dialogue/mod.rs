//! Earlier turns of dialogues, and what a turn may read of them (arXiv 2502.13847).
//!
//! # Glossary
//! - *entry*: a query, the passage that was retrieved for it, the response and a time, with the caller's *embedding*
//!   of the query.
//! - *relevance*: cosine of two queries' embeddings; *recency*: exp(−age / decay); *weight*:
//!   α · relevance + (1 − α) · recency.
//! - *summary*: entries whose embeddings are alike, with their mean direction; *category*: summaries that are alike.
//! - *chain*: entries of which each is the most relevant one to the queries before it.
//!
//! # Invariants
//! - **D1** Between calls there are at most `entries_max` entries: those of the greatest weight for the query that was
//!   last recorded when one was forgotten.
//! - **D2** What is retrieved has its exact weight. It is exactly the best if every entry is scanned.
//! - **D3** An entry that a call recorded is in the log before it is in memory; a log is read back to the same entries.
//! - **D4** A log that ends within its last record, or in zeros, is cut there. A log that is damaged elsewhere stays as
//!   it is. Records of one call are lost with the machine if its disk wrote a later one of them and not an earlier one:
//!   such a log is damaged.
//!
//! ```text
//! record ─► log (fdatasync) ─► entries ─► categories ─► summaries ─► embeddings
//!                                               retrieve: best categories, their best summaries, exact weights
//! ```

mod entry;
mod index;
mod kmeans;
mod log;
mod record;
mod shared;
mod state;
mod vectors;

pub use entry::{Entry, NewEntry};
pub use shared::{Dialogue, DialogueOptions, DialogueStats, Found};
#[cfg(test)]
mod tests;
