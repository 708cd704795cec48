//! Traces of allocations: CSV with the columns of RMM's log.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use lzma_rust2::XzReader;

use super::ReplayError;
use crate::read::STANDARD_INPUT;

/// Limits of a trace, as in docs/traces.md.
pub(super) const TRACE_BYTES_MAX: u64 = 256 << 20;
const EVENTS_MAX: usize = 4_000_000;
const LINE_BYTES_MAX: u64 = 512;
const SIZE_BYTES_MAX: u64 = 1 << 48;

const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const XZ_MAGIC: &[u8] = b"\xfd7zXZ\0";
const COLUMNS: &str = "Thread,Time,Action,Pointer,Size,Stream";

/// One call. Blocks are numbered in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Allocate { bytes: u64 },
    Free { block: usize },
}

/// The calls of a trace.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) calls: Vec<Call>,
    pub(super) blocks: usize,
    /// Most live bytes at a time.
    pub(super) peak_bytes: u64,
    /// Allocations that failed where the trace was recorded; they are not replayed.
    pub(super) failures: u64,
}

/// Reads a trace.
pub(super) fn read(file: &Path) -> Result<Trace, ReplayError> {
    let io = |source| ReplayError::Io { file: file.to_owned(), source };
    let source: Box<dyn Read> = match file.as_os_str() == STANDARD_INPUT {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(file).map_err(io)?),
    };
    let mut source = BufReader::new(source);
    let head = source.fill_buf().map_err(io)?;
    let (is_gzip, is_xz) = (head.starts_with(GZIP_MAGIC), head.starts_with(XZ_MAGIC));
    let parsed = if is_gzip {
        parse(BufReader::new(flate2::bufread::MultiGzDecoder::new(source)), TRACE_BYTES_MAX)
    } else if is_xz {
        parse(BufReader::new(XzReader::new(source, true)), TRACE_BYTES_MAX)
    } else {
        parse(source, TRACE_BYTES_MAX)
    };
    parsed.map_err(|refused| match refused {
        Refused::Io(source) => io(source),
        Refused::Length => ReplayError::Length { file: file.to_owned() },
        Refused::Line { line, seen, accepted } => {
            ReplayError::Line { file: file.to_owned(), line, seen, accepted }
        }
    })
}

/// Why a trace is refused.
#[derive(Debug)]
enum Refused {
    Io(io::Error),
    /// It is longer than the limit.
    Length,
    Line {
        line: u64,
        seen: String,
        accepted: &'static str,
    },
}

fn parse(source: impl BufRead, bytes_max: u64) -> Result<Trace, Refused> {
    // One byte more tells a longer trace from one that ends at the limit.
    let mut source = source.take(bytes_max.saturating_add(1));
    let mut bytes_read = 0;
    let mut trace = Trace::default();
    let mut live: HashMap<u64, (usize, u64)> = HashMap::new();
    let (mut live_bytes, mut has_columns) = (0_u64, false);
    let mut text = Vec::new();
    for line in 1_u64.. {
        text.clear();
        let read =
            (&mut source).take(LINE_BYTES_MAX).read_until(b'\n', &mut text).map_err(Refused::Io)?;
        if read == 0 {
            break;
        }
        bytes_read += read as u64;
        if bytes_read > bytes_max {
            return Err(Refused::Length);
        }
        let row = String::from_utf8_lossy(&text);
        let row = row.trim_end();
        let refused = |accepted| Refused::Line { line, seen: row.to_owned(), accepted };
        if read as u64 == LINE_BYTES_MAX && !text.ends_with(b"\n") {
            return Err(refused("at most 512 bytes a line"));
        }
        if !has_columns {
            has_columns = row.starts_with(COLUMNS);
            if !has_columns && !row.starts_with('#') {
                return Err(refused(
                    "lines of # and then the columns Thread,Time,Action,Pointer,Size,Stream",
                ));
            }
            continue;
        }
        let event = event(row).map_err(refused)?;
        match event {
            Event::Failure => trace.failures += 1,
            // RMM logs allocations of nothing.
            Event::Allocate { bytes: 0, .. } | Event::Free { bytes: 0, .. } => {}
            Event::Allocate { pointer, bytes } => {
                if live.insert(pointer, (trace.blocks, bytes)).is_some() {
                    return Err(refused("a pointer that is not live"));
                }
                trace.blocks += 1;
                let sum = live_bytes.checked_add(bytes);
                live_bytes = sum.ok_or_else(|| refused("fewer than 2^64 live bytes"))?;
                trace.peak_bytes = trace.peak_bytes.max(live_bytes);
                trace.calls.push(Call::Allocate { bytes });
            }
            Event::Free { pointer, bytes } => {
                let Some((block, allocated_bytes)) = live.remove(&pointer) else {
                    return Err(refused("a free of a live pointer"));
                };
                if allocated_bytes != bytes {
                    return Err(refused("a free with the size of its allocation"));
                }
                live_bytes -= bytes;
                trace.calls.push(Call::Free { block });
            }
        }
        if trace.calls.len() > EVENTS_MAX {
            return Err(refused("at most 4,000,000 events"));
        }
    }
    if !has_columns {
        let accepted = "the columns Thread,Time,Action,Pointer,Size,Stream";
        return Err(Refused::Line { line: 0, seen: "no columns".to_owned(), accepted });
    }
    Ok(trace)
}

enum Event {
    Allocate { pointer: u64, bytes: u64 },
    Free { pointer: u64, bytes: u64 },
    Failure,
}

/// Parses a row; the error says what is accepted.
fn event(row: &str) -> Result<Event, &'static str> {
    const SHAPE: &str = "Thread,Time,Action,Pointer,Size,Stream with or without Scope";
    let cells: Vec<&str> = row.split(',').collect();
    let [_, _, action, pointer, size, ..] = cells.as_slice() else { return Err(SHAPE) };
    if cells.len() > 7 {
        return Err(SHAPE);
    }
    let hexadecimal = |digits| u64::from_str_radix(digits, 16).ok();
    let pointer = match *pointer {
        "(nil)" => Some(0),
        text => text.strip_prefix("0x").and_then(hexadecimal),
    };
    let pointer = pointer.ok_or("a pointer such as 0x100")?;
    let bytes = size
        .parse()
        .ok()
        .filter(|bytes| *bytes <= SIZE_BYTES_MAX)
        .ok_or("a size of 0 to 2^48 bytes")?;
    match *action {
        "allocate" => Ok(Event::Allocate { pointer, bytes }),
        "free" => Ok(Event::Free { pointer, bytes }),
        "allocate failure" => Ok(Event::Failure),
        _ => Err("allocate, free or allocate failure"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# dormouse-trace: 1\nThread,Time,Action,Pointer,Size,Stream,Scope\n";

    fn of(rows: &str) -> Result<Trace, Refused> {
        parse(format!("{HEAD}{rows}").as_bytes(), TRACE_BYTES_MAX)
    }

    #[test]
    fn blocks_are_followed_by_their_pointers() {
        let trace = of("0,0,allocate,0x1,100,0,0\n0,1,allocate,0x2,50,0,0\n0,2,free,0x1,100,0,0\n\
                        0,3,allocate,0x1,60,0,0\n0,4,allocate failure,0x0,9,0,0\n0,5,free,0x1,60,0,0\n")
        .unwrap();
        let calls = [
            Call::Allocate { bytes: 100 },
            Call::Allocate { bytes: 50 },
            Call::Free { block: 0 },
            Call::Allocate { bytes: 60 },
            Call::Free { block: 2 },
        ];
        assert_eq!(trace, Trace { calls: calls.to_vec(), blocks: 3, peak_bytes: 150, failures: 1 });
    }

    #[test]
    fn the_log_of_rmm_is_read() {
        let text = "Thread,Time,Action,Pointer,Size,Stream\n140,10:00:00.1,allocate,0x7f00,64,0x0\n\
                    140,10:00:00.2,allocate,(nil),0,0x0\n140,10:00:00.3,free,0x7f00,64,0x0\n";
        assert_eq!(parse(text.as_bytes(), TRACE_BYTES_MAX).unwrap().peak_bytes, 64);
    }

    #[test]
    fn other_lines_are_refused_with_their_number() {
        for (rows, wanted) in [
            ("0,0,allocate,0x1,100,0,0\n0,1,allocate,0x1,1,0,0\n", "a pointer that is not live"),
            ("0,0,free,0x1,100,0,0\n", "a free of a live pointer"),
            (
                "0,0,allocate,0x1,100,0,0\n0,1,free,0x1,99,0,0\n",
                "a free with the size of its allocation",
            ),
            ("0,0,allocate,1,100,0,0\n", "a pointer such as 0x100"),
            ("0,0,allocate,0x1,-1,0,0\n", "a size of 0 to 2^48 bytes"),
            ("0,0,resize,0x1,1,0,0\n", "allocate, free or allocate failure"),
            ("0,0,allocate\n", "Thread,Time,Action,Pointer,Size,Stream with or without Scope"),
        ] {
            let lines = rows.lines().count() as u64;
            let Err(Refused::Line { line, accepted, .. }) = of(rows) else { panic!("{rows}") };
            assert_eq!((line, accepted), (2 + lines, wanted), "{rows}");
        }
        let all = TRACE_BYTES_MAX;
        assert!(matches!(parse(&b""[..], all), Err(Refused::Line { line: 0, .. })));
        assert!(matches!(parse(&[b'#'; 600][..], all), Err(Refused::Line { line: 1, .. })));
    }

    /// A longer trace is refused wherever the limit is: cut inside a size it would have a smaller block, cut at the
    /// end of a line fewer calls.
    #[test]
    fn a_longer_trace_is_not_cut() {
        let rows = "0,0,allocate,0x1,100,0,0\n0,1,allocate,0x2,50,0,0\n";
        let text = format!("{HEAD}{rows}");
        let whole = text.len() as u64;
        let of = |bytes_max: u64| parse(text.as_bytes(), bytes_max);
        assert_eq!(of(whole).unwrap().calls.len(), 2);
        let inside = text.find("00,0,0").unwrap() as u64;
        let at_newline = text.find("0,1,allocate").unwrap() as u64;
        for bytes_max in [whole - 1, inside, at_newline, HEAD.len() as u64] {
            assert!(matches!(of(bytes_max), Err(Refused::Length)), "{bytes_max}");
        }
    }

    /// 2^16 blocks of 2^48 bytes.
    #[test]
    fn live_bytes_do_not_overflow() {
        let row = |at: u32| format!("0,0,allocate,{at:#x},{SIZE_BYTES_MAX},0,0\n");
        let rows: Vec<String> = (1..=1 << 16).map(row).collect();
        let (last, others) = rows.split_last().unwrap();
        assert_eq!(of(&others.concat()).unwrap().peak_bytes, u64::MAX - SIZE_BYTES_MAX + 1);
        let Err(Refused::Line { line, accepted, .. }) = of(&(others.concat() + last)) else {
            panic!("the sum is accepted")
        };
        assert_eq!((line, accepted), (2 + (1 << 16), "fewer than 2^64 live bytes"));
    }
}
