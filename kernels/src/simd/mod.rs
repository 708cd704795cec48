//! Vector forms for x86-64: the loops once, the instructions per instruction set.

pub(crate) mod avx2;
pub(crate) mod avx512;

/// Writes every form of [`crate::scalar`] for one instruction set.
///
/// Narrow vectors hold FP32, wide ones FP64, *bits* those of 16-bit floats. Multiplication and
/// addition are not fused: a fused operation rounds once and changes bits (I1).
macro_rules! forms {
    (
        features: $features:literal,
        narrow: [f32; $n:literal] as $narrow:ty = ($add:ident, $mul:ident, $set:ident),
        wide: [f64; $w:literal] as $wide:ty = ($add_w:ident, $mul_w:ident, $set_w:ident),
        bits: [u16] as $bits:ty = ($from_f16:ident, $from_bf16:ident),
    ) => {
        forms!(@add $features, add_f16, [f32; $n] as $narrow, $add, u16 as $bits, $from_f16);
        forms!(@add $features, add_bf16, [f32; $n] as $narrow, $add, u16 as $bits, $from_bf16);
        forms!(@add $features, add_f32, [f32; $n] as $narrow, $add, f32 as $narrow, identity);
        forms!(@add $features, add_f64, [f64; $w] as $wide, $add_w, f64 as $wide, identity);
        forms!(@blend $features, blend_f32, [f32; $n] as $narrow, $add, $mul, $set);
        forms!(@blend $features, blend_f64, [f64; $w] as $wide, $add_w, $mul_w, $set_w);
    };
    (
        @add $features:literal, $form:ident, [$to:ty; $lanes:literal] as $sum:ty, $add:ident,
        $from:ident as $value:ty, $convert:ident
    ) => {
        #[target_feature(enable = $features)]
        pub(crate) fn $form(to: &mut [$to], from: &[$from]) {
            let (sums, sums_left) = to.as_chunks_mut::<$lanes>();
            let (values, values_left) = from.as_chunks::<$lanes>();
            for (sum, values) in sums.iter_mut().zip(values) {
                // SAFETY: I2: arrays and registers of the same size, for which all bits are valid.
                unsafe {
                    let values = transmute::<[$from; $lanes], $value>(*values);
                    let total = $add(transmute::<[$to; $lanes], $sum>(*sum), $convert(values));
                    *sum = transmute::<$sum, [$to; $lanes]>(total);
                }
            }
            crate::scalar::$form(sums_left, values_left);
        }
    };
    (
        @blend $features:literal, $form:ident, [$kind:ty; $lanes:literal] as $register:ty,
        $add:ident, $mul:ident, $set:ident
    ) => {
        #[target_feature(enable = $features)]
        pub(crate) fn $form(
            to: &mut [$kind],
            a: &[$kind],
            b: &[$kind],
            weight_a: $kind,
            weight_b: $kind,
        ) {
            let (to, to_left) = to.as_chunks_mut::<$lanes>();
            let (a, a_left) = a.as_chunks::<$lanes>();
            let (b, b_left) = b.as_chunks::<$lanes>();
            let (weights_a, weights_b) = ($set(weight_a), $set(weight_b));
            for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
                // SAFETY: as above.
                unsafe {
                    let a = transmute::<[$kind; $lanes], $register>(*a);
                    let b = transmute::<[$kind; $lanes], $register>(*b);
                    let total = $add($mul(a, weights_a), $mul(b, weights_b));
                    *to = transmute::<$register, [$kind; $lanes]>(total);
                }
            }
            crate::scalar::$form(to_left, a_left, b_left, weight_a, weight_b);
        }
    };
}
use forms;
