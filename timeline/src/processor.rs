//! The clock of this process by the processor's time-stamp counter.
#![expect(unsafe_code, reason = "intrinsics of the processor")]

use crate::tsc::{Source, TscClock};
use std::arch::x86_64::{_mm_lfence, _rdtsc};

/// One for all timelines, whose times are compared.
static CLOCK: TscClock = TscClock::new();

/// Returns the time. `kernel_ns` reads the kernel's clock.
#[inline]
pub(crate) fn now_ns(kernel_ns: fn() -> u64) -> u64 {
    CLOCK.now_ns(&Processor { kernel_ns })
}

struct Processor {
    kernel_ns: fn() -> u64,
}

impl Source for Processor {
    #[inline]
    fn ticks(&self) -> u64 {
        // SAFETY: every x86-64 processor has the instruction, and it accesses no memory.
        unsafe { _rdtsc() }
    }

    fn kernel_ns(&self) -> u64 {
        (self.kernel_ns)()
    }

    fn fence(&self) {
        // SAFETY: every x86-64 processor has the instruction, and it only orders others.
        unsafe { _mm_lfence() };
    }
}
