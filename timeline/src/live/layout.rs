//! The words of a live page: pure encoding and decoding.

use super::{DumpFigures, Figures, LiveError, SETTINGS, SettingFigure, TagFigures};
use crate::snapshot::Process;

/// Size of a live page, in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Version of the layout. It changes with the meaning or order of words. New words come last: a reader of an earlier release
/// passes over them, and in a page of one they are 0.
pub const LAYOUT_VERSION: u32 = 3;
/// Maximum number of tags on a page.
pub const PAGE_TAGS_MAX: usize = 8;
/// Maximum length of a tag's name on a page, in bytes.
pub const TAG_NAME_BYTES_MAX: usize = 8 * TAG_NAME_WORDS;
/// Maximum length of a dump's reason on a page, in bytes.
pub const DUMP_REASON_BYTES_MAX: usize = 8 * REASON_WORDS;
/// Maximum length of a dump's path on a page, in bytes.
pub const DUMP_PATH_BYTES_MAX: usize = 8 * PATH_WORDS;

/// First word of a live page.
pub(super) const MAGIC: u64 = u64::from_ne_bytes(*b"dormouse");
/// Words before the slot of the figures.
pub(super) const HEADER_WORDS: usize = 8;
/// Words of the numbers of [`Figures`].
pub(super) const NUMBER_WORDS: usize = 23;
const TAG_NAME_WORDS: usize = 8;
/// Words of a tag: resident and asleep bytes, name.
pub(super) const TAG_WORDS: usize = 2 + TAG_NAME_WORDS;
const REASON_WORDS: usize = 2;
const PATH_WORDS: usize = 256;
/// Words of the last dump: time, reason, path.
const DUMP_WORDS: usize = 1 + REASON_WORDS + PATH_WORDS;
/// Words of the settings: their values, and a bit for each automatic one.
const SETTING_WORDS: usize = SETTINGS.len() + 1;
/// Words of [`Figures`].
pub(super) const FIGURE_WORDS: usize =
    NUMBER_WORDS + PAGE_TAGS_MAX * TAG_WORDS + DUMP_WORDS + SETTING_WORDS;
/// Words of the name of a process: 16 bytes, as Linux keeps it.
const NAME_WORDS: usize = 2;
/// The sequence of a slot whose update 0 is complete.
const UPDATE_0_COMPLETE: u64 = 2;

/// Returns the bytes of a page with its first figures.
pub(super) fn first_page(process: &Process, started_unix_ns: u64, figures: &Figures) -> Vec<u8> {
    let format = u64::from(LAYOUT_VERSION) | (PAGE_BYTES as u64) << 32;
    let [name_0, name_1] = text_words::<NAME_WORDS>(&process.name);
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
            let name = text_of(&[name_0, name_1]);
            Ok((Process { pid: pid as u32, name, rank: rank as u32 }, started_unix_ns))
        }
        (MAGIC, version, _) => Err(LiveError::Version(version)),
        _ => Err(LiveError::Magic(magic)),
    }
}

/// Packs the first bytes of a text, cut at a character.
fn text_words<const WORDS: usize>(text: &str) -> [u64; WORDS] {
    let mut bytes = vec![0; 8 * WORDS];
    let kept = &text.as_bytes()[..text.floor_char_boundary(bytes.len())];
    bytes[..kept.len()].copy_from_slice(kept);
    let (words, _) = bytes.as_chunks();
    std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
}

fn text_of(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().copied().flat_map(u64::to_ne_bytes).collect();
    let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

impl Figures {
    pub(super) fn words(&self) -> [u64; FIGURE_WORDS] {
        let mut words = [0; FIGURE_WORDS];
        let (numbers, rest) = words.split_at_mut(NUMBER_WORDS);
        let (tags, rest) = rest.split_at_mut(PAGE_TAGS_MAX * TAG_WORDS);
        let (dump, settings) = rest.split_at_mut(DUMP_WORDS);
        let last = [self.asleep_bytes, self.cached_bytes, self.stall_ns, self.alloc_failures];
        let parts: [&[u64]; 8] = [
            &[self.updated_ns],
            &self.tier_used_bytes,
            &self.tier_peak_bytes,
            &self.tier_budget_bytes,
            &self.link_copied_bytes,
            &self.link_bytes_per_s,
            &last,
            &[self.tag_count],
        ];
        numbers.iter_mut().zip(parts.into_iter().flatten()).for_each(|(to, from)| *to = *from);
        let (tags, _) = tags.as_chunks_mut::<TAG_WORDS>();
        for (words, tag) in tags.iter_mut().zip(&self.tags) {
            words[0] = tag.resident_bytes;
            words[1] = tag.asleep_bytes;
            words[2..].copy_from_slice(&text_words::<TAG_NAME_WORDS>(&tag.name));
        }
        if let Some(last) = &self.last_dump {
            let (reason, path) = dump[1..].split_at_mut(REASON_WORDS);
            reason.copy_from_slice(&text_words::<REASON_WORDS>(&last.reason));
            // The end names the file.
            let cut =
                last.path.ceil_char_boundary(last.path.len().saturating_sub(DUMP_PATH_BYTES_MAX));
            path.copy_from_slice(&text_words::<PATH_WORDS>(&last.path[cut..]));
            dump[0] = last.written_unix_ns;
        }
        for (at, setting) in self.settings.iter().enumerate() {
            settings[at] = setting.value;
            settings[SETTINGS.len()] |= u64::from(setting.is_automatic) << at;
        }
        words
    }

    pub(super) fn from_words(words: [u64; FIGURE_WORDS]) -> Self {
        let (numbers, rest) = words.split_at(NUMBER_WORDS);
        let (tags, rest) = rest.split_at(PAGE_TAGS_MAX * TAG_WORDS);
        let (dump, settings) = rest.split_at(DUMP_WORDS);
        let mut numbers = numbers.iter().copied();
        let mut next = |_: usize| numbers.next().unwrap_or(0);
        let tag = |words: &[u64; TAG_WORDS]| TagFigures {
            name: text_of(&words[2..]),
            resident_bytes: words[0],
            asleep_bytes: words[1],
        };
        let (reason, path) = dump[1..].split_at(REASON_WORDS);
        let last_dump =
            DumpFigures { written_unix_ns: dump[0], reason: text_of(reason), path: text_of(path) };
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
            tag_count: next(0),
            tags: tags.as_chunks().0.iter().map(tag).filter(|it| !it.name.is_empty()).collect(),
            last_dump: Some(last_dump).filter(|it| it.written_unix_ns != 0),
            settings: std::array::from_fn(|at| SettingFigure {
                value: settings[at],
                is_automatic: settings[SETTINGS.len()] >> at & 1 == 1,
            }),
        }
    }
}
