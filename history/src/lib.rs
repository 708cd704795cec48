//! Earlier responses of each prompt, and drafts of the next ones from them; earlier turns of dialogues ([`dialogue`]).
//!
//! A trainer that rolls out its prompts again in each epoch records the responses. A rollout engine then asks what
//! comes next in a response, and verifies the draft in one forward. The rule is that of RhymeRL's HistoSpec
//! (arXiv 2508.18588). Not a rollout engine: it runs no model and samples nothing.
//!
//! # Glossary
//! - *prompt*: named by the [`Digest`] of its ids; *response*: what was sampled for it in an *epoch*, with a *reward*.
//! - *context*: the tokens before a position, the nearest first; *match*: equal tokens at the end of a sequence and
//!   before a recorded position; *draft*: the tokens that follow most matches.
//! - *window*: the most tokens of a sequence's next draft ([`Window`]).
//! - *cold*: not in memory but in a file of the NVMe tier ([`Options::cold`]).
//!
//! # Invariants
//! - **I1** A draft has only tokens that followed the match, and each other, in a recorded response of the prompt.
//! - **I2** The match is the longest there is in any response that is kept, from 3 to 7 tokens.
//! - **I3** Prompts in memory take at most the budget between calls.
//! - **I4** Bytes from a disk are checked before anything is indexed with them.
//! - **I5** A file is replaced as a whole or not at all; a file that is refused changes nothing.
//!
//! ```text
//! record ─► Prompt: tokens, runs of positions sorted by context ─► longest match ─► votes ─► draft
//!               │ ▲                                                       (I2)        (I1)
//!        budget ▼ │ draft
//!          file of cold prompts                    save, load: one checked file in a locked directory
//! ```
#![forbid(unsafe_code)]

mod bytes;
mod cold;
pub mod dialogue;
mod digest;
mod dir;
mod draft;
mod error;
mod format;
mod history;
mod limits;
mod prompt;
mod replace;
mod save;
#[cfg(test)]
mod tests;
mod window;

pub use dialogue::{Dialogue, DialogueOptions};
pub use digest::Digest;
pub use dir::HistoryDir;
pub use draft::{Draft, Weighing};
pub use error::HistoryError;
pub use history::{History, HistoryStats, Options};
pub use limits::*;
pub use save::{FILE_NAME, FILE_VERSION};
pub use window::Window;
