//! Why a dump is written.

/// Limit of the dumps of a process where memory runs out that stay.
const OUT_OF_MEMORY_DUMPS_MAX: usize = 8;
/// Limit of the dumps of a process by signal, and of those by the trigger file, that stay.
const REQUESTED_DUMPS_MAX: usize = 64;
/// Limit of the attempts of a process for one reason, also of those that fail: a trainer may repeat a request for ever, and
/// a disk may be slow to refuse.
const ATTEMPTS_MAX: u64 = 128;

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

    /// Limit of the dumps of a process for this reason that stay.
    pub(super) const fn dumps_max(self) -> usize {
        match self {
            Self::OutOfMemory => OUT_OF_MEMORY_DUMPS_MAX,
            Self::Signal | Self::Trigger => REQUESTED_DUMPS_MAX,
            // There is one exit, and the program counts its own calls.
            Self::Exit | Self::Call => usize::MAX,
        }
    }

    /// Limit of the attempts of a process for this reason.
    pub(super) const fn attempts_max(self) -> u64 {
        match self {
            Self::Exit => 1,
            Self::OutOfMemory | Self::Signal | Self::Trigger => ATTEMPTS_MAX,
            Self::Call => u64::MAX,
        }
    }
}
