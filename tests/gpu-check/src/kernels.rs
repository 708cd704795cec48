//! Kernels on the GPU against their CPU twins: sums bit for bit, merges within a bound; and how
//! fast they are.

use std::time::Instant;

use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::{AddressRange, Device, Fill};
use dormouse_kernels::{DType, Empty, LogBase, MergeArgs, cpu};
use dormouse_offload::{Compute, merge_lse};
use serde_json::{Value, json};

use crate::{Options, median};

const MIB: usize = 1 << 20;
const ROUNDS: usize = 7;
/// Launches of one measurement.
const LAUNCHES: usize = 20;
/// Numbers of elements that meet every head and tail of the vector loop.
const SIZES: [usize; 6] = [1, 7, 255, 4096, 100_003, 1 << 22];

/// A GPU with pages for operands, and pinned memory to see them through.
struct Bench {
    device: CudaDevice,
    stream: <CudaDevice as Device>::Stream,
    memory: AddressRange,
    pinned: AddressRange,
}

impl Bench {
    fn new(bytes: usize) -> Self {
        let device = CudaDevice::new(&CudaConfig::default()).unwrap();
        let whole = bytes.next_multiple_of(device.page_bytes());
        let memory = AddressRange::new(device.address_space().start, whole);
        device.map(memory, Fill::Zero).unwrap();
        let stream = device.create_stream("kernels").unwrap();
        let pinned = device.allocate_pinned(whole).unwrap();
        Self { device, stream, memory, pinned }
    }

    fn finish(&self) {
        let reached = self.device.record(&self.stream).unwrap();
        self.device.synchronize(&reached).unwrap();
    }

    /// Moves bytes between the two at the same offset.
    fn copy(&self, offset: usize, bytes: usize, out: bool) {
        let (there, here) = (self.memory.start + offset, self.pinned.start + offset);
        let (to, from) = if out { (here, there) } else { (there, here) };
        // SAFETY: both are ours and long enough.
        unsafe { self.device.copy(to, from, bytes, &self.stream) }.unwrap();
        self.finish();
    }
}

/// Random bits, of which every value of a type can come.
fn random(seed: u64, bytes: usize) -> Vec<u64> {
    let mut state = seed;
    (0..bytes.div_ceil(8))
        .map(|_| {
            // splitmix64, as in `sleep.rs`.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed ^ (mixed >> 27)
        })
        .collect()
}

/// The same number, or no number on both sides.
fn same(dtype: DType, one: &[u8], other: &[u8]) -> bool {
    let width = dtype.size_bytes();
    one.chunks_exact(width).zip(other.chunks_exact(width)).all(|(one, other)| {
        let is_nan = |bytes: &[u8]| match dtype {
            DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
            _ => f32::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        };
        one == other || (is_nan(one) && is_nan(other))
    })
}

/// Sums of one type, from an aligned and from an odd address; the number of elements compared.
fn accumulate(bench: &Bench, dtype: DType) -> usize {
    let (wide, narrow) = (dtype.accumulator().size_bytes(), dtype.size_bytes());
    let mut compared = 0;
    for elems in SIZES {
        for shift in [0, 1] {
            let (sums_at, source_at) = (wide * shift, 32 * MIB + narrow * shift);
            let sums = random(elems as u64, wide * elems);
            let source = random(elems as u64 + 1, narrow * elems);
            let put = |at: usize, words: &[u64], bytes: usize| {
                // SAFETY: pinned memory of ours, long enough, that no copy uses.
                unsafe {
                    let to = (bench.pinned.start + at) as *mut u8;
                    std::ptr::copy_nonoverlapping(words.as_ptr().cast(), to, bytes);
                }
                bench.copy(at, bytes, false);
            };
            put(sums_at, &sums, wide * elems);
            put(source_at, &source, narrow * elems);
            let (to, from) = (bench.memory.start + sums_at, bench.memory.start + source_at);
            // SAFETY: mapped pages of ours, aligned for the types.
            unsafe { bench.device.accumulate(to, from, elems, dtype, &bench.stream) }.unwrap();
            let (here, there) = (bench.pinned.start + sums_at, bench.pinned.start + source_at);
            // SAFETY: the same operands in pinned memory.
            unsafe { cpu::accumulate(here as *mut u8, there as *const u8, elems, dtype) }.unwrap();
            // SAFETY: pinned memory of ours, just written.
            let bytes = unsafe { std::slice::from_raw_parts(here as *const u8, wide * elems) };
            let wanted = bytes.to_vec();
            bench.copy(sums_at, wide * elems, true);
            assert!(same(dtype.accumulator(), &wanted, bytes), "{dtype:?} {elems} {shift}");
            compared += elems;
        }
    }
    compared
}

/// Gigabytes per second of a sum of 64 Mi elements at most: sums read and written, gradients read.
fn rate(bench: &Bench, dtype: DType) -> f64 {
    let elems = 4 << 20;
    let bytes = elems * (2 * dtype.accumulator().size_bytes() + dtype.size_bytes());
    let (to, from) = (bench.memory.start, bench.memory.start + 32 * MIB);
    let launch = || {
        // SAFETY: mapped pages of ours.
        unsafe { bench.device.accumulate(to, from, elems, dtype, &bench.stream) }.unwrap();
    };
    launch();
    let figures = (0..ROUNDS).map(|_| {
        bench.finish();
        let start = Instant::now();
        (0..LAUNCHES).for_each(|_| launch());
        bench.finish();
        (LAUNCHES * bytes) as f64 / start.elapsed().as_secs_f64() / 1e9
    });
    median(figures.collect())
}

/// Merges of FP32 parts; the largest difference in units of the bound.
fn merge(bench: &Bench) -> f64 {
    let (rows, head_dim) = (1000_usize, 128_usize);
    let floats = rows * head_dim;
    let at = [0, floats, 2 * floats, 3 * floats, 3 * floats + rows, 3 * floats + 2 * rows];
    let total = 3 * floats + 3 * rows;
    // SAFETY: pinned memory of ours, long enough, that no copy uses.
    let values = unsafe { std::slice::from_raw_parts_mut(bench.pinned.start as *mut f32, total) };
    for (value, word) in values.iter_mut().zip(random(7, total * 8)) {
        *value = (word >> 40) as f32 / (1 << 20) as f32 - 8.0;
    }
    // A part without keys.
    values[at[3] + 5] = f32::NEG_INFINITY;
    bench.copy(0, total * 4, false);
    let args = |base: usize| {
        let place = |index: usize| (base + at[index] * 4) as *mut std::ffi::c_void;
        MergeArgs {
            out1: place(0),
            out2: place(1),
            out: place(2),
            lse1: place(3),
            lse2: place(4),
            lse: place(5),
            rows: rows as u64,
            head_dim: head_dim as u64,
            dtype: DType::F32,
            base: LogBase::E,
            empty: Empty::MinusInfinity,
        }
    };
    // SAFETY: mapped pages, and pinned memory, of ours, laid out as the arguments say.
    unsafe {
        merge_lse(&bench.device, &args(bench.memory.start), &bench.stream).unwrap();
        cpu::merge_lse(&args(bench.pinned.start)).unwrap();
    }
    let wanted = values.to_vec();
    bench.copy(0, total * 4, true);
    // Weights come from an exponential and a quotient, each within a few units in the last place.
    const UNITS: f32 = 16.0;
    let mut worst = 0.0_f64;
    for (index, (seen, wanted)) in values.iter().zip(&wanted).enumerate().skip(at[2]) {
        let is_input = (at[3]..at[5]).contains(&index);
        let scale = if index < at[3] { 8.0 } else { wanted.abs().max(1.0) };
        let off = f64::from((seen - wanted).abs() / (UNITS * f32::EPSILON * scale));
        if !is_input {
            worst = worst.max(off);
        }
    }
    assert!(worst <= 1.0, "a merge is {worst} times its bound off");
    worst
}

/// No options.
pub(crate) fn check(_: &Options) -> Value {
    let bench = Bench::new(128 * MIB);
    let rows = [DType::F16, DType::Bf16, DType::F32, DType::F64].map(|dtype| {
        json!({
            "dtype": format!("{dtype:?}"),
            "compared": accumulate(&bench, dtype),
            "gb_per_s": rate(&bench, dtype),
        })
    });
    json!({ "accumulate": rows, "merge_worst_over_bound": merge(&bench) })
}
