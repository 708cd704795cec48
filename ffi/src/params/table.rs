//! The table itself.

use std::ffi::CStr;

/// Names a parameter in code. The order is that of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Key {
    AllocBudget,
    CudaBudget,
    CudaPage,
    HeapMin,
    HeapReserve,
    HostBudget,
    NvmeDir,
    NvmeFile,
    NvmeWriteBudget,
    NvmeEngine,
    NvmeDepth,
    IoThreads,
    Inflight,
    Residency,
    Window,
    Checksum,
    TraceEvents,
    Log,
    LogFile,
    Config,
    Help,
    WarnUnknown,
    Library,
}

/// What kind of value a parameter takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes, from `least` up; a percentage of this machine's memory where `percent`.
    Size { least: u64, most: u64, percent: bool },
    /// A number.
    Count { least: u64, most: u64 },
    /// On or off.
    Switch,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A path.
    Path,
    /// Levels of log events.
    Filter,
}

impl Kind {
    /// Its name in the C enumeration.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Self::Size { .. } => c"size",
            Self::Count { .. } => c"count",
            Self::Switch => c"switch",
            Self::Choice(_) => c"choice",
            Self::Path => c"path",
            Self::Filter => c"filter",
        }
    }
}

/// One parameter.
#[derive(Debug)]
pub(crate) struct Param {
    pub(crate) key: Key,
    pub(crate) name: &'static CStr,
    pub(crate) kind: Kind,
    /// As a file would say it; empty: not set.
    pub(crate) built_in: &'static CStr,
    /// What is accepted, as every message says it.
    pub(crate) accepts: &'static CStr,
    /// One line.
    pub(crate) help: &'static CStr,
    /// A paragraph for the docs page.
    pub(crate) detail: &'static str,
    /// Whether a configuration file may hold it.
    pub(crate) in_file: bool,
}

impl Param {
    /// Its name as Rust text.
    pub(crate) fn name(&self) -> &'static str {
        // The table is ASCII; a test reads every entry.
        self.name.to_str().unwrap_or("")
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

macro_rules! param {
    ($key:ident, $name:literal, $kind:expr, $built_in:literal, $accepts:literal, $help:literal,
     $detail:literal) => {
        param!($key, $name, $kind, $built_in, $accepts, $help, $detail, true)
    };
    ($key:ident, $name:literal, $kind:expr, $built_in:literal, $accepts:literal, $help:literal,
     $detail:literal, $in_file:literal) => {
        Param {
            key: Key::$key,
            name: $name,
            kind: $kind,
            built_in: $built_in,
            accepts: $accepts,
            help: $help,
            detail: $detail,
            in_file: $in_file,
        }
    };
}

/// Every parameter, in the order of [`Key`].
pub(crate) const TABLE: &[Param] = &[
    param!(
        AllocBudget,
        c"DORMOUSE_ALLOC_BUDGET_BYTES",
        Kind::Size { least: MIB, most: 64 * TIB, percent: true },
        c"100%",
        c"1MiB to 64TiB, or 1% to 100% of this machine's memory",
        c"most bytes of device memory to map",
        "A hard limit on awake, cached and staged bytes together, checked before the system is \
         asked. Past it, cached pages go back, dormant memory falls asleep, and only then does a \
         request fail with a report."
    ),
    param!(
        CudaBudget,
        c"DORMOUSE_CUDA_BUDGET_BYTES",
        Kind::Size { least: 0, most: 64 * TIB, percent: false },
        c"0",
        c"0 (all the GPU has) to 64TiB",
        c"most bytes to map on each GPU",
        "What DORMOUSE_ALLOC_BUDGET_BYTES is on the host device. Others on the GPU (communication \
         buffers, libraries' workspaces, other processes) need room of their own: leave it to them."
    ),
    param!(
        CudaPage,
        c"DORMOUSE_CUDA_PAGE_BYTES",
        Kind::Size { least: 0, most: 1 << 30, percent: false },
        c"0",
        c"0 (the driver's granularity, 2MiB) to 1GiB, a power of two",
        c"unit of mapping on a GPU",
        "Each page is mapped and unmapped by a call of its own, so larger ones are cheaper to put to \
         sleep, and waste more of the last page of each block. Read when the heap is made."
    ),
    param!(
        HeapMin,
        c"DORMOUSE_HEAP_MIN_BYTES",
        Kind::Size { least: 4 * KIB, most: TIB, percent: false },
        c"64KiB",
        c"4KiB to 1TiB",
        c"smallest malloc request the preload door serves",
        "Smaller requests go to libc. Every block served is whole pages, so a small value wastes \
         the rest of a page on each. Read when the heap is made; a runtime cannot change it."
    ),
    param!(
        HeapReserve,
        c"DORMOUSE_HEAP_RESERVE_BYTES",
        Kind::Size { least: 64 * MIB, most: 64 * TIB, percent: false },
        c"256GiB",
        c"64MiB to 64TiB",
        c"address space reserved for every block there will be",
        "Addresses only: nothing is mapped by it. Everything handed out lies in this one range, so \
         it must hold all that is awake and asleep at a time. Lower it under `ulimit -v`. Read \
         when the heap is made; a runtime cannot change it."
    ),
    param!(
        HostBudget,
        c"DORMOUSE_HOST_BUDGET_BYTES",
        Kind::Size { least: 0, most: 64 * TIB, percent: true },
        c"25%",
        c"0 (closed) to 64TiB, or 1% to 100% of this machine's memory",
        c"most bytes of the host tier",
        "Pinned host memory for sleeping bytes and stash copies, taken as it is needed. On the \
         host device this is ordinary memory: sleeping there lowers no resident set."
    ),
    param!(
        NvmeDir,
        c"DORMOUSE_NVME_DIR",
        Kind::Path,
        c"",
        c"an existing, writable directory on a disk (not tmpfs)",
        c"directory of the file tier; not set: the tier is closed",
        "One file is made in it, preallocated, readable by its owner alone, and unlinked at once, \
         so nothing is left behind however the process ends."
    ),
    param!(
        NvmeFile,
        c"DORMOUSE_NVME_FILE_BYTES",
        Kind::Size { least: MIB, most: 8 * TIB, percent: false },
        c"4GiB",
        c"1MiB to 8TiB",
        c"bytes of the file tier's file",
        "Preallocated when the runtime is made: a disk without room is found then, not in the \
         middle of a step."
    ),
    param!(
        NvmeWriteBudget,
        c"DORMOUSE_NVME_WRITE_BUDGET_BYTES",
        Kind::Size { least: 0, most: 1024 * TIB, percent: false },
        c"0",
        c"0 (no limit) to 1024TiB",
        c"most bytes to write to the file in a day",
        "Disks wear: one rated for a whole write of itself a day may be given its own size. The \
         budget starts full and fills evenly, up to a day's worth; a runtime made anew starts anew. \
         What a sleep would write is set aside before it begins. Where that is more than is left, \
         memory goes to the host tier, and what has no place there stays awake."
    ),
    param!(
        NvmeEngine,
        c"DORMOUSE_NVME_ENGINE",
        Kind::Choice(&["auto", "uring", "threads"]),
        c"auto",
        c"auto, uring, threads",
        c"who does the file I/O: io_uring, or threads that block",
        "With io_uring each I/O thread has several requests with the kernel at a time. Where the \
         system refuses it or O_DIRECT, `auto` goes on with threads, says so once and shows the \
         reason in `dormouse_info_t`; `uring` fails `dormouse_runtime_create`."
    ),
    param!(
        NvmeDepth,
        c"DORMOUSE_NVME_QUEUE_DEPTH",
        Kind::Count { least: 1, most: 256 },
        c"4",
        c"1 to 256",
        c"requests that each I/O thread has with io_uring at a time",
        "Requests are 4 MiB, so a few keep a disk busy; more make a read wait longer for the \
         writes before it. Writes leave a quarter of them to reads."
    ),
    param!(
        IoThreads,
        c"DORMOUSE_OFFLOAD_IO_THREADS",
        Kind::Count { least: 1, most: 64 },
        c"2",
        c"1 to 64",
        c"threads that do file I/O",
        "Each works on one chunk at a time, or with io_uring on DORMOUSE_NVME_QUEUE_DEPTH of them; \
         reads are taken before writes."
    ),
    param!(
        Inflight,
        c"DORMOUSE_OFFLOAD_INFLIGHT_BYTES",
        Kind::Size { least: MIB, most: TIB, percent: false },
        c"256MiB",
        c"1MiB to 1TiB",
        c"most bytes of sleeps in flight",
        "A layer that would go past it stays awake until there is room, rather than stall the \
         forward pass."
    ),
    param!(
        Residency,
        c"DORMOUSE_OFFLOAD_RESIDENCY",
        Kind::Choice(&["all", "fit"]),
        c"all",
        c"all, fit",
        c"how much of what may sleep does: all of it, or what the budget asks for",
        "`all` frees the most device memory. `fit` plans each node's step from the last of \
         its id with as many layers, at the rates measured: what fits the budget beside the microbatches \
         stays awake, the rest sleeps in host memory or the file and wakes as room comes. The first step sleeps \
         whole. Where a plan was wrong about the room more falls asleep, and the step goes on."
    ),
    param!(
        Window,
        c"DORMOUSE_OFFLOAD_WINDOW_LAYERS",
        Kind::Count { least: 1, most: 1024 },
        c"3",
        c"1 to 1024",
        c"layers woken ahead of need",
        "One is ruinous, a few are enough; each costs its saved bytes awake in phase C."
    ),
    param!(
        Checksum,
        c"DORMOUSE_OFFLOAD_CHECKSUM",
        Kind::Switch,
        c"on",
        c"on, off, true, false, yes, no, 1, 0",
        c"verify a CRC-32C of every chunk that wakes",
        "A mismatch is read once more and is then an error; the bytes are not handed out."
    ),
    param!(
        TraceEvents,
        c"DORMOUSE_TRACE_EVENTS_MAX",
        Kind::Count { least: 64, most: 1 << 21 },
        c"65536",
        c"64 to 2097152",
        c"events the timeline keeps",
        "The newest are kept and the lost are counted; about 128 bytes of memory each. Read when \
         the heap is made."
    ),
    param!(
        Log,
        c"DORMOUSE_LOG",
        Kind::Filter,
        c"warn",
        c"off, error, warn, info, debug or trace, and target=level pairs, separated by commas; \
          targets: alloc, device, ffi, offload, schedule, storage",
        c"which log events are emitted",
        "`info,offload=debug` emits events of level info and above, and those of `offload` from level \
         debug. Release builds contain no trace events. Read when the first runtime is created."
    ),
    param!(
        LogFile,
        c"DORMOUSE_LOG_FILE",
        Kind::Path,
        c"",
        c"a path that can be written; %h, %p, %r and %% stand for host, pid, rank and %",
        c"file that log events are appended to",
        "Standard error if not set. The rank is that of `RANK`, `OMPI_COMM_WORLD_RANK`, `PMI_RANK` or \
         `SLURM_PROCID`, otherwise 0. Read when the first runtime is created."
    ),
    param!(
        Config,
        c"DORMOUSE_CONFIG",
        Kind::Path,
        c"",
        c"a readable file of NAME = VALUE lines",
        c"file of parameters; the environment beats it",
        "`#` starts a comment. A dump of `dormouse_params_dump` is such a file.",
        false
    ),
    param!(
        Help,
        c"DORMOUSE_HELP",
        Kind::Switch,
        c"off",
        c"on, off, true, false, yes, no, 1, 0",
        c"print this table to standard error and go on",
        "Printed once per process, when the configuration is first read.",
        false
    ),
    param!(
        WarnUnknown,
        c"DORMOUSE_WARN_UNKNOWN",
        Kind::Switch,
        c"on",
        c"on, off, true, false, yes, no, 1, 0",
        c"warn about DORMOUSE_ names this library does not know",
        "One line for each name, with the nearest known one."
    ),
    param!(
        Library,
        c"DORMOUSE_LIB",
        Kind::Path,
        c"",
        c"the path of libdormouse.so",
        c"where the Python package finds the library; not read here",
        "Known to this table so that it causes no warning.",
        false
    ),
];

#[cfg(test)]
mod tests {
    use dormouse_offload::Residency;
    use dormouse_storage::IoEngine;

    use super::*;

    #[test]
    fn every_engine_that_can_be_chosen_exists() {
        let Kind::Choice(words) = TABLE[Key::NvmeEngine as usize].kind else { panic!() };
        assert!(words.iter().all(|word| IoEngine::named(word).is_some()));
        assert_eq!(words.len(), 3);
    }

    #[test]
    fn every_residency_that_can_be_chosen_exists() {
        let Kind::Choice(words) = TABLE[Key::Residency as usize].kind else { panic!() };
        assert!(words.iter().all(|word| Residency::named(word).is_some()));
        assert_eq!(words.len(), 2);
    }

    #[test]
    fn keys_index_their_own_entries_and_names_are_plain_and_unique() {
        for (at, param) in TABLE.iter().enumerate() {
            assert_eq!(param.key as usize, at, "{:?}", param.name);
            let name = param.name.to_str().unwrap();
            assert_eq!(name, param.name());
            assert!(name.starts_with("DORMOUSE_"));
            assert!(name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{name}");
            assert!(TABLE.iter().skip(at + 1).all(|other| other.name != param.name));
            assert!(
                !param.help.is_empty() && !param.accepts.is_empty() && !param.detail.is_empty()
            );
        }
    }
}
