//! Copies and fills, in stream order.
//!
//! What an address is, is looked up when the copy is asked for; whether the device may touch it,
//! when the stream gets there (D1).

use std::ffi::{c_uchar, c_uint};

use crate::code::Code;
use crate::entry::entry;
use crate::space::{Access, Space, around};
use crate::state::{Driver, check_not_lost, driver, lose};
use crate::streams::{self, Stream};
use crate::{capture, context};

/// One end of a copy.
#[derive(Clone, Copy)]
struct End {
    start: usize,
    bytes: usize,
    place: Place,
    /// The device that copies.
    device: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Device,
    Pinned,
    /// Memory the driver knows nothing of: the caller answers for it.
    Pageable,
}

/// What is written.
enum Source {
    Range(End),
    /// Bytes of pageable memory, taken when the copy was asked for, as the driver stages them:
    /// their owner may free them when the call returns.
    Staged(Vec<u8>),
    Byte(u8),
    Word(u32),
}

impl End {
    fn find(driver: &Driver, start: usize, bytes: usize) -> Result<Self, Code> {
        if start == 0 || start.checked_add(bytes).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        let memory = driver.memory();
        let place = if memory.arena.contains(start) {
            Place::Device
        } else if around(&memory.pinned, start, |pinned| pinned.bytes).is_none() {
            Place::Pageable
        } else if memory.is_pinned(start, bytes) {
            Place::Pinned
        } else {
            return Err(Code::INVALID_VALUE);
        };
        Ok(Self { start, bytes, place, device: context::current().unwrap_or(0) })
    }

    /// An end that a caller gave as a device address.
    fn find_device(driver: &Driver, start: usize, bytes: usize) -> Result<Self, Code> {
        let end = Self::find(driver, start, bytes)?;
        if end.place == Place::Pageable { Err(Code::INVALID_VALUE) } else { Ok(end) }
    }

    fn is_accessible(&self, memory: &Space, access: Access) -> bool {
        match self.place {
            Place::Device => memory.is_accessible(self.device, self.start, self.bytes, access),
            Place::Pinned => memory.is_pinned(self.start, self.bytes),
            Place::Pageable => true,
        }
    }

    /// Its bytes, if the driver would stage them.
    fn stage(&self, destination: &Self) -> Source {
        if self.place != Place::Pageable || destination.place != Place::Device {
            return Source::Range(*self);
        }
        // SAFETY: the caller of the entry point answers for its memory until the call returns.
        let bytes = unsafe { std::slice::from_raw_parts(self.start as *const u8, self.bytes) };
        Source::Staged(bytes.to_vec())
    }
}

/// Writes `source` to `destination`, if the device may. Else the device is lost.
fn write(driver: &Driver, destination: &End, source: &Source) {
    if check_not_lost().is_err() {
        return;
    }
    let memory = driver.memory();
    let is_readable = match source {
        Source::Range(end) => end.is_accessible(&memory, Access::Read),
        _ => true,
    };
    if !is_readable || !destination.is_accessible(&memory, Access::ReadWrite) {
        drop(memory);
        lose(Code::ILLEGAL_ADDRESS);
        return;
    }
    let (to, bytes) = (destination.start as *mut u8, destination.bytes);
    // SAFETY: both ends were found accessible, which no other thread changes while `memory` is
    // held; for pageable memory the caller answers. Ends may overlap.
    unsafe {
        match source {
            Source::Range(end) => std::ptr::copy(end.start as *const u8, to, bytes),
            Source::Staged(staged) => std::ptr::copy(staged.as_ptr(), to, bytes),
            Source::Byte(byte) => std::ptr::write_bytes(to, *byte, bytes),
            Source::Word(word) => {
                for place in 0..bytes / size_of::<u32>() {
                    to.cast::<u32>().add(place).write_unaligned(*word);
                }
            }
        }
    }
}

fn give(driver: &'static Driver, stream: &Stream, to: End, source: Source) -> Result<(), Code> {
    streams::give(driver, stream, move || write(driver, &to, &source))
}

/// How an address was given.
#[derive(Clone, Copy, PartialEq, Eq)]
enum As {
    /// As any address.
    Any,
    /// As one of the device.
    Device,
}

impl As {
    fn find(self, driver: &Driver, start: usize, bytes: usize) -> Result<End, Code> {
        match self {
            Self::Any => End::find(driver, start, bytes),
            Self::Device => End::find_device(driver, start, bytes),
        }
    }
}

/// Copies in stream order. As the driver's, the call lasts as long as the copy where that goes into
/// pageable memory, or from host to host.
fn copy(to: (As, usize), from: (As, usize), bytes: usize, stream: usize) -> Result<(), Code> {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let (to, from) = (to.0.find(driver, to.1, bytes)?, from.0.find(driver, from.1, bytes)?);
    let is_awaited =
        to.place == Place::Pageable || (to.place != Place::Device && from.place != Place::Device);
    give(driver, &stream, to, from.stage(&to))?;
    if is_awaited && !capture::is_captured(driver, &stream) {
        streams::synchronize(driver, &stream)?;
    }
    Ok(())
}

/// Copies on the legacy stream, and waits.
fn copy_now(to: (As, usize), from: (As, usize), bytes: usize) -> Result<(), Code> {
    capture::refuse_unsafe()?;
    copy(to, from, bytes, 0)?;
    let driver = driver()?;
    streams::synchronize(driver, &driver.streams.legacy)
}

/// Fills `count` elements in stream order.
fn fill(
    start: usize,
    source: Source,
    count: usize,
    width: usize,
    stream: usize,
) -> Result<(), Code> {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    let bytes = count.checked_mul(width).ok_or(Code::INVALID_VALUE)?;
    if !start.is_multiple_of(width) {
        return Err(Code::INVALID_VALUE);
    }
    if bytes == 0 {
        return Ok(());
    }
    give(driver, &stream, End::find_device(driver, start, bytes)?, source)
}

entry! { Context, fn cuMemcpy(to: usize, from: usize, bytes: usize) {
    copy_now((As::Any, to), (As::Any, from), bytes)
}}

entry! { Context, fn cuMemcpyAsync(to: usize, from: usize, bytes: usize, stream: usize) {
    copy((As::Any, to), (As::Any, from), bytes, stream)
}}

entry! { Context, fn cuMemcpyHtoD_v2(to: usize, from: usize, bytes: usize) {
    copy_now((As::Device, to), (As::Any, from), bytes)
}}

entry! { Context, fn cuMemcpyDtoH_v2(to: usize, from: usize, bytes: usize) {
    copy_now((As::Any, to), (As::Device, from), bytes)
}}

entry! { Context, fn cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
    copy((As::Device, to), (As::Any, from), bytes, stream)
}}

entry! { Context, fn cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
    copy((As::Any, to), (As::Device, from), bytes, stream)
}}

entry! { Context, fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
    copy((As::Device, to), (As::Device, from), bytes, stream)
}}

entry! { Context, fn cuMemsetD8_v2(start: usize, byte: c_uchar, count: usize) {
    capture::refuse_unsafe()?;
    fill(start, Source::Byte(byte), count, 1, 0)?;
    let driver = driver()?;
    streams::synchronize(driver, &driver.streams.legacy)
}}

entry! { Context, fn cuMemsetD8Async(start: usize, byte: c_uchar, count: usize, stream: usize) {
    fill(start, Source::Byte(byte), count, 1, stream)
}}

entry! { Context, fn cuMemsetD32Async(start: usize, word: c_uint, count: usize, stream: usize) {
    fill(start, Source::Word(word), count, size_of::<u32>(), stream)
}}

/// Flags of `cuStreamWriteValue32`: whether it needs a barrier, which is always there.
const WRITE_FLAGS: c_uint = 1;

entry! { Context, fn cuStreamWriteValue32_v2(
    stream: usize,
    start: usize,
    word: c_uint,
    flags: c_uint,
) {
    if flags & !WRITE_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    fill(start, Source::Word(word), 1, size_of::<u32>(), stream)
}}
