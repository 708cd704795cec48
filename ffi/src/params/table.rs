//! The table of parameters.

use std::ffi::CStr;

use Kind::{Choice, Count, Filter, Path, PowerOfTwo, Set, Size, Switch};

/// Values that a parameter takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes; with `percent` also a percentage of this machine's memory.
    Size {
        min: u64,
        max: u64,
        percent: bool,
    },
    /// Bytes: 0 or a power of two.
    PowerOfTwo {
        max: u64,
    },
    Count {
        min: u64,
        max: u64,
    },
    Switch,
    Choice(&'static [&'static str]),
    /// Words separated by commas, or `off` for none.
    Set(&'static [&'static str]),
    Path,
    /// Levels of log events by target.
    Filter,
}

impl Kind {
    /// Its name in the C enumeration.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Self::Size { .. } | Self::PowerOfTwo { .. } => c"size",
            Self::Count { .. } => c"count",
            Self::Switch => c"switch",
            Self::Choice(_) => c"choice",
            Self::Set(_) => c"set",
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
    /// In the syntax of a configuration file; empty: not set.
    pub(crate) built_in: &'static CStr,
    /// Accepted values, as in messages.
    pub(crate) accepts: &'static CStr,
    pub(crate) help: &'static CStr,
    /// A paragraph for the docs page.
    pub(crate) detail: &'static str,
    /// Whether it is accepted in a configuration file.
    pub(crate) in_file: bool,
}

impl Key {
    pub(crate) fn name(self) -> &'static str {
        TABLE[self as usize].name()
    }
}

impl Param {
    /// Whether a value that is not set is chosen by the runtime.
    pub(crate) fn is_automatic(&self) -> bool {
        let is_number = matches!(self.kind, Size { .. } | Count { .. });
        is_number && self.built_in() == AUTOMATIC
    }

    pub(crate) fn name(&self) -> &'static str {
        ascii(self.name)
    }

    /// The built-in value as text; empty: not set.
    pub(crate) fn built_in(&self) -> &'static str {
        ascii(self.built_in)
    }

    pub(crate) fn accepts(&self) -> &'static str {
        ascii(self.accepts)
    }

    pub(crate) fn help(&self) -> &'static str {
        ascii(self.help)
    }
}

/// Text of the table, which is ASCII (tested).
fn ascii(text: &'static CStr) -> &'static str {
    text.to_str().unwrap_or_default()
}

/// The text of a value that the runtime chooses.
pub(crate) const AUTOMATIC: &str = "auto";

const KIB: u64 = 1 << 10;
/// The built-in value of [`Key::HeapMin`] (tested).
pub(crate) const HEAP_MIN_BUILT_IN_BYTES: u64 = 64 * KIB;
const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Defines [`Key`] and [`TABLE`] together: `KEY NAME { kind, built in, accepted, help, detail }`. A
/// parameter with `environment_only` is not accepted in a file.
macro_rules! table {
    ($($key:ident $name:literal {
        $kind:expr, $built_in:literal, $accepts:literal, $help:literal, $detail:literal
        $(, $environment_only:ident)?
    })*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(crate) enum Key { $($key),* }

        /// Every parameter, in the order of [`Key`].
        pub(crate) const TABLE: &[Param] = &[$(Param {
            key: Key::$key,
            name: $name,
            kind: $kind,
            built_in: $built_in,
            accepts: $accepts,
            help: $help,
            detail: $detail,
            in_file: [$(stringify!($environment_only),)? ""][0].is_empty(),
        }),*];
    };
}

table! {
    CpuBudget c"DORMOUSE_CPU_BUDGET_BYTES" {
        Size { min: MIB, max: 64 * TIB, percent: true }, c"90%",
        c"1MiB to 64TiB, or 1% to 100% of this machine's memory",
        c"limit on mapped memory of the host device, in bytes",
        "The limit covers awake, cached and staged memory. At the limit, cached pages are released \
         first, then dormant memory falls asleep. If that is not enough, the request fails with a \
         report. Under the preload library, a limit that is not set refuses nothing: malloc is then \
         served by libc. A machine's memory is what its cgroups allow. It was called \
         DORMOUSE_ALLOC_BUDGET_BYTES, which still works and causes one warning."
    }
    CudaBudget c"DORMOUSE_CUDA_BUDGET_BYTES" {
        Size { min: 0, max: 64 * TIB, percent: false }, c"0",
        c"0 (all memory of the GPU) to 64TiB",
        c"limit on mapped memory of each GPU, in bytes",
        "The equivalent of DORMOUSE_CPU_BUDGET_BYTES for GPUs. Leave room for other users of the \
         GPU: communication buffers, library workspaces, other processes."
    }
    CudaLargePage c"DORMOUSE_CUDA_LARGE_PAGE_BYTES" {
        PowerOfTwo { max: 1 << 30 }, c"0",
        c"0 (16MiB, or the page if that is larger) to 1GiB, a power of two, at least the page",
        c"large page size on a GPU, in bytes; equal to the page size: no large pages",
        "A block of at least two large pages consists of them, and of pages at its ends. One driver call maps or unmaps \
         a large page, so sleep and wake cost fewer calls. Read when the heap is created."
    }
    CudaPage c"DORMOUSE_CUDA_PAGE_BYTES" {
        PowerOfTwo { max: 1 << 30 }, c"0",
        c"0 (the driver's granularity, 2MiB) to 1GiB, a power of two",
        c"page size on a GPU, the unit of mapping, in bytes",
        "Larger pages waste more of the last page of each block. Large blocks use large pages too \
         (DORMOUSE_CUDA_LARGE_PAGE_BYTES). Read when the heap is created."
    }
    HeapMin c"DORMOUSE_HEAP_MIN_BYTES" {
        Size { min: 4 * KIB, max: TIB, percent: false }, c"64KiB",
        c"4KiB to 1TiB",
        c"smallest malloc request served in mode preload, in bytes",
        "Smaller requests go to libc. Each block consists of whole pages, so a small value wastes \
         memory. Read when the heap is created; a runtime cannot change it."
    }
    HeapReserve c"DORMOUSE_HEAP_RESERVE_BYTES" {
        Size { min: 64 * MIB, max: 64 * TIB, percent: false }, c"256GiB",
        c"64MiB to 64TiB",
        c"address space reserved for all blocks, in bytes",
        "Reserves addresses and maps no memory. All awake and sleeping blocks must fit. Lower it under \
         `ulimit -v`. Read when the heap is created; a runtime cannot change it."
    }
    HostBudget c"DORMOUSE_HOST_BUDGET_BYTES" {
        Size { min: 0, max: 64 * TIB, percent: true }, c"auto",
        c"auto, or 0 (closed) to 64TiB, or 1% to 100% of this machine's memory",
        c"limit on the host tier, in bytes",
        "Pinned host memory for sleeping data and stash copies, allocated on demand. On the host \
         device this is ordinary memory: sleep does not reduce the resident set. Automatic: what it holds \
         and half of the memory that is available, at most three quarters of both, revised after each step and \
         when the tier is full."
    }
    NvmeDir c"DORMOUSE_NVME_DIR" {
        Path, c"",
        c"an existing, writable directory on a disk (not tmpfs)",
        c"directory of the NVMe tier; if not set, the tier is closed",
        "The runtime creates one preallocated file, readable by its owner only, and unlinks it \
         immediately, so no file remains when the process ends."
    }
    NvmeFile c"DORMOUSE_NVME_FILE_BYTES" {
        Size { min: MIB, max: 8 * TIB, percent: false }, c"auto",
        c"auto, or 1MiB to 8TiB",
        c"size of the NVMe tier, in bytes",
        "Preallocated when the runtime is created, so that a full disk fails the creation and not a \
         training step. Automatic: 4 GiB are preallocated, or half of what the disk has free if that is \
         less than 4 GiB. The file grows when it is full, as long as a sixteenth of the disk stays free; \
         what then finds no room sleeps in the host tier or stays awake."
    }
    NvmeWriteBudget c"DORMOUSE_NVME_WRITE_BUDGET_BYTES" {
        Size { min: 0, max: 1024 * TIB, percent: false }, c"0",
        c"0 (no limit) to 1024TiB",
        c"limit on bytes written to the NVMe tier in 24 hours",
        "Limits disk wear. For a disk rated at one drive write per day, set the size of the disk. The \
         budget refills continuously up to one day's worth; a new runtime starts with a full budget. \
         A sleep reserves its bytes before it writes. If the budget is too small, memory goes to the \
         host tier, or stays awake if that tier is full."
    }
    NvmeEngine c"DORMOUSE_NVME_ENGINE" {
        Choice(&["auto", "uring", "threads"]), c"auto",
        c"auto, uring, threads",
        c"I/O engine of the NVMe tier: io_uring or blocking threads",
        "With io_uring, each I/O thread has several requests in flight. If the system refuses io_uring \
         or O_DIRECT, `auto` falls back to threads, logs one warning and reports the reason in \
         `dormouse_info_t`; `uring` fails `dormouse_runtime_create`."
    }
    NvmeDepth c"DORMOUSE_NVME_QUEUE_DEPTH" {
        Count { min: 1, max: 256 }, c"auto",
        c"auto, or 1 to 256",
        c"io_uring requests in flight per I/O thread",
        "Requests are 4 MiB. A few keep a disk busy; more increase the latency of reads behind \
         writes. A quarter of the requests is reserved for reads. Automatic: 4 to 32, twice what the disk \
         moves in the time that it takes to answer, as measured when the runtime is created."
    }
    IoThreads c"DORMOUSE_OFFLOAD_IO_THREADS" {
        Count { min: 1, max: 64 }, c"auto",
        c"auto, or 1 to 64",
        c"number of I/O threads of the NVMe tier",
        "A thread processes one chunk at a time, or DORMOUSE_NVME_QUEUE_DEPTH chunks with io_uring. \
         Reads take precedence over writes. Automatic: 2 with io_uring; without it, one for every two CPUs, \
         2 to 8."
    }
    Inflight c"DORMOUSE_OFFLOAD_INFLIGHT_BYTES" {
        Size { min: MIB, max: TIB, percent: false }, c"auto",
        c"auto, or 1MiB to 1TiB",
        c"limit on bytes that fall asleep at a time",
        "A layer that exceeds the limit stays awake until earlier copies complete. The forward pass \
         does not stall. Wakes from the file through host memory have the same limit, but two are always under \
         way. Automatic: 256 MiB, or what the measured links move in 5 ms if that is more; at most an eighth \
         of the memory that is available. Revised after each step."
    }
    Residency c"DORMOUSE_OFFLOAD_RESIDENCY" {
        Choice(&["all", "fit"]), c"all",
        c"all, fit",
        c"residency policy of dormant memory: all of it sleeps, or as much as the budget requires",
        "`all` frees the most device memory. `fit` plans each step of a prefix from its latest step \
         with the same id and number of layers, at measured rates: memory that fits the budget next to \
         the microbatches stays awake, the rest sleeps in the host or NVMe tier and wakes as room \
         becomes available. In the first step, all of it sleeps. If a plan underestimates the memory \
         in use, more of it falls asleep and the step continues."
    }
    Stray c"DORMOUSE_OFFLOAD_STRAY" {
        Choice(&["wake", "stop"]), c"wake",
        c"wake, stop",
        c"what happens when a thread accesses memory that sleeps: it wakes, or the process stops",
        "Host device only. With `wake`, the thread waits until the memory is awake and goes on; the \
         access is counted and named in the report of its prefix and logged as a warning. If the memory \
         does not wake, the process ends by SIGSEGV with a message. `stop` ends it at the first such \
         access, which shows where it comes from. System calls fail with EFAULT either way."
    }
    Window c"DORMOUSE_OFFLOAD_WINDOW_LAYERS" {
        Count { min: 1, max: 1024 }, c"auto",
        c"auto, or 1 to 1024",
        c"number of layers woken ahead",
        "A value of 1 stalls every layer; a few layers are enough. Each layer keeps its saved bytes \
         awake in phase C. Automatic: 3, and after each step as many as would have shortened it, as far as \
         phase C then needs no more memory than the step has used. It rises at once and falls after 8 steps."
    }
    Checksum c"DORMOUSE_OFFLOAD_CHECKSUM" {
        Switch, c"on",
        c"on, off, true, false, yes, no, 1, 0",
        c"verify a CRC-32C of each chunk on wake",
        "After a mismatch the chunk is read a second time. A second mismatch is an error, and the \
         memory does not wake."
    }
    TraceEvents c"DORMOUSE_TRACE_EVENTS_MAX" {
        Count { min: 64, max: 1 << 21 }, c"65536",
        c"64 to 2097152",
        c"number of slices and instants that the timeline keeps, and of changes of gauges",
        "The newest of each are kept, exactly this many, and the number dropped is counted. Each takes 64 bytes, of a \
         ring whose size is the next power of two. Read when the heap is created."
    }
    Log c"DORMOUSE_LOG" {
        Filter, c"warn",
        c"off, error, warn, info, debug or trace, and target=level pairs, separated by commas; \
          targets: alloc, device, ffi, offload, schedule, storage",
        c"which log events are emitted",
        "`info,offload=debug` emits events of level info and above, and those of `offload` from level \
         debug. Release builds contain no trace events. Read when the first runtime is created."
    }
    LogFile c"DORMOUSE_LOG_FILE" {
        Path, c"",
        c"a writable path, in which %h is the host, %p the pid, %r the rank and %% a %",
        c"file that log events are appended to",
        "Standard error if not set. The rank is that of `RANK`, `OMPI_COMM_WORLD_RANK`, `PMI_RANK` or \
         `SLURM_PROCID`, otherwise 0. A FIFO that no process reads is an error. Read when the first \
         runtime is created."
    }
    Dump c"DORMOUSE_DUMP" {
        Set(&["oom", "exit", "signal", "trigger"]), c"oom",
        c"off, or oom, exit, signal and trigger, separated by commas",
        c"when timeline dumps are written into DORMOUSE_DUMP_DIR",
        "A value replaces the default, so name `oom` too. `oom`: a device's memory runs out; the error names the dump. `exit`: the process calls `exit` or returns from \
         `main`, as Python does; a process that a signal or `_exit` ends writes nothing. `signal`: \
         DORMOUSE_DUMP_SIGNAL comes. `trigger`: the file DORMOUSE_DUMP_TRIGGER appears. A thread of the \
         library writes dumps once the process has a runtime; a request waits for it at most 10 s. A process keeps the \
         first dump and the last 7 for `oom`, and the first and the last 63 for `signal` and for `trigger`; a newer one \
         replaces the oldest but the first. After 128 attempts for a reason, failed ones included, none is written. Read \
         when the first runtime is created."
    }
    DumpDir c"DORMOUSE_DUMP_DIR" {
        Path, c"",
        c"an existing, writable directory, in which %h is the host, %p the pid, %r the rank and %% a %",
        c"directory of timeline dumps",
        "A dump is a page for a browser, named `dormouse-<host>-rank<rank>-pid<pid>-<number>-<reason>-<device>.html`. \
         The number is the next that no file has. It is written under another name and renamed. Nothing is written if the \
         directory is not set. Dumps that fail, on a full disk or in a directory that cannot be written, cause one \
         warning for each reason and cause, and the program goes on."
    }
    DumpSignal c"DORMOUSE_DUMP_SIGNAL" {
        Choice(&["SIGUSR1", "SIGUSR2"]), c"SIGUSR1",
        c"SIGUSR1, SIGUSR2",
        c"signal that requests a dump, if DORMOUSE_DUMP has signal",
        "A handler is installed only if the signal has its default action. If the program handles or ignores it, a \
         warning says so, and the program's action stays. Signals within a second of a dump are one request. A \
         process that has created no runtime yet ends by the signal, as without the library."
    }
    DumpTrigger c"DORMOUSE_DUMP_TRIGGER" {
        Path, c"dump-rank%r",
        c"a path, absolute or below DORMOUSE_DUMP_DIR, in which %h is the host, %p the pid, %r the rank and %% a %",
        c"file that requests a dump when it appears, if DORMOUSE_DUMP has trigger",
        "It is looked for ten times a second and removed: `touch $DORMOUSE_DUMP_DIR/dump-rank0` requests a dump of rank 0. \
         Of processes with the same path, one writes a dump."
    }
    AllocLogDir c"DORMOUSE_ALLOC_LOG_DIR" {
        Path, c"",
        c"an existing, writable directory, in which %h is the host, %p the pid, %r the rank and %% a %",
        c"directory of logs of allocations, which `dormouse replay` reads",
        "Each device has a file, `dormouse-<host>-rank<rank>-pid<pid>-<device>.csv` (`…-pid<pid>-<number>-…` \
         if there is such a file), with a row for each allocation, free \
         and request that found no memory: CSV as RMM's logging adaptor writes it, so its replay reads it too. A GPU's \
         begins with its first allocation, the host's with the first runtime, which writes a row for each block that is \
         live. A thread writes the rows; the exit of the process waits for it at most 10 s. While a log is on, small \
         blocks take a lock. A log ends with a warning where the file cannot be written, operations come faster than \
         they are written, or at 4,000,000 rows or 256 MiB, the limits of `dormouse replay`."
    }
    StatsFile c"DORMOUSE_STATS_FILE" {
        Path, c"/dev/shm/dormouse.%u.%p",
        c"off, or a path for a regular file, in which %h is the host, %p the pid, %r the rank, %u the user id and %% a %",
        c"file of live figures, which `dormouse top` and other processes read",
        "One page of 4096 bytes, readable by its owner only, in a memory file system if possible \
         (/dev/shm). It is created with the runtime, updated ten times a second and removed with \
         the runtime. An existing file is replaced, so give each process a name of its own. If a \
         process has several runtimes, the file shows the first. `dormouse top` finds pages at the \
         built-in path by itself. There, a page that cannot be created is no error, a page whose \
         place a running process of another container has gets `.1`, `.2` and so on behind its \
         name, and pages that killed processes left are removed."
    }
    Config c"DORMOUSE_CONFIG" {
        Path, c"",
        c"a readable regular file of NAME = VALUE lines, at most 1MiB",
        c"configuration file; the environment takes precedence",
        "`#` starts a comment. A value that contains one is quoted: `\"/a #1\"`, with `\\\"`, `\\\\`, `\\n` and `\\r` for a \
         quote, a backslash and line ends. `dormouse_runtime_dump` writes such a file with \
         `DORMOUSE_FORMAT_CONFIG`.", environment_only
    }
    Help c"DORMOUSE_HELP" {
        Switch, c"off",
        c"on, off, true, false, yes, no, 1, 0",
        c"print all parameters to standard error",
        "Printed once per process, when the configuration is first read. The process continues.", environment_only
    }
    WarnUnknown c"DORMOUSE_WARN_UNKNOWN" {
        Switch, c"on",
        c"on, off, true, false, yes, no, 1, 0",
        c"warn about unknown names that start with DORMOUSE_",
        "One warning per name, with the nearest known name."
    }
    Library c"DORMOUSE_LIB" {
        Path, c"",
        c"the path of libdormouse.so",
        c"path of the library, read by the Python package only",
        "Listed so that it does not cause a warning.", environment_only
    }
}

/// Earlier names that still work, with a warning.
pub(super) const RENAMED: &[(&str, Key)] = &[("DORMOUSE_ALLOC_BUDGET_BYTES", Key::CpuBudget)];

#[cfg(test)]
mod tests {
    use dormouse_offload::ResidencyPolicy;
    use dormouse_storage::IoEngine;

    use super::*;

    #[test]
    fn every_accepted_engine_exists() {
        let Kind::Choice(words) = TABLE[Key::NvmeEngine as usize].kind else { panic!() };
        assert!(words.iter().all(|word| IoEngine::named(word).is_some()));
        assert_eq!(words.len(), 3);
    }

    #[test]
    fn every_accepted_residency_policy_exists() {
        let Kind::Choice(words) = TABLE[Key::Residency as usize].kind else { panic!() };
        assert!(words.iter().all(|word| ResidencyPolicy::named(word).is_some()));
        assert_eq!(words.len(), 2);
    }

    #[test]
    fn keys_index_their_entries_and_names_are_unique() {
        for (at, param) in TABLE.iter().enumerate() {
            assert_eq!(param.key as usize, at, "{:?}", param.name);
            let name = param.name.to_str().unwrap();
            assert_eq!(name, param.name());
            assert!(name.starts_with("DORMOUSE_"));
            assert!(name.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{name}");
            assert!(TABLE.iter().skip(at + 1).all(|other| other.name != param.name));
            assert!(RENAMED.iter().all(|(earlier, _)| *earlier != name));
            assert!(
                !param.help.is_empty() && !param.accepts.is_empty() && !param.detail.is_empty()
            );
        }
    }
}
