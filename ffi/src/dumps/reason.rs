//! Why a dump is written.

/// Limit of the dumps of a process where memory runs out: a trainer may repeat a request for ever.
const OUT_OF_MEMORY_DUMPS_MAX: u64 = 8;
/// Limit of the dumps of a process by signal, and of those by the trigger file.
const REQUESTED_DUMPS_MAX: u64 = 64;

/// The cause of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Reason {
    OutOfMemory,
    Exit,
    Signal,
    Trigger,
    /// `dormouse_runtime_write_dump`, `dormouse_runtime_dump`.
    Call,
}

impl Reason {
    pub(super) const COUNT: usize = 5;

    /// Its word in `DORMOUSE_DUMP` and in the names of files.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::OutOfMemory => "oom",
            Self::Exit => "exit",
            Self::Signal => "signal",
            Self::Trigger => "trigger",
            Self::Call => "call",
        }
    }

    /// Limit of the dumps of a process for this reason.
    pub(super) const fn dumps_max(self) -> u64 {
        match self {
            Self::OutOfMemory => OUT_OF_MEMORY_DUMPS_MAX,
            Self::Exit => 1,
            Self::Signal | Self::Trigger => REQUESTED_DUMPS_MAX,
            // The program counts its own calls.
            Self::Call => u64::MAX,
        }
    }
}
