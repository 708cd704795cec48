//! The log: read back, cut at every byte, damaged at every bit, failing and written anew.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;

use super::{DIMENSION, embedding, options, record_one};
use crate::HistoryError;
use crate::dialogue::log::{LOG_NAME, Log, Storage};
use crate::dialogue::record::{HEAD_BYTES, decode, encode_entry, encode_header};
use crate::dialogue::{Dialogue, DialogueOptions, Entry, NewEntry};
use crate::limits::ENTRY_IDS_MAX;
use crate::tests::Dir;

fn open(dir: &Path) -> Result<Dialogue, HistoryError> {
    Dialogue::open(options(), dir)
}

fn path(dir: &Dir) -> PathBuf {
    dir.0.join(LOG_NAME)
}

fn entries(dialogue: &Dialogue) -> Vec<Arc<Entry>> {
    (0..100).filter_map(|id| dialogue.entry(id)).collect()
}

/// A log of four entries, its bytes, and where each entry's record ends.
fn filled(dir: &Dir) -> (Vec<u8>, Vec<usize>) {
    let dialogue = open(&dir.0).unwrap();
    let mut ends = vec![dialogue.stats().log_bytes as usize];
    for number in 0..4 {
        record_one(&dialogue, &embedding(number), number as f64);
        ends.push(dialogue.stats().log_bytes as usize);
    }
    drop(dialogue);
    let bytes = fs::read(path(dir)).unwrap();
    assert_eq!(ends.last(), Some(&bytes.len()));
    (bytes, ends)
}

#[test]
fn a_log_is_read_back_to_the_same() {
    let dir = Dir::new();
    let dialogue = open(&dir.0).unwrap();
    let long = vec![7; 1 << 20];
    for number in 0..5 {
        record_one(&dialogue, &embedding(number), -(number as f64));
    }
    let own = embedding(9);
    let new =
        NewEntry { embedding: &own, query: &long, passage: &long, response: &long, time_s: 1e9 };
    dialogue.record(&[new, NewEntry { query: b"", ..new }]).unwrap();
    let said = open(&dir.0).unwrap_err().to_string();
    assert!(said.contains("is in use by process"), "{said}");
    let (before, found) = (entries(&dialogue), dialogue.retrieve(&own, 1e9, 9).unwrap());
    drop(dialogue);
    let dialogue = open(&dir.0).unwrap();
    assert_eq!(dialogue.torn(), None);
    assert_eq!((entries(&dialogue), dialogue.retrieve(&own, 1e9, 9).unwrap()), (before, found));
    assert_eq!(record_one(&dialogue, &own, 0.0), 7, "ids go on");
}

#[test]
fn a_log_cut_at_any_byte_of_its_last_record_loses_that_one_alone() {
    let dir = Dir::new();
    let (bytes, ends) = filled(&dir);
    let whole = entries(&open(&dir.0).unwrap());
    for cut in ends[3]..bytes.len() {
        fs::write(path(&dir), &bytes[..cut]).unwrap();
        let dialogue = open(&dir.0).unwrap();
        assert_eq!(entries(&dialogue), whole[..3]);
        assert_eq!(dialogue.torn().is_some(), cut > ends[3], "{cut}");
        if let Some(torn) = dialogue.torn() {
            assert!(torn.contains(&format!("byte {}", ends[3])), "{torn}");
        }
        // What comes next is behind the last sound record, and found again.
        let id = record_one(&dialogue, &embedding(50), 50.0);
        drop(dialogue);
        let dialogue = open(&dir.0).unwrap();
        assert_eq!((dialogue.torn(), entries(&dialogue).len()), (None, 4));
        assert_eq!(dialogue.entry(id).unwrap().time_s, 50.0);
    }
}

#[test]
fn damage_before_the_last_record_is_refused_and_changes_nothing() {
    let dir = Dir::new();
    let (bytes, ends) = filled(&dir);
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(path(&dir), &damaged).unwrap();
        match open(&dir.0) {
            Ok(dialogue) => {
                assert!(at >= ends[3], "byte {at} was damaged unseen");
                assert!(dialogue.torn().is_some());
                assert_eq!(entries(&dialogue).len(), 3);
            }
            Err(refused) => {
                assert!(at < ends[3], "byte {at}: {refused}");
                assert!(matches!(refused, HistoryError::Damaged { .. }), "{refused}");
                assert_eq!(fs::read(path(&dir)).unwrap(), damaged);
            }
        }
    }
}

#[test]
fn a_tail_of_zeros_is_torn_and_another_log_is_refused() {
    let dir = Dir::new();
    let (bytes, ends) = filled(&dir);
    // Less than a record may be, and more.
    for zeros in [5000, 5 << 20] {
        fs::write(path(&dir), [&bytes[..ends[3]], &vec![0; zeros]].concat()).unwrap();
        assert_eq!(entries(&open(&dir.0).unwrap()).len(), 3);
    }
    fs::write(path(&dir), &bytes).unwrap();
    let other = DialogueOptions { dimension: 20, ..options() };
    let said = Dialogue::open(other, &dir.0).unwrap_err().to_string();
    assert!(said.contains("its embeddings have 19 numbers, and this dialogue's 20"), "{said}");
    let mut newer = bytes;
    newer[8] = 2;
    fs::write(path(&dir), newer).unwrap();
    assert!(open(&dir.0).unwrap_err().to_string().contains("its version is 2"));
}

#[test]
fn a_log_of_forgotten_entries_is_written_anew() {
    let dir = Dir::new();
    let small = DialogueOptions { entries_max: 3, synced: false, ..options() };
    let dialogue = Dialogue::open(small.clone(), &dir.0).unwrap();
    let text = vec![1; 100_000];
    let (mut longest, mut shortened) = (0, 0);
    for number in 0..60 {
        let own = embedding(number);
        let time_s = number as f64;
        let new = NewEntry { embedding: &own, query: b"", passage: &text, response: b"", time_s };
        dialogue.record(&[new]).unwrap();
        let bytes = dialogue.stats().log_bytes;
        assert_eq!(bytes, fs::metadata(path(&dir)).unwrap().len());
        shortened += u32::from(bytes < longest);
        longest = longest.max(bytes);
    }
    assert!(shortened >= 2 && longest < 2_000_000, "{shortened} {longest}");
    let before: Vec<_> = (0..60).filter_map(|id| dialogue.entry(id)).collect();
    assert_eq!(before.len(), 3);
    drop(dialogue);
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 2, "the log and the lock");
    let dialogue = Dialogue::open(small, &dir.0).unwrap();
    let after: Vec<_> = (0..61).filter_map(|id| dialogue.entry(id)).collect();
    assert_eq!(after, before);
    assert_eq!(record_one(&dialogue, &embedding(1), 0.0), 60, "ids of forgotten ones stay theirs");
}

#[test]
fn fewer_are_kept_of_a_log_that_has_more() {
    let dir = Dir::new();
    filled(&dir);
    let one = DialogueOptions { entries_max: 1, ..options() };
    let dialogue = Dialogue::open(one, &dir.0).unwrap();
    let ids: Vec<u64> = entries(&dialogue).iter().map(|it| it.id).collect();
    assert_eq!(ids, [3], "the last query is the most like itself");
    drop(dialogue);
    assert_eq!(entries(&open(&dir.0).unwrap()).len(), 4, "the log still has them");

    // With the next record it has them no more: memory and log are the same.
    let two = DialogueOptions { entries_max: 2, ..options() };
    let dialogue = Dialogue::open(two.clone(), &dir.0).unwrap();
    record_one(&dialogue, &embedding(0), 4.0);
    let kept = entries(&dialogue);
    assert_eq!(kept.len(), 2);
    drop(dialogue);
    assert_eq!(entries(&open(&dir.0).unwrap()), kept);
}

#[test]
fn a_log_that_cannot_be_written_anew_stays_the_log() {
    let dir = Dir::new();
    let small = DialogueOptions { entries_max: 2, synced: false, ..options() };
    let dialogue = Dialogue::open(small.clone(), &dir.0).unwrap();
    // In the place of the file that is written aside.
    let aside = dir.0.join(format!(".{LOG_NAME}.new"));
    fs::create_dir(&aside).unwrap();
    let text = vec![1; 500_000];
    for number in 0..12 {
        let own = embedding(number);
        let time_s = number as f64;
        let new = NewEntry { embedding: &own, query: b"", passage: &text, response: b"", time_s };
        dialogue.record(&[new]).unwrap();
    }
    assert!(dialogue.stats().log_bytes > 6_000_000);
    let kept = entries(&dialogue);
    fs::remove_dir(&aside).unwrap();
    drop(dialogue);
    let dialogue = Dialogue::open(small, &dir.0).unwrap();
    assert_eq!((entries(&dialogue), dialogue.torn()), (kept, None));
}

#[test]
fn a_link_that_leads_nowhere_is_no_new_log() {
    let dir = Dir::new();
    std::os::unix::fs::symlink(dir.0.join("unmounted"), path(&dir)).unwrap();
    let said = open(&dir.0).unwrap_err().to_string();
    assert!(said.contains("reading: No such file"), "{said}");
    assert!(path(&dir).is_symlink());
}

#[test]
fn a_call_of_several_entries_is_cut_at_any_byte() {
    let dir = Dir::new();
    let dialogue = open(&dir.0).unwrap();
    record_one(&dialogue, &embedding(0), 0.0);
    let whole = dialogue.stats().log_bytes as usize;
    let own = embedding(1);
    let new = NewEntry { embedding: &own, query: b"q", passage: b"", response: b"r", time_s: 1.0 };
    dialogue.record(&[new; 5]).unwrap();
    drop(dialogue);
    let bytes = fs::read(path(&dir)).unwrap();
    let one = (bytes.len() - whole) / 5;
    for cut in whole..=bytes.len() {
        // Alone, and with places behind it that were not written: to the log's length, or more than a record may have.
        let longest = if cut - whole < HEAD_BYTES { 5 << 20 } else { 0 };
        for zeros in [0, bytes.len() - cut, longest] {
            let contents = decode(&[&bytes[..cut], &vec![0; zeros]].concat(), DIMENSION).unwrap();
            // The last bytes of a record may be zeros themselves.
            let equal = bytes[cut..].iter().take(zeros).take_while(|it| **it == 0).count();
            let records = (cut + equal - whole) / one;
            assert_eq!(contents.entries.len(), 1 + records, "{cut} {zeros}");
            let is_torn = whole + records * one < cut + zeros;
            assert_eq!(contents.torn.is_some(), is_torn, "{cut} {zeros}");
        }
    }
}

#[test]
fn ids_that_would_run_out_are_refused() {
    let dir = Dir::new();
    let made = |next_id| {
        fs::write(path(&dir), encode_header(DIMENSION, next_id)).unwrap();
        open(&dir.0)
    };
    for next_id in [ENTRY_IDS_MAX + 1, u64::MAX] {
        let refused = made(next_id).unwrap_err();
        assert!(matches!(refused, HistoryError::Damaged { .. }), "{refused}");
    }
    let entry =
        |id| Entry { id, query: [].into(), passage: [].into(), response: [].into(), time_s: 0.0 };
    let mut bytes = encode_header(DIMENSION, 0);
    encode_entry(&entry(ENTRY_IDS_MAX), &[0.0; DIMENSION], &mut bytes);
    assert!(decode(&bytes, DIMENSION).unwrap_err().contains("entry 9223372036854775808"));

    let dialogue = made(ENTRY_IDS_MAX - 1).unwrap();
    let own = embedding(1);
    let new = NewEntry { embedding: &own, query: b"", passage: b"", response: b"", time_s: 0.0 };
    assert!(matches!(dialogue.record(&[new; 2]), Err(HistoryError::Limit { .. })));
    assert_eq!(dialogue.record(&[new]).unwrap(), ENTRY_IDS_MAX - 1);
    drop(dialogue);
    let dialogue = open(&dir.0).unwrap();
    assert!(matches!(dialogue.record(&[new]), Err(HistoryError::Limit { .. })));
    assert_eq!(dialogue.stats().entries, 1);
}

/// Bytes in memory, the last of which are not written once there is no room.
#[derive(Clone, Debug, Default)]
struct Disk {
    bytes: Arc<Mutex<Vec<u8>>>,
    room: Arc<Mutex<usize>>,
    cuts_fail: bool,
}

impl Storage for Disk {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (mut own, room) = (self.bytes.lock(), *self.room.lock());
        let left = room.saturating_sub(own.len()).min(bytes.len());
        own.extend_from_slice(&bytes[..left]);
        if left < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        if self.cuts_fail {
            return Err(io::ErrorKind::Other.into());
        }
        self.bytes.lock().truncate(bytes as usize);
        Ok(())
    }
}

#[test]
fn a_full_disk_keeps_what_was_recorded() {
    let dir = Dir::new();
    let (bytes, ends) = filled(&dir);
    let disk = Disk::default();
    *disk.bytes.lock() = bytes[..ends[0]].to_vec();
    *disk.room.lock() = ends[2] + 10;
    let log = Log::over(Box::new(disk.clone()), "disk".into(), ends[0] as u64);
    let dialogue = Dialogue::over(options(), Some(log));
    record_one(&dialogue, &embedding(0), 0.0);
    record_one(&dialogue, &embedding(1), 1.0);
    let own = embedding(2);
    let new =
        NewEntry { embedding: &own, query: b"2", passage: b"passage", response: b"", time_s: 2.0 };
    let said = dialogue.record(&[new]).unwrap_err().to_string();
    assert!(said.contains("disk: recording: "), "{said}");
    assert_eq!((dialogue.stats().entries, disk.bytes.lock().len()), (2, ends[2]));
    *disk.room.lock() = usize::MAX;
    assert_eq!(dialogue.record(&[new]).unwrap(), 2);
    assert_eq!(*disk.bytes.lock(), bytes[..ends[3]]);

    // Behind part of a record nothing is recorded: it would be lost with it.
    let disk = Disk { cuts_fail: true, ..disk };
    *disk.room.lock() = ends[3] + 10;
    let log = Log::over(Box::new(disk.clone()), "disk".into(), ends[3] as u64);
    let dialogue = Dialogue::over(options(), Some(log));
    assert!(dialogue.record(&[new]).is_err());
    *disk.room.lock() = usize::MAX;
    let said = dialogue.record(&[new]).unwrap_err().to_string();
    assert!(said.contains("it could not be cut"), "{said}");
    let contents = decode(&disk.bytes.lock(), DIMENSION).unwrap();
    assert_eq!((contents.entries.len(), contents.torn.is_some()), (3, true));
}

proptest! {
    /// With right checksums too: whoever writes such bytes meets checks, not a panic.
    #[test]
    fn logs_of_any_bytes_are_refused_or_sound(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let _ = decode(&bytes, DIMENSION);
        let head = crate::dialogue::record::encode_header(2, 5);
        let mut own = bytes.clone();
        own.resize(40, 0);
        for (at, value) in flips {
            let at = at.index(own.len());
            own[at] = value;
        }
        for kind in [1_u32, 2, 3] {
            let mut record = [(own.len() as u32).to_le_bytes(), kind.to_le_bytes()].concat();
            record.extend(crc32c::crc32c(&record).to_le_bytes());
            record.extend(&own);
            record.extend(crc32c::crc32c(&own).to_le_bytes());
            let _ = decode(&[head.clone(), record].concat(), 2);
        }
    }
}
