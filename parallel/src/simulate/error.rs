//! What a world refuses, and where it sticks.

use super::world::{Link, Tier};

/// Why there is no timeline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// Too many of something.
    #[error("{what}: {seen}; accepted: 0 to {most}")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many.
        seen: usize,
        /// Most accepted.
        most: usize,
    },
    /// A figure of the machine without which there is no time.
    #[error("{what} is not known; accepted: above 0")]
    Unknown {
        /// Which field.
        what: &'static str,
    },
    /// A step that uses a block which is not there, or makes one that is.
    #[error("rank {rank}, step {step}: block {block} {problem}")]
    Block {
        /// Which rank.
        rank: usize,
        /// Which step.
        step: usize,
        /// Which block.
        block: u32,
        /// What is wrong.
        problem: &'static str,
    },
    /// An exchange that is not sent once by one rank and received once by another.
    #[error("exchange {exchange} {problem}")]
    Exchange {
        /// Which exchange.
        exchange: u32,
        /// What is wrong.
        problem: &'static str,
    },
    /// A copy over a link whose rate is unknown.
    #[error("rank {rank} copies over its {link:?} link; accepted: a rate above 0 bytes per second")]
    Rate {
        /// Which rank.
        rank: usize,
        /// Which link.
        link: Link,
    },
    /// A block larger than a tier that it must be in.
    #[error("rank {rank}: block {block} has {seen} bytes; accepted: {most}, all of {tier:?}")]
    TooLarge {
        /// Which rank.
        rank: usize,
        /// Which block.
        block: u32,
        /// Its bytes.
        seen: u64,
        /// Which tier.
        tier: Tier,
        /// The tier's bytes.
        most: u64,
    },
    /// Nothing more can happen, and a rank is not done.
    #[error(
        "rank {rank} waits for {waits_for} before step {step} for ever: {device_bytes} bytes on the \
         device, {host_bytes} on the host"
    )]
    Stuck {
        /// The first such rank.
        rank: usize,
        /// Its step.
        step: usize,
        /// `exchanges`, `room` or `wakes`.
        waits_for: &'static str,
        /// What the device holds.
        device_bytes: u64,
        /// What the host holds.
        host_bytes: u64,
    },
}
