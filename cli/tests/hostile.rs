//! Damaged files: truncated, with flipped bytes, with huge lengths. Each is read or refused with an error,
//! within a memory limit; nothing panics, aborts or is lost silently.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, PrimitiveBuilder};
use arrow_array::types::{Float64Type, Int64Type};
use arrow_array::{ArrayRef, ListArray, PrimitiveArray, RecordBatch, StringArray};
use arrow_ipc::{CompressionType, root_as_footer, root_as_message};
use common::tables::{Way, ways, write};
use common::{Folder, dormouse};
use dormouse_cli::read::{Names, read};
use dormouse_cli::{ReadError, Sequences};

/// Maximum bytes allocated at a time while one of these files of a few kB is read.
const HELD_BYTES_MAX: usize = 1 << 27;
const ROWS: usize = 12;

/// The system allocator with a count of the current thread's bytes.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is handed on to the system allocator as it came; counting touches thread-locals
// that need neither memory nor a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.get().wrapping_add(layout.size());
        HELD.set(held);
        // Memory allocated on another thread and freed here makes the count negative.
        if held < usize::MAX / 2 {
            MOST.set(MOST.get().max(held));
        }
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get().wrapping_sub(layout.size()));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A table with columns that are read and columns that are ignored.
fn table() -> RecordBatch {
    let mut ids = ListBuilder::new(PrimitiveBuilder::<Int64Type>::new());
    (0..ROWS as i64).for_each(|row| ids.append_value((0..9).map(|at| Some((row * at) % 50))));
    let names = |of: usize| -> ArrayRef {
        Arc::new(StringArray::from_iter_values((0..ROWS).map(|row| format!("name {}", row / of))))
    };
    let weights = PrimitiveArray::<Float64Type>::from_iter_values((0..ROWS).map(|it| it as f64));
    RecordBatch::try_from_iter([
        ("note", names(1)),
        ("input_ids", Arc::new(ids.finish())),
        ("group", names(4)),
        ("weight", Arc::new(weights)),
    ])
    .unwrap()
}

/// A file that is changed in place: rewriting it each time would write to the disk each time.
struct Victim {
    path: PathBuf,
    file: File,
    whole: Vec<u8>,
    way: Way,
}

impl Victim {
    /// The table in one format.
    fn new(here: &Folder, way: Way) -> Self {
        let path = here.path().join("hostile");
        write(&table(), way, 5, &path);
        let file = File::options().write(true).open(&path).unwrap();
        Self { whole: fs::read(&path).unwrap(), path, file, way }
    }

    /// Reads it with some bytes changed; returns the number of sequences or the error.
    fn with(&self, at: usize, bytes: &[u8]) -> Result<usize, ReadError> {
        self.file.write_all_at(bytes, at as u64).unwrap();
        let read = self.read(&format!("{:?} with {bytes:?} at {at}", self.way));
        self.file.write_all_at(&self.whole[at..at + bytes.len()], at as u64).unwrap();
        read
    }

    /// Truncates the file and reads it.
    fn until(&self, end: usize) -> Result<usize, ReadError> {
        self.file.set_len(end as u64).unwrap();
        self.read(&format!("{:?} until {end}", self.way))
    }

    /// Checks what every read guarantees.
    fn read(&self, what: &str) -> Result<usize, ReadError> {
        let held = HELD.get();
        MOST.set(held);
        let mut sequences = Sequences::new(1000);
        let read = read(&self.path, &Names::default(), &mut sequences);
        let most = MOST.get().wrapping_sub(held);
        assert!(most < HELD_BYTES_MAX, "{what}: {most} bytes held");
        if let Err(error) = &read {
            let said = error.to_string();
            assert!(said.starts_with(&self.path.display().to_string()), "{what}: {said}");
        }
        read.map(|()| sequences.count())
    }
}

#[test]
fn detects_truncation() {
    let here = Folder::new();
    for way in ways() {
        let victim = Victim::new(&here, way);
        assert_eq!(victim.read("whole").unwrap(), ROWS, "{way:?}");
        for end in (0..victim.whole.len()).rev() {
            match (way, victim.until(end)) {
                // A stream may end after any batch: five, five and two rows.
                (Way::Stream(_), Ok(rows)) => {
                    assert!([5, 10, 12].contains(&rows), "{way:?} until {end}: {rows}");
                }
                (_, Ok(rows)) => panic!("{way:?} until {end}: {rows} rows"),
                (_, Err(_)) => {}
            }
        }
    }
}

#[test]
fn no_changed_byte_aborts_the_program() {
    let here = Folder::new();
    for (number, way) in ways().into_iter().enumerate() {
        let victim = Victim::new(&here, way);
        let (mut read, mut refused) = (0, 0);
        // Every second byte, and the others in the next format, most of whose bytes are the same.
        for (at, byte) in victim.whole.iter().enumerate().skip(number % 2).step_by(2) {
            let value = [0, 0xff, byte ^ 1][at % 3];
            match victim.with(at, &[value]) {
                Ok(rows) => {
                    assert!(rows <= ROWS, "{way:?} with {value} at {at}: {rows} rows");
                    read += 1;
                }
                Err(_) => refused += 1,
            }
        }
        assert!(read > 50 && refused > 50, "{way:?}: {read} read, {refused} refused");
    }
}

#[test]
fn no_changed_length_aborts_the_program() {
    let here = Folder::new();
    for way in ways() {
        let victim = Victim::new(&here, way);
        for at in (0..victim.whole.len() - 8).step_by(4) {
            let lie: i64 = [1 << 31, 1 << 46, i64::MAX][at / 4 % 3];
            let rows = victim.with(at, &lie.to_le_bytes());
            assert!(!rows.is_ok_and(|rows| rows > ROWS), "{way:?} with {lie} at {at}");
        }
    }
}

/// Returns the error of a file of these bytes.
fn refusal(here: &Folder, bytes: &[u8]) -> String {
    let path = here.put("hostile", bytes);
    let refused =
        read(&path, &Names::default(), &mut Sequences::new(1000)).unwrap_err().to_string();
    refused.replace(&path.display().to_string(), "hostile")
}

/// Returns the error of the file `hostile` to a command with few KiB of addresses.
fn refusal_within(here: &Folder, limit_kib: u32, command: &str) -> String {
    let script = format!("ulimit -v {limit_kib} && exec \"$0\" {command} hostile");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).arg(env!("CARGO_BIN_EXE_dormouse")).current_dir(here.path());
    let output = shell.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    said
}

/// A compressed buffer states its decompressed length, which the reader allocates at once.
#[test]
fn refuses_a_false_decompressed_length() {
    let here = Folder::new();
    let mut seen = 0;
    for way in ways() {
        let (Way::File(Some(_)) | Way::Stream(Some(_))) = way else { continue };
        let mut bytes = Victim::new(&here, way).whole;
        // The ids of the first five rows, nine each.
        let length = (5_i64 * 9 * 8).to_le_bytes();
        let at = bytes.windows(8).position(|it| it == length).unwrap();
        bytes[at..at + 8].copy_from_slice(&(1_i64 << 46).to_le_bytes());
        let said = refusal(&here, &bytes);
        assert!(said.starts_with("hostile is damaged: a compressed buffer of "), "{way:?}: {said}");
        assert!(
            said.ends_with(" bytes claims 70368744177664 decompressed bytes"),
            "{way:?}: {said}"
        );
        seen += 1;
    }
    assert_eq!(seen, 4);
}

/// A compressed byte may stand for many: the claimed length is possible but exceeds memory.
#[test]
fn lack_of_memory_is_an_error() {
    let here = Folder::new();
    // Ids that compress badly, to two megabytes.
    let ids = (0..500_000).scan(1_u64, |state, _| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        Some(Some((*state >> 33) as i64 % 1000))
    });
    let one_row = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(ids)]);
    let table = RecordBatch::try_from_iter([("input_ids", Arc::new(one_row) as ArrayRef)]).unwrap();
    let path = here.path().join("hostile");
    write(&table, Way::Stream(Some(CompressionType::LZ4_FRAME)), 1, &path);
    let mut bytes = fs::read(&path).unwrap();
    let length = (500_000_i64 * 8).to_le_bytes();
    let at = bytes.windows(8).position(|it| it == length).unwrap();
    let lie = (bytes.len() - at) as i64 * 250;
    assert!(lie > 300 << 20, "{lie}");
    bytes[at..at + 8].copy_from_slice(&lie.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let said = refusal_within(&here, 300_000, "plan");
    assert!(said.ends_with(&format!(" needs {lie} bytes, more than available memory\n")), "{said}");
}

/// The offset of the schema's first field, the endianness, which these writers omit, is set to that of the
/// second.
#[test]
fn refuses_big_endian_numbers() {
    let here = Folder::new();
    for way in [Way::File(None), Way::Stream(None)] {
        let mut bytes = Victim::new(&here, way).whole;
        let table = match way {
            Way::File(_) => {
                let end = bytes.len() - 10;
                let length = bytes[end..end + 4].try_into().unwrap();
                let begin = end - u32::from_le_bytes(length) as usize;
                let footer = root_as_footer(&bytes[begin..end]).unwrap();
                begin + footer.schema().unwrap()._tab.loc()
            }
            _ => 8 + root_as_message(&bytes[8..]).unwrap().header_as_schema().unwrap()._tab.loc(),
        };
        let step = i32::from_le_bytes(bytes[table..table + 4].try_into().unwrap());
        let fields = (table as i64 - i64::from(step)) as usize + 4;
        assert_eq!(
            bytes[fields..fields + 2],
            [0, 0],
            "the field is omitted: little-endian is the default"
        );
        bytes.copy_within(fields + 2..fields + 4, fields);
        let said = refusal(&here, &bytes);
        assert_eq!(said, "hostile is damaged: its numbers are big-endian; accepted: little-endian");
    }
}

/// Groups nested deeper than the reader's stack allows, and no other content.
#[test]
fn refuses_a_schema_that_is_too_deep() {
    let here = Folder::new();
    let depth = 50_000_u32;
    let group = [0x35, 2, 0x18, 1, b'a', 0x15, 2, 0];
    let leaf = [0x15, 2, 0x25, 0, 0x18, 1, b'x', 0];
    // Version 1, a list of structs, how many: 50,001 in seven bits a byte.
    let count = depth + 1;
    let count = [count as u8 | 0x80, (count >> 7) as u8 | 0x80, (count >> 14) as u8];
    let mut footer = [&[0x15, 2, 0x19, 0xfc][..], &count].concat();
    footer.extend(group.repeat(depth as usize));
    footer.extend(leaf);
    // No rows, no row groups.
    footer.extend([0x16, 0, 0x19, 0x0c, 0]);
    let length = (footer.len() as u32).to_le_bytes();
    let bytes = [b"PAR1", &footer[..], &length, b"PAR1"].concat();
    let wanted = "hostile is damaged: its schema has depth 65; accepted: at most 64";
    assert_eq!(refusal(&here, &bytes), wanted);
}

/// 200 bytes that claim two thousand million ids in one row, or the accepted maximum after a page of others.
/// Written by `testdata/write_hostile.py`.
#[test]
fn refuses_pages_with_too_many_values() {
    let here = Folder::new();
    for (bytes, values) in [
        (&include_bytes!("testdata/one_page.parquet")[..], "2147483648"),
        (include_bytes!("testdata/two_pages.parquet"), "134218729"),
    ] {
        let wanted = format!(
            "hostile: Parquet error: 64 rows have at least {values} values; accepted: at most 134217728"
        );
        assert_eq!(refusal(&here, bytes), wanted);
    }
    let said = refusal(&here, include_bytes!("testdata/large_dictionary.parquet"));
    assert_eq!(said, "hostile: Parquet error: a dictionary claims 2147483647 values in 4 bytes");
    let said = refusal(&here, include_bytes!("testdata/fewer_rows.parquet"));
    assert_eq!(said, "hostile is damaged: it has 1 rows; its footer claims 5");
}

#[test]
fn refuses_data_after_the_end_of_a_stream() {
    let here = Folder::new();
    for way in ways().into_iter().filter(|way| matches!(way, Way::Stream(_))) {
        let whole = Victim::new(&here, way).whole;
        let said = refusal(&here, &whole.repeat(2));
        assert_eq!(said, "hostile is damaged: something follows the end of its stream");
    }
}

/// Unusual lines and their results.
#[test]
fn an_error_names_the_line_and_the_character() {
    let here = Folder::new();
    let deep = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    let read_as = [
        ("\u{feff}{\"ids\": [1]}\r\n\r\n{\"ids\": [2]}\r\n".to_owned(), 2),
        (" \t{\"ids\": [1]} ".to_owned(), 1),
        (format!("{{\"ids\": [1], \"other\": {}}}", deep(100_000)), 1),
        ("{\"ids\": [1], \"other\": 1e999}".to_owned(), 1),
        ("{\"ids\": [1], \"other\": 1, \"other\": 2}".to_owned(), 1),
        (format!("{{\"ids\": [{}1]}}", "1,".repeat(500_000)), 1),
    ];
    for (text, wanted) in read_as {
        let path = here.put("lines", &text);
        let mut sequences = Sequences::new(10);
        let shown = &text[..text.len().min(60)];
        read(&path, &Names::default(), &mut sequences)
            .unwrap_or_else(|error| panic!("{shown}: {error}"));
        assert_eq!(sequences.count(), wanted, "{shown}");
    }
    let an_object = "an object on one line, such as {\"ids\": [1, 2, 3]}";
    let refused = [
        (&b"{\"ids\": [1], \"ids\": [2]}"[..], "character 18: duplicate field `ids`"),
        (b"{\"ids\": [1], \"input_ids\": [2]}", "character 24: duplicate field `input_ids`"),
        (
            b"{\"ids\": [1.5]}",
            "character 12: invalid type: floating point `1.5`, expected an integer",
        ),
        (b"{\"ids\": \"x\"}", "character 11: invalid type: string \"x\", expected a list"),
        (
            b"{\"length\": -1}",
            "character 13: invalid value: integer `-1`, expected an integer, 0 or more",
        ),
        (b"{\"ids\": [1]", "character 11: EOF while parsing an object"),
        (b"{\"ids\": [1]} {\"ids\": [2]}", "character 14: trailing characters"),
        (b"{\"ids\": [1], \"group\": \"\xff\"}", "character 24: invalid unicode code point"),
    ];
    for (line, wanted) in refused {
        let said = refusal(&here, &[b"{\"ids\": [1]}\n", line, b"\n"].concat());
        assert_eq!(said, format!("hostile, line 2, {wanted}; accepted: {an_object}"));
    }
    let said = refusal(&here, "{\"ids\": [1]}\n\u{feff}{\"ids\": [1]}\n".as_bytes());
    assert_eq!(said, format!("hostile, line 2, character 1: not an object; accepted: {an_object}"));
    let loss = format!("{{\"ids\": [1], \"loss\": {}}}", deep(100_000));
    let said = refusal(&here, loss.as_bytes());
    assert!(said.starts_with("hostile, line 1: loss is [[[[") && said.len() < 300, "{said}");
    let group = format!("{{\"ids\": [1], \"group\": \"{}\"}}", "x".repeat(5000));
    let wanted = "hostile, line 1: group is a string of 5000 bytes; accepted: at most 4096 bytes";
    assert_eq!(refusal(&here, group.as_bytes()), wanted);
}

/// Comments of a trace in LZMA2, as `testdata/write_hostile.py` writes them: a chunk and the end.
const COMMENTS: &[u8] = include_bytes!("testdata/comments.lzma2");
const CHUNK_HEADER_BYTES: usize = 6;

/// The `.xz` stream of a chunk and `repeats` more of the same content, up to the index. Its dictionary is the largest,
/// 4 GiB.
fn xz_of_comments(repeats: usize) -> Vec<u8> {
    let with_crc = |bytes: &[u8]| [bytes, &crc32fast::hash(bytes).to_le_bytes()].concat();
    let (chunk, end) = COMMENTS.split_at(COMMENTS.len() - 1);
    let (header, content) = chunk.split_at(CHUNK_HEADER_BYTES);
    // Its state is reset; its dictionary and properties go on.
    let repeat = [&[header[0] & 0x1f | 0xa0], &header[1..CHUNK_HEADER_BYTES - 1], content].concat();
    let block_header = [2, 0, 0x21, 1, 40, 0, 0, 0];
    let head = [b"\xfd7zXZ\0", &with_crc(&[0, 0])[..], &with_crc(&block_header)].concat();
    [head, chunk.to_vec(), repeat.repeat(repeats), end.to_vec()].concat()
}

/// 380 kB that stand for 2 GB.
#[test]
fn a_long_trace_is_refused_before_it_takes_memory() {
    let here = Folder::new();
    here.put("hostile", xz_of_comments(1000));
    let said = refusal_within(&here, 1 << 20, "replay");
    assert_eq!(said, "dormouse: hostile is longer than 268435456 bytes; accepted: at most that\n");
}

#[test]
fn damaged_traces_are_refused() {
    let here = Folder::new();
    let trace =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/traces/stream_rotation.csv.xz");
    let whole = fs::read(trace).unwrap();
    let refused = |bytes: &[u8], what: &str| {
        here.put("hostile", bytes);
        let output = dormouse(here.path(), &["replay", "hostile"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{what}: {said}");
        assert!(said.starts_with("dormouse: hostile"), "{what}: {said}");
    };
    let last = whole.len() - 1;
    // Inside the headers, the block, the index and the footer.
    for end in [7, 13, 30, whole.len() / 2, last - 20, last] {
        refused(&whole[..end], &format!("until {end}"));
    }
    for at in [7, 13, 30, whole.len() / 2, last - 20, last] {
        let mut changed = whole.clone();
        changed[at] ^= 0x11;
        refused(&changed, &format!("changed at {at}"));
    }
}
