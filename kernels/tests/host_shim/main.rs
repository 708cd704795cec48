//! The CUDA sources, compiled as C++ and run on this CPU, against the CPU twins (I1, I6). What this
//! cannot see is what nvcc makes of them, and the hardware's own rounding and exponentials.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod accumulate;
mod buffer;
mod merge;
mod shim;

/// The same numbers on every run: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In [-1, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}
