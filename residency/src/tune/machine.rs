//! Settings from the facts of a machine.

use super::chosen::Chosen;
use crate::units;

/// The file of the NVMe tier when it is created, if the disk has room. It grows on demand.
pub const FILE_BYTES_START: u64 = 4 << 30;
/// The smallest file, and the largest.
const FILE_BYTES_MIN: u64 = 1 << 20;
const FILE_BYTES_MAX: u64 = 8 << 40;
/// A file has whole units of this, the unit of its I/O.
const FILE_UNIT_BYTES: u64 = 4096;

/// The largest host tier.
const HOST_BYTES_MAX: u64 = 64 << 40;
/// The host tier takes this part of the available memory: the program goes on to allocate too.
const AVAILABLE_DIVISOR: u64 = 2;
/// This part of what it holds and what is available is left to others.
const LEFT_DIVISOR: u64 = 4;
/// The part of all memory, if the available memory is not known.
const MEMORY_DIVISOR: u64 = 4;

/// I/O threads. With io_uring two are enough: one sums a chunk while the other submits.
pub const IO_THREADS_MIN: u64 = 2;
/// Without io_uring a thread has one request in flight; this many fill the queue of a disk.
pub const IO_THREADS_MAX: u64 = 8;
/// A thread that waits for a disk takes little of a CPU: one for every two.
const CPUS_PER_THREAD: u64 = 2;

/// Requests in flight per thread with io_uring.
pub const QUEUE_DEPTH_MIN: u64 = 4;
/// Deeper queues only delay reads behind writes.
pub const QUEUE_DEPTH_MAX: u64 = 32;
/// The rate was measured with a short queue, which may have limited it: this many times what it asks for.
const DEPTH_MARGIN: u64 = 2;

/// A directory's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Bytes that this user can still take.
    pub free_bytes: u64,
    /// Bytes of the whole disk.
    pub total_bytes: u64,
    /// The longest file that this process may write (`ulimit -f`), in bytes.
    pub file_bytes_max: u64,
    /// The way to its files.
    pub io: DiskIo,
}

/// The way to the files of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskIo {
    /// io_uring.
    Uring,
    /// One blocking call per thread, for this reason.
    Threads(String),
}

/// The size of the NVMe tier's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSize {
    /// Reserved at creation, in bytes.
    pub start_bytes: u64,
    /// What it may grow to.
    pub limit: Chosen,
}

/// Part of a disk that a file which grows leaves free: 1/16.
const SPARE_DIVISOR: u64 = 16;

/// Returns the size of a file on `disk`: 4 GiB that grow to what is free now, less the part that growth leaves to others.
/// With less than 4 GiB free it is half of that, and the limit is the disk: the file of a process that was killed may
/// still be going.
#[must_use]
pub fn file_bytes(disk: &Disk) -> FileSize {
    let Disk { free_bytes, total_bytes, file_bytes_max, .. } = *disk;
    let (free, total) = (units::bytes(free_bytes), units::bytes(total_bytes));
    let (start_bytes, most_bytes, reason) = if free_bytes < FILE_BYTES_START {
        let reason = format!("half of the {free} that the disk of {total} has free");
        (free_bytes / 2, total_bytes, reason)
    } else {
        let spare_bytes = free_bytes.saturating_sub(total_bytes / SPARE_DIVISOR);
        (FILE_BYTES_START, spare_bytes, format!("the disk of {total} has {free} free"))
    };
    let whole = |bytes: u64| {
        let bytes =
            bytes.clamp(FILE_BYTES_MIN, FILE_BYTES_MAX.min(file_bytes_max.max(FILE_BYTES_MIN)));
        bytes - bytes % FILE_UNIT_BYTES
    };
    let start_bytes = whole(start_bytes);
    let limit_bytes = whole(most_bytes).max(start_bytes);
    let mut reason = match most_bytes.max(start_bytes) > file_bytes_max {
        true => format!("ulimit -f allows files of {}", units::bytes(file_bytes_max)),
        false => reason,
    };
    if start_bytes < limit_bytes {
        reason = format!("grows from {} on demand; {reason}", units::bytes(start_bytes));
    }
    FileSize { start_bytes, limit: Chosen::new(limit_bytes, reason) }
}

/// Attempts to create a file of an automatic size.
pub const FILE_ATTEMPTS_MAX: u32 = 4;

/// Returns the size to try after a disk with `free_bytes` had no room for `refused_bytes`: at most half of either. Others
/// that start at the same time take what was free before, and a quota may allow less than the disk has.
#[must_use]
pub fn less_file_bytes(refused_bytes: u64, free_bytes: u64) -> u64 {
    let bytes = (refused_bytes.min(free_bytes) / 2).max(FILE_BYTES_MIN);
    bytes - bytes % FILE_UNIT_BYTES
}

/// Returns the limit of the host tier: the held bytes plus half of the available memory, at most three quarters of their
/// sum, and never less than the held bytes. The cap of three quarters keeps repeated calls from pinning all memory: the
/// engine calls this whenever the tier is full. If the available memory is not known (`None`), the limit is a quarter of
/// `memory_bytes`, the memory that the process may use.
#[must_use]
pub fn host_bytes(memory_bytes: u64, available_bytes: Option<u64>, held_bytes: u64) -> Chosen {
    let Some(available_bytes) = available_bytes else {
        let memory = units::bytes(memory_bytes);
        let reason =
            format!("a quarter of {memory} of memory; how much of it is available is not known");
        return Chosen::new((memory_bytes / MEMORY_DIVISOR).min(HOST_BYTES_MAX), reason);
    };
    let available = units::bytes(available_bytes);
    let room_bytes = held_bytes.saturating_add(available_bytes);
    let most_bytes = room_bytes - room_bytes / LEFT_DIVISOR;
    let bytes = held_bytes.saturating_add(available_bytes / AVAILABLE_DIVISOR);
    let reason = match held_bytes {
        held if held >= most_bytes && held > 0 => {
            format!("{} held, and no more while {available} are available", units::bytes(held))
        }
        _ if bytes > most_bytes => {
            let room = units::bytes(room_bytes);
            format!("three quarters of the {room} of memory that it holds or that is available")
        }
        0 => format!("half of the {available} of memory that is available"),
        held => {
            format!("{} held, and half of the {available} that is available", units::bytes(held))
        }
    };
    Chosen::new(host_limit_bytes(available_bytes, held_bytes), reason)
}

/// Returns the value of [`host_bytes`] where the available memory is known. Allocates nothing.
#[must_use]
pub const fn host_limit_bytes(available_bytes: u64, held_bytes: u64) -> u64 {
    let room_bytes = held_bytes.saturating_add(available_bytes);
    let most_bytes = room_bytes - room_bytes / LEFT_DIVISOR;
    let bytes = held_bytes.saturating_add(available_bytes / AVAILABLE_DIVISOR);
    let bytes = if bytes < most_bytes { bytes } else { most_bytes };
    let bytes = if bytes > held_bytes { bytes } else { held_bytes };
    if bytes < HOST_BYTES_MAX { bytes } else { HOST_BYTES_MAX }
}

/// Returns the number of I/O threads. `None`: there is no file tier.
#[must_use]
pub fn io_threads(cpus: u64, io: Option<&DiskIo>) -> Chosen {
    match io {
        None => Chosen::new(IO_THREADS_MIN, "no file tier: only work that waits"),
        Some(DiskIo::Uring) => {
            Chosen::new(IO_THREADS_MIN, "io_uring: each has several requests in flight")
        }
        Some(DiskIo::Threads(why)) => {
            let threads = (cpus / CPUS_PER_THREAD).clamp(IO_THREADS_MIN, IO_THREADS_MAX);
            Chosen::new(threads, format!("CPUs: {cpus}; one request per thread: {why}"))
        }
    }
}

/// Returns the number of requests of `request_bytes` in flight per thread, so that all threads have twice the bytes
/// that the disk moves in the time that it takes to answer. Figures that are 0 are not known.
#[must_use]
pub fn queue_depth(threads: u64, request_bytes: u64, bytes_per_s: u64, latency_ns: u64) -> Chosen {
    if bytes_per_s == 0 || latency_ns == 0 {
        return Chosen::new(QUEUE_DEPTH_MIN, "the disk was not measured");
    }
    let on_the_way = u128::from(bytes_per_s) * u128::from(latency_ns) / 1_000_000_000;
    let requests = (u128::from(DEPTH_MARGIN) * on_the_way).div_ceil(request_bytes.max(1).into());
    let depth = u64::try_from(requests).unwrap_or(u64::MAX).div_ceil(threads.max(1));
    let (rate, latency) = (units::bytes(bytes_per_s), units::time(latency_ns));
    let reason = format!("{rate}/s at a latency of {latency}");
    Chosen::new(depth.clamp(QUEUE_DEPTH_MIN, QUEUE_DEPTH_MAX), reason)
}
