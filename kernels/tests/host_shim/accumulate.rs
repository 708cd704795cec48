use std::fmt::Debug;

use dormouse_kernels::cuda::Launch;
use dormouse_kernels::{DType, cpu};

use super::Random;
use super::buffer::Buffer;
use super::shim;

/// A type that gradients or sums are of, by its bits.
trait Bits: Copy + PartialEq + Debug {
    const EXPONENT: u64;
    const FRACTION: u64;
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;

    fn is_nan(self) -> bool {
        self.bits() & Self::EXPONENT == Self::EXPONENT && self.bits() & Self::FRACTION != 0
    }
}

macro_rules! bits {
    ($name:ident, $int:ty, $exponent:literal, $fraction:literal) => {
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[repr(transparent)]
        struct $name($int);

        impl Bits for $name {
            const EXPONENT: u64 = $exponent;
            const FRACTION: u64 = $fraction;

            fn of(bits: u64) -> Self {
                Self(bits as $int)
            }

            fn bits(self) -> u64 {
                self.0.into()
            }
        }
    };
}

bits!(F16, u16, 0x7c00, 0x03ff);
bits!(Bf16, u16, 0x7f80, 0x007f);
bits!(F32, u32, 0x7f80_0000, 0x007f_ffff);
bits!(F64, u64, 0x7ff0_0000_0000_0000, 0x000f_ffff_ffff_ffff);

/// Random bits, of which every other is one that a shortcut would get wrong.
fn value<T: Bits>(random: &mut Random) -> T {
    let (bits, choice) = (random.next(), random.next() % 16);
    let sign = (T::EXPONENT | T::FRACTION) + 1;
    T::of(match choice {
        0 => 0,
        1 => sign,
        2 => T::EXPONENT,
        3 => T::EXPONENT | sign,
        4 => T::EXPONENT | (bits & T::FRACTION),
        5 | 6 => bits & (T::FRACTION | sign),
        7 => bits & T::FRACTION | (T::EXPONENT & !(T::EXPONENT << 1)),
        _ => bits,
    })
}

/// Adds on the CPU and by the launch, on `grid` blocks or as many as it says, and compares.
fn compare<Sum: Bits, From: Bits>(
    (sums, values): (&[Sum], &[From]),
    (slack, from_slack): (usize, usize),
    (dtype, grid): (DType, Option<u32>),
) {
    let (twin, to) = (Buffer::new(sums, slack), Buffer::new(sums, slack));
    let from = Buffer::new(values, from_slack);
    let launch =
        Launch::accumulate(to.address().addr(), from.address().addr(), sums.len(), dtype).unwrap();
    // SAFETY: buffers of their own, as long as both calls say.
    unsafe {
        cpu::accumulate(twin.address().cast(), from.address().cast(), sums.len(), dtype).unwrap();
        if let Some(mut launch) = launch {
            launch.blocks = grid.unwrap_or(launch.blocks);
            shim::run(&launch);
        }
    }
    for (at, (wanted, seen)) in twin.values().into_iter().zip(to.values()).enumerate() {
        let same = wanted == seen || (wanted.is_nan() && seen.is_nan());
        let place = format!("element {at} of {}, slack {slack} {from_slack}", sums.len());
        assert!(same, "{dtype:?} {place}, {grid:?} blocks: {seen:x?}, not {wanted:x?}");
    }
    assert_eq!(from.values(), values);
}

/// Lengths around a vector, a block's round and several; every alignment of one array against the
/// other; grids from one block to more than there is work for.
fn at_every_length_alignment_and_grid<Sum: Bits, From: Bits>(dtype: DType, seed: u64) {
    const LENGTHS: [usize; 13] = [0, 1, 2, 3, 7, 8, 9, 15, 17, 31, 1023, 1024, 5003];
    let mut random = Random(seed);
    for length in LENGTHS {
        let sums: Vec<Sum> = (0..length).map(|_| value(&mut random)).collect();
        let values: Vec<From> = (0..length).map(|_| value(&mut random)).collect();
        for slacks in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3), (4, 4), (3, 7), (2, 0), (5, 5)] {
            for grid in [None, Some(1), Some(2), Some(5)] {
                compare((&sums, &values), slacks, (dtype, grid));
            }
        }
    }
}

#[test]
fn f16_adds_bit_for_bit() {
    at_every_length_alignment_and_grid::<F32, F16>(DType::F16, 1);
}

#[test]
fn bf16_adds_bit_for_bit() {
    at_every_length_alignment_and_grid::<F32, Bf16>(DType::Bf16, 2);
}

#[test]
fn f32_adds_bit_for_bit() {
    at_every_length_alignment_and_grid::<F32, F32>(DType::F32, 3);
}

#[test]
fn f64_adds_bit_for_bit() {
    at_every_length_alignment_and_grid::<F64, F64>(DType::F64, 4);
}

#[test]
fn every_half_and_bfloat_converts_exactly() {
    let zeroes = vec![F32(0); 1 << 16];
    let halves: Vec<F16> = (0..=u16::MAX).map(F16).collect();
    let bfloats: Vec<Bf16> = (0..=u16::MAX).map(Bf16).collect();
    compare((&zeroes, &halves), (0, 0), (DType::F16, None));
    compare((&zeroes, &bfloats), (0, 0), (DType::Bf16, None));
}
