//! Kernels on the GPU against their CPU twins: sums bit for bit, merges within a bound; and how
//! fast they are.

use std::time::Instant;

use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::{AddressRange, Device, Fill};
use dormouse_kernels::{DType, Empty, LogBase, MergeArgs, cpu};
use dormouse_offload::{Compute, merge_lse};
use half::{bf16, f16};
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
    rate_of(bench, bytes, || {
        // SAFETY: mapped pages of ours.
        unsafe { bench.device.accumulate(to, from, elems, dtype, &bench.stream) }.unwrap();
    })
}

/// Gigabytes per second of a launch that moves `bytes`.
fn rate_of(bench: &Bench, bytes: usize, launch: impl Fn()) -> f64 {
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

const MERGED_ROWS: usize = 32 * 4096;
const HEAD_DIM: usize = 128;

/// Arguments of a merge of [`MERGED_ROWS`] in memory from `base` on: three outputs, then three log-sum-exps.
fn merge_args(base: usize, dtype: DType) -> MergeArgs {
    let out_bytes = MERGED_ROWS * HEAD_DIM * dtype.size_bytes();
    let lse_bytes = MERGED_ROWS * dtype.accumulator().size_bytes();
    let out = |index: usize| (base + index * out_bytes) as *mut std::ffi::c_void;
    let lse = |index: usize| (base + 3 * out_bytes + index * lse_bytes) as *mut std::ffi::c_void;
    MergeArgs {
        out1: out(0),
        out2: out(1),
        out: out(2),
        lse1: lse(0),
        lse2: lse(1),
        lse: lse(2),
        rows: MERGED_ROWS as u64,
        head_dim: HEAD_DIM as u64,
        dtype,
        base: LogBase::E,
        empty: Empty::MinusInfinity,
    }
}

/// Merges of parts of one type; the largest difference in units of the bound.
fn merge(bench: &Bench, dtype: DType) -> f64 {
    let here = merge_args(bench.pinned.start, dtype);
    let (elems, low) = (MERGED_ROWS * HEAD_DIM, dtype != dtype.accumulator());
    let words = random(7, 8 * 2 * elems);
    // SAFETY: pinned memory of ours, long enough, that no copy uses.
    unsafe {
        if low {
            // Values from 2^-7 to 2 by their bits, of either sign.
            let (fraction, least) = if dtype == DType::F16 { (10, 8) } else { (7, 120) };
            let values = std::slice::from_raw_parts_mut(here.out1 as *mut u16, 2 * elems);
            for (value, word) in values.iter_mut().zip(&words) {
                let exponent = (least + (word >> 32 & 7)) << fraction;
                *value = (word & (0x8000 | ((1 << fraction) - 1)) | exponent) as u16;
            }
        } else {
            let values = std::slice::from_raw_parts_mut(here.out1 as *mut f32, 2 * elems);
            for (value, word) in values.iter_mut().zip(&words) {
                *value = (word >> 40) as f32 / (1 << 20) as f32 - 8.0;
            }
        }
        let lses = std::slice::from_raw_parts_mut(here.lse1 as *mut f32, 2 * MERGED_ROWS);
        for (lse, word) in lses.iter_mut().zip(&words) {
            *lse = (word >> 40) as f32 / (1 << 20) as f32 - 8.0;
        }
        // A part without keys.
        lses[5] = f32::NEG_INFINITY;
    }
    let bytes = MERGED_ROWS * (3 * HEAD_DIM * dtype.size_bytes() + 3 * size_of::<f32>());
    bench.copy(0, bytes, false);
    let there = merge_args(bench.memory.start, dtype);
    // SAFETY: mapped pages, and pinned memory, of ours, laid out as the arguments say.
    unsafe {
        merge_lse(&bench.device, &there, &bench.stream).unwrap();
        cpu::merge_lse(&here).unwrap();
    }
    let read = || {
        // SAFETY: pinned memory of ours, just written.
        unsafe {
            let lse = std::slice::from_raw_parts(here.lse as *const f32, MERGED_ROWS).to_vec();
            if !low {
                return (std::slice::from_raw_parts(here.out as *const f32, elems).to_vec(), lse);
            }
            let bits = std::slice::from_raw_parts(here.out as *const u16, elems);
            (bits.iter().map(|&bits| widened(bits, dtype)).collect(), lse)
        }
    };
    let wanted = read();
    bench.copy(0, bytes, true);
    let seen = read();
    // Weights come from an exponential and a quotient, each within a few units in the last place. A narrower
    // output is then rounded on either side, to values at most this far apart.
    const UNITS: f32 = 16.0;
    let rounding = match dtype {
        DType::F16 => 1.0 / 1024.0,
        DType::Bf16 => 1.0 / 128.0,
        _ => 0.0,
    };
    let mut worst = 0.0_f64;
    let mut compare = |seen: f32, wanted: f32, scale: f32, rounding: f32| {
        let bound = UNITS * f32::EPSILON * scale + rounding * wanted.abs();
        let over = f64::from((seen - wanted).abs() / bound);
        // Value by value: `max` drops NaN.
        assert!(over <= 1.0, "a merge of {dtype:?} is {over} times its bound off");
        worst = worst.max(over);
    };
    for (&seen, &wanted) in seen.0.iter().zip(&wanted.0) {
        compare(seen, wanted, 8.0, rounding);
    }
    for (&seen, &wanted) in seen.1.iter().zip(&wanted.1) {
        compare(seen, wanted, wanted.abs().max(1.0), 0.0);
    }
    worst
}

/// A 16-bit float as FP32.
fn widened(bits: u16, dtype: DType) -> f32 {
    if dtype == DType::Bf16 {
        bf16::from_bits(bits).to_f32()
    } else {
        f16::from_bits(bits).to_f32()
    }
}

/// Gigabytes per second of a merge: two outputs read, one written.
fn merge_rate(bench: &Bench, dtype: DType) -> f64 {
    let args = merge_args(bench.memory.start, dtype);
    let bytes = 3 * MERGED_ROWS * HEAD_DIM * dtype.size_bytes();
    rate_of(bench, bytes, || {
        // SAFETY: mapped pages of ours.
        unsafe { merge_lse(&bench.device, &args, &bench.stream) }.unwrap();
    })
}

/// No options.
pub(crate) fn check(_: &Options) -> Value {
    let bench = Bench::new(256 * MIB);
    let rows = [DType::F16, DType::Bf16, DType::F32, DType::F64].map(|dtype| {
        json!({
            "dtype": format!("{dtype:?}"),
            "compared": accumulate(&bench, dtype),
            "gb_per_s": rate(&bench, dtype),
        })
    });
    let merged = [DType::F16, DType::Bf16, DType::F32];
    let worst = merged.map(|dtype| merge(&bench, dtype)).into_iter().fold(0.0, f64::max);
    let rates = merged.map(|dtype| (format!("{dtype:?}"), json!(merge_rate(&bench, dtype))));
    json!({
        "accumulate": rows,
        "merge_worst_over_bound": worst,
        "merge_gb_per_s": rates.into_iter().collect::<serde_json::Map<_, _>>(),
    })
}
