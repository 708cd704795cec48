//! One case of the sweep: a line of words, and the work it stands for.

use std::collections::BTreeMap;
use std::error::Error;
use std::num::NonZeroU64;
use std::str::FromStr;

use dormouse_residency::LinkRates;
use dormouse_residency::plan::{DormantGroup, StepOperation, StepWork};

const KIB: u64 = 1 << 10;
const NS_PER_US: u64 = 1_000;
const BYTES_PER_S_OF_MB: u64 = 1_000_000;
/// Layers lie in blocks of about this, [`BLOCKS_MAX`] at most.
const BLOCK_BYTES: u64 = 2 << 20;
const BLOCKS_MAX: u64 = 4;
pub(crate) const PAGE_BYTES: u64 = 4 << 10;

/// Where dormant memory may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tiers {
    /// Pinned memory.
    Host,
    /// Pinned memory, and by way of it the file.
    Three,
    /// The file, straight.
    Direct,
}

impl FromStr for Tiers {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "host" => Ok(Self::Host),
            "three" => Ok(Self::Three),
            "direct" => Ok(Self::Direct),
            _ => Err(format!("{name}; host, three and direct are accepted")),
        }
    }
}

/// One case. What is given for layers is repeated over them, from the lowest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) tiers: Tiers,
    pub(crate) layer_bytes: Vec<u64>,
    forward_ns: Vec<u64>,
    backward_ns: Vec<u64>,
    pub(crate) microbatches: usize,
    microbatch_ns: u64,
    /// Device memory for layers and what microbatches use.
    pub(crate) cap_bytes: u64,
    /// Device memory that each microbatch uses.
    pub(crate) hot_bytes: u64,
    pub(crate) host_bytes: u64,
    pub(crate) out_bytes_per_s: NonZeroU64,
    pub(crate) in_bytes_per_s: NonZeroU64,
    pub(crate) write_bytes_per_s: NonZeroU64,
    pub(crate) read_bytes_per_s: NonZeroU64,
}

/// `name=value` words, each name once.
struct Words<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Result<Self, Box<dyn Error>> {
        let mut words = BTreeMap::new();
        for word in line.split_whitespace() {
            let (name, value) = word.split_once('=').ok_or(format!("{word}: no ="))?;
            if words.insert(name, value).is_some() {
                return Err(format!("{name} is given twice").into());
            }
        }
        Ok(Self(words))
    }

    fn take<T: FromStr<Err: Into<Box<dyn Error>>>>(
        &mut self,
        name: &str,
    ) -> Result<T, Box<dyn Error>> {
        let value = self.0.remove(name).ok_or(format!("{name} is missing"))?;
        value.parse().map_err(|e: T::Err| format!("{name} is {value}: {}", e.into()).into())
    }

    /// Numbers between colons, repeated over `count`, times `unit`.
    fn repeated(
        &mut self,
        name: &str,
        count: usize,
        unit: u64,
    ) -> Result<Vec<u64>, Box<dyn Error>> {
        let numbers: String = self.take(name)?;
        let numbers: Vec<u64> = numbers.split(':').map(str::parse).collect::<Result<_, _>>()?;
        Ok(numbers.iter().cycle().take(count).map(|number| number * unit).collect())
    }

    fn rate(&mut self, name: &str) -> Result<NonZeroU64, Box<dyn Error>> {
        let rate = self.take::<u64>(name)? * BYTES_PER_S_OF_MB;
        NonZeroU64::new(rate).ok_or_else(|| format!("{name} is 0; at least 1 is accepted").into())
    }
}

impl FromStr for Case {
    type Err = Box<dyn Error>;

    fn from_str(line: &str) -> Result<Self, Box<dyn Error>> {
        let mut words = Words::of(line)?;
        let layers = words.take("layers")?;
        let case = Self {
            tiers: words.take("tiers")?,
            layer_bytes: words.repeated("layer_kib", layers, KIB)?,
            forward_ns: words.repeated("forward_us", layers, NS_PER_US)?,
            backward_ns: words.repeated("backward_us", layers, NS_PER_US)?,
            microbatches: words.take("microbatches")?,
            microbatch_ns: words.take::<u64>("microbatch_us")? * NS_PER_US,
            cap_bytes: words.take::<u64>("cap_kib")? * KIB,
            hot_bytes: words.take::<u64>("hot_kib")? * KIB,
            host_bytes: words.take::<u64>("host_kib")? * KIB,
            out_bytes_per_s: words.rate("out_mb_s")?,
            in_bytes_per_s: words.rate("in_mb_s")?,
            write_bytes_per_s: words.rate("write_mb_s")?,
            read_bytes_per_s: words.rate("read_mb_s")?,
        };
        if let Some(name) = words.0.keys().next() {
            return Err(format!("{name} is not known").into());
        }
        case.check()?;
        Ok(case)
    }
}

impl Case {
    fn check(&self) -> Result<(), Box<dyn Error>> {
        let sizes = self.layer_bytes.iter().chain([&self.cap_bytes, &self.hot_bytes]);
        if let Some(bytes) = sizes.clone().find(|bytes| !bytes.is_multiple_of(PAGE_BYTES)) {
            return Err(format!("{bytes} bytes; whole pages of {PAGE_BYTES} are accepted").into());
        }
        if self.hot_bytes > self.cap_bytes {
            let (hot, cap) = (self.hot_bytes, self.cap_bytes);
            return Err(format!("microbatches use {hot} bytes of {cap}").into());
        }
        self.work().validate()?;
        Ok(())
    }

    pub(crate) fn layers(&self) -> usize {
        self.layer_bytes.len()
    }

    /// The step as planners see it: a prefix's rules of what may sleep when, and is needed when.
    pub(crate) fn work(&self) -> StepWork {
        let (layers, microbatches) = (self.layers(), self.microbatches);
        let top = layers.saturating_sub(1);
        let operation =
            |&compute_ns: &u64| StepOperation { compute_ns, room_bytes: self.cap_bytes };
        let microbatch = StepOperation {
            compute_ns: self.microbatch_ns,
            room_bytes: self.cap_bytes.saturating_sub(self.hot_bytes),
        };
        let forward = self.forward_ns.iter().map(operation);
        let backward = self.backward_ns.iter().rev().map(operation);
        let backward_of = |layer: usize| layers + microbatches + top - layer;
        let groups = self.layer_bytes.iter().enumerate().map(|(layer, &bytes)| DormantGroup {
            bytes,
            made: layer,
            // What a layer gives is the next one's input, in both directions.
            leaves: (layer + 1).min(top),
            needed: backward_of((layer + 1).min(top)),
            freed: backward_of(layer),
        });
        StepWork {
            operations: forward.chain(vec![microbatch; microbatches]).chain(backward).collect(),
            groups: groups.collect(),
            links: self.links(),
            host_bytes: if self.tiers == Tiers::Direct { 0 } else { self.host_bytes },
            nvme_bytes: self.file_bytes(),
            is_direct: self.tiers == Tiers::Direct,
        }
    }

    /// The same, where a layer's blocks need not go together: what the runtime may do.
    pub(crate) fn work_of_blocks(&self) -> StepWork {
        let work = self.work();
        let of_layer = |group: &DormantGroup| {
            let group = *group;
            blocks(group.bytes).into_iter().map(move |bytes| DormantGroup { bytes, ..group })
        };
        StepWork { groups: work.groups.iter().flat_map(of_layer).collect(), ..work }
    }

    fn links(&self) -> LinkRates {
        let given = |rate: NonZeroU64, is_there: bool| if is_there { rate.get() } else { 0 };
        let (has_host, has_file) = (self.tiers != Tiers::Direct, self.tiers != Tiers::Host);
        LinkRates {
            device_to_host_bytes_per_s: given(self.out_bytes_per_s, has_host),
            host_to_device_bytes_per_s: given(self.in_bytes_per_s, has_host),
            device_to_nvme_bytes_per_s: given(self.write_bytes_per_s, has_file),
            nvme_to_device_bytes_per_s: given(self.read_bytes_per_s, has_file),
        }
    }

    /// Room in the file for every layer, and for gaps between them; 0 where there is none.
    pub(crate) fn file_bytes(&self) -> u64 {
        if self.tiers == Tiers::Host { 0 } else { 2 * self.layer_bytes.iter().sum::<u64>() }
    }
}

/// The blocks that a layer's bytes lie in: whole pages.
pub(crate) fn blocks(layer_bytes: u64) -> Vec<u64> {
    let count = layer_bytes.div_ceil(BLOCK_BYTES).clamp(1, BLOCKS_MAX);
    let pages = layer_bytes / PAGE_BYTES;
    (0..count).map(|at| (pages * (at + 1) / count - pages * at / count) * PAGE_BYTES).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "tiers=three layers=3 layer_kib=4:8 forward_us=1 backward_us=2:3 microbatches=2 \
        microbatch_us=5 cap_kib=12 hot_kib=8 host_kib=4 out_mb_s=1 in_mb_s=2 write_mb_s=3 read_mb_s=4";

    fn with(word: &str, other: &str) -> Result<Case, String> {
        assert!(LINE.contains(word));
        LINE.replace(word, other).parse().map_err(|e: Box<dyn Error>| e.to_string())
    }

    #[test]
    fn a_line_stands_for_a_prefixes_step() {
        let work = LINE.parse::<Case>().unwrap().work();
        let op = |compute_ns, room_kib| StepOperation { compute_ns, room_bytes: room_kib * KIB };
        let (forward, microbatch) = (op(1_000, 12), op(5_000, 4));
        let backward = [op(2_000, 12), op(3_000, 12), op(2_000, 12)];
        assert_eq!(work.operations[..5], [forward, forward, forward, microbatch, microbatch]);
        assert_eq!(work.operations[5..], backward);
        let group = |kib, made, leaves, needed, freed| DormantGroup {
            bytes: kib * KIB,
            made,
            leaves,
            needed,
            freed,
        };
        // Layer 2 backward is operation 5.
        let groups = [group(4, 0, 1, 6, 7), group(8, 1, 2, 5, 6), group(4, 2, 2, 5, 5)];
        assert_eq!(work.groups, groups);
        assert_eq!((work.host_bytes, work.nvme_bytes, work.is_direct), (4 * KIB, 32 * KIB, false));
        assert_eq!(work.links.nvme_to_device_bytes_per_s, 4_000_000);
    }

    #[test]
    fn blocks_go_by_themselves() {
        let case = with("layer_kib=4:8", "layer_kib=4:4096").unwrap();
        let (work, finer) = (case.work(), case.work_of_blocks());
        assert_eq!(work.groups.len(), 3);
        let half = DormantGroup { bytes: 2 << 20, ..work.groups[1] };
        assert_eq!(finer.groups, [work.groups[0], half, half, work.groups[2]]);
        assert_eq!(StepWork { groups: work.groups.clone(), ..finer }, work);
    }

    #[test]
    fn tiers_that_are_not_there_have_no_links() {
        let host = with("tiers=three", "tiers=host").unwrap().work();
        assert_eq!(
            (host.links.device_to_nvme_bytes_per_s, host.links.nvme_to_device_bytes_per_s),
            (0, 0)
        );
        assert_eq!((host.links.device_to_host_bytes_per_s, host.nvme_bytes), (1_000_000, 0));
        let direct = with("tiers=three", "tiers=direct").unwrap().work();
        assert_eq!(
            (direct.links.device_to_host_bytes_per_s, direct.links.host_to_device_bytes_per_s),
            (0, 0)
        );
        assert_eq!((direct.host_bytes, direct.is_direct), (0, true));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let said = |word, other: &str| with(word, other).unwrap_err();
        assert_eq!(said("microbatches=2 ", ""), "microbatches is missing");
        assert_eq!(
            said("microbatches=2", "microbatches=2 microbatches=2"),
            "microbatches is given twice"
        );
        assert_eq!(said("microbatches=2", "microbatches=2 x=1"), "x is not known");
        assert_eq!(said("microbatches=2", "microbatches"), "microbatches: no =");
        assert_eq!(said("tiers=three", "tiers=two").split(';').next(), Some("tiers is two: two"));
        assert_eq!(said("in_mb_s=2", "in_mb_s=0"), "in_mb_s is 0; at least 1 is accepted");
        assert!(said("hot_kib=8", "hot_kib=16").contains("microbatches use 16384 bytes of 12288"));
        assert!(said("layer_kib=4:8", "layer_kib=5").contains("whole pages"));
    }

    #[test]
    fn blocks_add_up() {
        assert_eq!(blocks(4 << 10), [4 << 10]);
        assert_eq!(blocks(6 << 20), [2 << 20; 3]);
        assert_eq!(blocks(16 << 20), [4 << 20; 4]);
        assert_eq!(blocks((2 << 20) + (12 << 10)), [1028 << 10, 1032 << 10]);
    }
}
