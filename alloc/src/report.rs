//! The out-of-memory report.

use crate::Stats;
use crate::types::BlockInfo;
use dormouse_device::DeviceError;
use std::collections::BTreeMap;
use std::fmt;

/// Limit of the holders in a report.
pub const TOP_HOLDERS_MAX: usize = 4;

/// Cause of the failure of the last attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The budget would be exceeded.
    Budget,
    /// The device is full, within the budget.
    Device,
    /// No free address range is long enough.
    AddressSpace,
}

/// The live blocks of one tag and scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// What the runtime calls their owner; `None`: unknown to it.
    pub name: Option<String>,
    /// [`crate::Request::tag`].
    pub tag: u32,
    /// [`crate::Request::scope`].
    pub scope: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Awake bytes.
    pub awake_bytes: u64,
    /// Asleep bytes.
    pub asleep_bytes: u64,
}

/// Steps taken to free memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tried {
    /// Whether the request can never be met, so that no step was taken.
    pub impossible: bool,
    /// Bytes of pending blocks that became reusable.
    pub collected_bytes: u64,
    /// Bytes of cached pages that were unmapped.
    pub trimmed_bytes: u64,
    /// Calls of [`crate::Reclaim`].
    pub reclaim_rounds: u32,
    /// Bytes that these calls freed.
    pub reclaimed_bytes: u64,
    /// Bytes in flight after the last call.
    pub in_flight_bytes: u64,
    /// Waits for streams.
    pub stream_waits: u64,
}

/// The report of a failed request. Its text has at most 10 lines: an error has two more, for the device and a dump.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// Cause of the failure.
    pub cause: Cause,
    /// Requested bytes.
    pub asked_bytes: u64,
    /// Requested alignment.
    pub align_bytes: u64,
    /// What the runtime calls the owner that the block was for; `None`: none, or unknown to it.
    pub asked_for: Option<String>,
    /// What the program was doing; `None`: unknown.
    pub activity: Option<String>,
    /// The statistics at the time of the failure.
    pub stats: Stats,
    /// Cached bytes that are kept for the graphs of kept arenas.
    pub kept_bytes: u64,
    /// The largest free mapped range outside kept arenas.
    pub largest_cached_bytes: u64,
    /// The largest free address range.
    pub largest_bare_bytes: u64,
    /// The holders of the most awake bytes, largest first, at most [`TOP_HOLDERS_MAX`].
    pub holders: Vec<Holder>,
    /// Number of further holders.
    pub holders_left_out: usize,
    /// Steps taken.
    pub tried: Tried,
    /// The last error of the device, if any.
    pub device: Option<DeviceError>,
}

impl std::error::Error for OutOfMemory {}

impl OutOfMemory {
    /// Returns the bytes of awake blocks.
    #[must_use]
    pub const fn awake_bytes(&self) -> u64 {
        self.stats.active_bytes.current - self.stats.pending_bytes.current
    }
}

/// Displays bytes in KiB, MiB or GiB.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KIB: u64 = 1 << 10;
        const MIB: u64 = 1 << 20;
        const GIB: u64 = 1 << 30;
        let (unit, name) = match self.0 {
            0..MIB => (KIB, "KiB"),
            MIB..GIB => (MIB, "MiB"),
            _ => (GIB, "GiB"),
        };
        let tenths = u128::from(self.0) * 10 / u128::from(unit);
        write!(f, "{}.{} {name}", tenths / 10, tenths % 10)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tag, scope, blocks, awake_bytes, asleep_bytes, .. } = self;
        match (&self.name, tag, scope) {
            (Some(name), ..) => f.write_str(name)?,
            (None, 0, 0) => f.write_str("no tag and no layer")?,
            (None, ..) => write!(f, "tag {tag}, scope {scope:#x}")?,
        }
        let (awake, asleep) = (Size(*awake_bytes), Size(*asleep_bytes));
        write!(f, ": {awake} awake, {asleep} asleep in {blocks} blocks")
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.cause {
            Cause::Budget => "the budget would be exceeded",
            Cause::Device => "the device is full",
            Cause::AddressSpace => "no free address range is long enough",
        };
        let asked = self.asked_bytes;
        write!(f, "out of memory: {asked} bytes ({}) requested, ", Size(asked))?;
        writeln!(f, "aligned to {}: {why}", self.align_bytes)?;
        match (&self.asked_for, &self.activity) {
            (None, None) => {}
            (Some(owner), None) => writeln!(f, "  requested for {owner}")?,
            (None, Some(activity)) => writeln!(f, "  requested in {activity}")?,
            (Some(owner), Some(activity)) => {
                writeln!(f, "  requested for {owner}, in {activity}")?;
            }
        }
        let Stats { mapped_bytes, cached_bytes, staged_bytes, asleep_bytes, .. } = &self.stats;
        writeln!(
            f,
            "  budget {}; mapped {}: awake {}, cached {}, staged {}",
            Size(self.stats.budget_bytes),
            Size(mapped_bytes.current),
            Size(self.awake_bytes()),
            Size(cached_bytes.current),
            Size(staged_bytes.current),
        )?;
        write!(f, "  asleep {}", Size(asleep_bytes.current))?;
        if self.kept_bytes > 0 {
            write!(f, "; of the cached, {} kept for graphs", Size(self.kept_bytes))?;
        }
        match self.stats.pending_bytes.current {
            0 => {}
            bytes => write!(f, "; freed but in use by streams {}", Size(bytes))?,
        }
        writeln!(
            f,
            "; largest free range: {} with pages, {} of addresses",
            Size(self.largest_cached_bytes),
            Size(self.largest_bare_bytes),
        )?;
        for (at, holder) in self.holders.iter().enumerate() {
            let left_out = match self.holders_left_out {
                count if count > 0 && at + 1 == self.holders.len() => {
                    format!("; and {count} more holders")
                }
                _ => String::new(),
            };
            writeln!(f, "  held by {holder}{left_out}")?;
        }
        if let Some(error) = &self.device {
            writeln!(f, "  device error: {error}")?;
        }
        let Tried { trimmed_bytes, reclaim_rounds, reclaimed_bytes, in_flight_bytes, .. } =
            self.tried;
        if self.tried.impossible {
            return write!(
                f,
                "  tried: nothing; the request exceeds the budget or the address space"
            );
        }
        write!(
            f,
            "  tried: cache; trim ({}); reclaim, {reclaim_rounds} rounds ({} freed, {} in flight)",
            Size(trimmed_bytes),
            Size(reclaimed_bytes),
            Size(in_flight_bytes),
        )?;
        match (self.tried.stream_waits, self.tried.collected_bytes) {
            (0, 0) => Ok(()),
            (waits, bytes) => {
                write!(f, "; wait for streams, {waits} times ({} collected)", Size(bytes))
            }
        }
    }
}

/// Returns the sums of `blocks` by tag and scope, most awake bytes first.
pub(crate) fn holders(blocks: impl Iterator<Item = BlockInfo>) -> Vec<Holder> {
    let mut sums = BTreeMap::<(u32, u64), Holder>::new();
    for block in blocks {
        let (tag, scope) = (block.tag, block.scope);
        let none = Holder { name: None, tag, scope, blocks: 0, awake_bytes: 0, asleep_bytes: 0 };
        let sum = sums.entry((tag, scope)).or_insert(none);
        sum.blocks += 1;
        *(if block.asleep { &mut sum.asleep_bytes } else { &mut sum.awake_bytes }) +=
            block.range.bytes as u64;
    }
    let mut holders: Vec<Holder> = sums.into_values().collect();
    // Stable: equal ones keep the order of tag and scope.
    holders.sort_by_key(|it| std::cmp::Reverse((it.awake_bytes, it.asleep_bytes)));
    holders
}

#[cfg(test)]
mod tests {
    use super::Size;

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(Size(0).to_string(), "0.0 KiB");
        assert_eq!(Size((1 << 20) - 1).to_string(), "1023.9 KiB");
        assert_eq!(Size(3 << 19).to_string(), "1.5 MiB");
        assert_eq!(Size(u64::MAX).to_string(), "17179869183.9 GiB");
    }
}
