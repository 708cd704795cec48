//! The words of a live page: pure encoding and decoding.

use super::{Figures, LiveError};
use crate::snapshot::Process;

/// Size of a live page, in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Version of the layout. It changes with the meaning, order or number of words.
pub const LAYOUT_VERSION: u32 = 2;

/// First word of a live page.
pub(super) const MAGIC: u64 = u64::from_ne_bytes(*b"dormouse");
/// Words before the slot of the figures.
pub(super) const HEADER_WORDS: usize = 8;
/// Words of [`Figures`].
pub(super) const FIGURE_WORDS: usize = size_of::<Figures>() / 8;
/// Words of the name of a process: 16 bytes, as Linux keeps it.
const NAME_WORDS: usize = 2;
/// The sequence of a slot whose update 0 is complete.
const UPDATE_0_COMPLETE: u64 = 2;

/// Returns the bytes of a page with its first figures.
pub(super) fn first_page(process: &Process, started_unix_ns: u64, figures: &Figures) -> Vec<u8> {
    let format = u64::from(LAYOUT_VERSION) | (PAGE_BYTES as u64) << 32;
    let [name_0, name_1] = name_words(&process.name);
    let (pid, rank) = (process.pid.into(), process.rank.into());
    let header = [MAGIC, format, pid, started_unix_ns, rank, name_0, name_1, 0];
    let words = header.into_iter().chain([UPDATE_0_COMPLETE]).chain(figures.words());
    let mut bytes: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
    bytes.resize(PAGE_BYTES, 0);
    bytes
}

/// Checks a header. Returns the process and the time of creation.
pub(super) fn check_header(words: [u64; HEADER_WORDS]) -> Result<(Process, u64), LiveError> {
    let [magic, format, pid, started_unix_ns, rank, name_0, name_1, _] = words;
    match (magic, format as u32, format >> 32) {
        (MAGIC, LAYOUT_VERSION, bytes) if bytes != PAGE_BYTES as u64 => Err(LiveError::Size(bytes)),
        (MAGIC, LAYOUT_VERSION, _) => {
            let name = name_of([name_0, name_1]);
            Ok((Process { pid: pid as u32, name, rank: rank as u32 }, started_unix_ns))
        }
        (MAGIC, version, _) => Err(LiveError::Version(version)),
        _ => Err(LiveError::Magic(magic)),
    }
}

/// Packs the first bytes of a name, cut at a character.
fn name_words(name: &str) -> [u64; NAME_WORDS] {
    let mut bytes = [0; 8 * NAME_WORDS];
    let kept = &name.as_bytes()[..name.floor_char_boundary(bytes.len())];
    bytes[..kept.len()].copy_from_slice(kept);
    let (words, _) = bytes.as_chunks();
    std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
}

fn name_of(words: [u64; NAME_WORDS]) -> String {
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
    let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

impl Figures {
    pub(super) fn words(&self) -> [u64; FIGURE_WORDS] {
        let rest = [self.asleep_bytes, self.cached_bytes, self.stall_ns, self.alloc_failures];
        let parts: [&[u64]; 7] = [
            &[self.updated_ns],
            &self.tier_used_bytes,
            &self.tier_peak_bytes,
            &self.tier_budget_bytes,
            &self.link_copied_bytes,
            &self.link_bytes_per_s,
            &rest,
        ];
        let mut words = [0; FIGURE_WORDS];
        words.iter_mut().zip(parts.into_iter().flatten()).for_each(|(to, from)| *to = *from);
        words
    }

    pub(super) fn from_words(words: [u64; FIGURE_WORDS]) -> Self {
        let mut words = words.into_iter();
        let mut next = |_: usize| words.next().unwrap_or(0);
        Self {
            updated_ns: next(0),
            tier_used_bytes: std::array::from_fn(&mut next),
            tier_peak_bytes: std::array::from_fn(&mut next),
            tier_budget_bytes: std::array::from_fn(&mut next),
            link_copied_bytes: std::array::from_fn(&mut next),
            link_bytes_per_s: std::array::from_fn(&mut next),
            asleep_bytes: next(0),
            cached_bytes: next(0),
            stall_ns: next(0),
            alloc_failures: next(0),
        }
    }
}
