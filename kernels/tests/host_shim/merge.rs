//! The two forms call different exponentials and logarithms, each within one unit in the last place
//! (`2ε`, `ε` half a unit in the last place of 1). From there, `other` (merge.rs) differs by `4ε`
//! relatively; `1 + other` and the division add `2ε` each, so weights differ by `8ε`; two products
//! and a sum add `2ε` each to an FP64 output: in all `12ε·(|o1|·w1 + |o2|·w2)`. A logarithm of at
//! most 1 differs by `4ε + 4ε + 2ε`, and the last sum adds `2ε·|lse|`. An FP32 result is within
//! `3ε·(…)` and `ε·|lse|` of the exact one on either side (merge.rs), ε being FP32's. A 16-bit output is
//! rounded once more on either side, by half the distance to the next value.

use std::ffi::c_void;

use dormouse_kernels::cuda::Launch;
use dormouse_kernels::{DType, Empty, LogBase, MergeArgs, cpu};
use half::{bf16, f16};

use super::Random;
use super::buffer::Buffer;
use super::shim;

/// A type of outputs.
trait Float: Copy + Into<f64> {
    /// Type of the log-sum-exps.
    type Sum: Copy + Into<f64>;
    const DTYPE: DType;
    /// Half a unit in the last place of 1, of the log-sum-exps.
    const EPSILON: f64;
    /// In `EPSILON`: how far apart outputs may be, by `|o1|·w1 + |o2|·w2`.
    const OUT_UNITS: f64;
    /// How far a last rounding may move an output, relatively; 0 if there is none.
    const ROUNDING: f64;
    /// A product, or an output, that small loses bits.
    const SMALLEST: f64;
    fn of(value: f64) -> Self;
    fn sum_of(value: f64) -> Self::Sum;
}

impl Float for f32 {
    type Sum = Self;
    const DTYPE: DType = DType::F32;
    const EPSILON: f64 = f32::EPSILON as f64 / 2.0;
    const OUT_UNITS: f64 = 6.0;
    const ROUNDING: f64 = 0.0;
    const SMALLEST: f64 = f32::MIN_POSITIVE as f64;

    fn of(value: f64) -> Self {
        value as Self
    }

    fn sum_of(value: f64) -> Self {
        value as Self
    }
}

impl Float for f64 {
    type Sum = Self;
    const DTYPE: DType = DType::F64;
    const EPSILON: f64 = f64::EPSILON / 2.0;
    const OUT_UNITS: f64 = 12.0;
    const ROUNDING: f64 = 0.0;
    const SMALLEST: f64 = f64::MIN_POSITIVE;

    fn of(value: f64) -> Self {
        value
    }

    fn sum_of(value: f64) -> Self {
        value
    }
}

macro_rules! narrow_float {
    ($kind:ident, $dtype:expr) => {
        impl Float for $kind {
            type Sum = f32;
            const DTYPE: DType = $dtype;
            const EPSILON: f64 = f32::EPSILON as f64 / 2.0;
            const OUT_UNITS: f64 = 6.0;
            const ROUNDING: f64 = $kind::EPSILON.to_f64_const() / 2.0;
            // Of FP16 the distance between subnormals.
            const SMALLEST: f64 = $kind::MIN_POSITIVE_SUBNORMAL.to_f64_const();

            fn of(value: f64) -> Self {
                $kind::from_f64(value)
            }

            fn sum_of(value: f64) -> f32 {
                value as f32
            }
        }
    };
}

narrow_float!(f16, DType::F16);
narrow_float!(bf16, DType::Bf16);

/// Where the launch writes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Apart,
    First,
    Second,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    head_dim: usize,
    /// Of the first part, the second, and outputs apart.
    slacks: [usize; 3],
    place: Place,
    grid: Option<u32>,
    base: LogBase,
    empty: Empty,
}

/// Outputs and log-sum-exps of a part.
type Part<T> = (Vec<T>, Vec<<T as Float>::Sum>);

/// Two parts. Every value a branch of `join` looks for is there in every base.
fn inputs<T: Float>(case: &Case, random: &mut Random) -> [Part<T>; 2] {
    const EDGES: [f64; 7] = [f64::NEG_INFINITY, f64::INFINITY, f64::NAN, 0.0, -0.0, 1e30, -1e30];
    let mut lse = || {
        let (edge, unit) = (random.next() as usize % 14, random.unit());
        T::sum_of(EDGES.get(edge).copied().unwrap_or(unit * 90.0))
    };
    let [lse1, lse2] = [0, 1].map(|_| (0..case.rows).map(|_| lse()).collect());
    let elems = case.rows * case.head_dim;
    let mut out = || (0..elems).map(|_| T::of(random.unit() * 3.0)).collect();
    [(out(), lse1), (out(), lse2)]
}

fn args<T: Float>(case: &Case, outs: [*mut T; 3], lses: [*mut T::Sum; 3]) -> MergeArgs {
    let [out1, out2, out] = outs.map(|buffer| buffer.cast::<c_void>());
    let [lse1, lse2, lse] = lses.map(|buffer| buffer.cast::<c_void>());
    MergeArgs {
        out1,
        lse1,
        out2,
        lse2,
        out,
        lse,
        rows: case.rows as u64,
        head_dim: case.head_dim as u64,
        dtype: T::DTYPE,
        base: case.base,
        empty: case.empty,
    }
}

/// Merged by the CPU and by the launch.
fn both<T: Float>(case: &Case, [first, second]: &[Part<T>; 2]) -> [Part<T>; 2] {
    let (no_out, no_lse) = (T::of(f64::NAN), T::sum_of(f64::NAN));
    let [slack1, slack2, slack] = case.slacks;
    let fresh = || {
        let out = Buffer::new(&vec![no_out; case.rows * case.head_dim], slack);
        (out, Buffer::new(&vec![no_lse; case.rows], slack))
    };
    let held = |part: &Part<T>, slack| (Buffer::new(&part.0, slack), Buffer::new(&part.1, slack));
    let (part1, part2) = (held(first, slack1), held(second, slack2));
    let (twin, own) = (fresh(), fresh());
    let (out, lse) = match case.place {
        Place::Apart => (&own.0, &own.1),
        Place::First => (&part1.0, &part1.1),
        Place::Second => (&part2.0, &part2.1),
    };
    let with = |out: &Buffer<T>, lse: &Buffer<T::Sum>| {
        let outs = [part1.0.address(), part2.0.address(), out.address()];
        args::<T>(case, outs, [part1.1.address(), part2.1.address(), lse.address()])
    };
    let launch = Launch::merge_lse(&with(out, lse)).unwrap();
    // SAFETY: buffers as long as both calls say; the CPU, which is first, has outputs of its own.
    unsafe {
        cpu::merge_lse(&with(&twin.0, &twin.1)).unwrap();
        if let Some(mut launch) = launch {
            launch.blocks = case.grid.unwrap_or(launch.blocks);
            shim::run(&launch);
        }
    }
    [(twin.0.values(), twin.1.values()), (out.values(), lse.values())]
}

fn exactly<T: Into<f64>>(a: T, b: T) -> bool {
    let (a, b) = (a.into(), b.into());
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// `|o1|·w1 + |o2|·w2` for a row with keys in both parts, by formula.
fn magnitude(outs: [f64; 2], lses: [f64; 2], base: LogBase) -> f64 {
    let power = |x: f64| if base == LogBase::Two { x.exp2() } else { x.exp() };
    let [l1, l2] = lses;
    outs[0].abs() / (1.0 + power(l2 - l1)) + outs[1].abs() / (1.0 + power(l1 - l2))
}

fn compare<T: Float>(case: Case, random: &mut Random) {
    let inputs = inputs::<T>(&case, random);
    let [(wanted_out, wanted_lse), (out, lse)] = both(&case, &inputs);
    let [(out1, lse1), (out2, lse2)] = &inputs;
    for row in 0..case.rows {
        let (l1, l2): (f64, f64) = (lse1[row].into(), lse2[row].into());
        let blended = l1.is_finite() && l2.is_finite();
        let (wanted, seen): (f64, f64) = (wanted_lse[row].into(), lse[row].into());
        let place = format!("row {row} of {case:?}, {l1} and {l2}");
        if !blended {
            assert!(exactly(wanted_lse[row], lse[row]), "{place}: {seen}, not {wanted}");
        }
        let slack = 10.0 * f64::EPSILON / 2.0;
        let bound = 2.0 * T::EPSILON * wanted.abs() + slack;
        assert!(!blended || (seen - wanted).abs() <= bound, "{place}: {seen}, not {wanted}");

        for at in row * case.head_dim..(row + 1) * case.head_dim {
            let (wanted, seen): (f64, f64) = (wanted_out[at].into(), out[at].into());
            if !blended {
                assert!(exactly(wanted_out[at], out[at]), "{place} {at}: {seen}, not {wanted}");
                continue;
            }
            let outs = [out1[at].into(), out2[at].into()];
            let sum = magnitude(outs, [l1, l2], case.base);
            let roundings = T::ROUNDING * (seen.abs() + wanted.abs());
            let bound = T::OUT_UNITS * T::EPSILON * sum * 1.001 + roundings + T::SMALLEST;
            assert!((seen - wanted).abs() <= bound, "{place} {at}: {seen}, not {wanted}");
        }
    }
}

/// Parts of equal weight: their products are exact, so the last rounding alone decides, and it is the CPU's.
fn rounds_as_on_the_cpu<T: Float>(of_bits: fn(u16) -> T) {
    let elems = 1 << 16;
    // Every value beside another of about its size, so that sums lie between values, at their middles too.
    let part = |shift: u16| (0..=u16::MAX).map(|bits| of_bits(bits.wrapping_add(shift))).collect();
    for shift in [0, 1, 2, 3, 5, 0x8001] {
        let lse = vec![T::sum_of(1.5); elems / 64];
        let inputs = [(part(0), lse.clone()), (part(shift), lse)];
        let case = Case {
            rows: elems / 64,
            head_dim: 64,
            slacks: [0; 3],
            place: Place::Apart,
            grid: None,
            base: LogBase::E,
            empty: Empty::MinusInfinity,
        };
        let [(wanted, _), (seen, _)] = both::<T>(&case, &inputs);
        for (at, (&wanted, &seen)) in wanted.iter().zip(&seen).enumerate() {
            assert!(exactly(wanted, seen), "{at:#x} beside {shift}");
        }
    }
}

#[test]
fn fp16_is_rounded_as_on_the_cpu() {
    rounds_as_on_the_cpu(f16::from_bits);
}

#[test]
fn bfloat16_is_rounded_as_on_the_cpu() {
    rounds_as_on_the_cpu(bf16::from_bits);
}

/// Row counts around a block's, widths that do and do not divide into vectors or fit the block, and
/// more or fewer blocks than there is work for.
fn at_every_shape<T: Float>(seed: u64) {
    let mut random = Random(seed);
    let ways = [
        (LogBase::E, Empty::MinusInfinity, Place::Apart, [0, 0, 0]),
        (LogBase::Two, Empty::PlusInfinity, Place::First, [4, 0, 0]),
        (LogBase::E, Empty::PlusInfinity, Place::Second, [0, 4, 0]),
        (LogBase::Two, Empty::MinusInfinity, Place::Apart, [3, 0, 0]),
        (LogBase::E, Empty::MinusInfinity, Place::Apart, [0, 3, 0]),
        (LogBase::Two, Empty::PlusInfinity, Place::Apart, [0, 0, 3]),
    ];
    for rows in [0, 1, 31, 32, 33, 100] {
        for head_dim in [0, 1, 2, 3, 4, 12, 64, 127, 128, 130, 516] {
            for (base, empty, place, slacks) in ways {
                for grid in [None, Some(1), Some(3)] {
                    let case = Case { rows, head_dim, slacks, place, grid, base, empty };
                    compare::<T>(case, &mut random);
                }
            }
        }
    }
}

#[test]
fn fp16_parts_merge_as_on_the_cpu() {
    at_every_shape::<f16>(3);
}

#[test]
fn bfloat16_parts_merge_as_on_the_cpu() {
    at_every_shape::<bf16>(4);
}

#[test]
fn fp32_parts_merge_as_on_the_cpu() {
    at_every_shape::<f32>(5);
}

#[test]
fn fp64_parts_merge_as_on_the_cpu() {
    at_every_shape::<f64>(6);
}
