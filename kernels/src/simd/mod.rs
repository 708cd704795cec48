//! Vector forms for x86-64: the loops once, the loads, stores and conversions per instruction set.

pub(crate) mod avx2;
pub(crate) mod avx512;

/// Writes every form of [`crate::scalar`] for one instruction set.
///
/// Narrow vectors hold FP32, wide ones FP64. Multiplication and addition are not fused: a fused operation
/// rounds once and changes bits (I1).
macro_rules! forms {
    (
        features: $features:literal,
        narrow: $narrow:literal = ($load:ident, $store:ident, $add:ident, $mul:ident, $set:ident),
        wide: $wide:literal = ($load_w:ident, $store_w:ident, $add_w:ident, $mul_w:ident, $set_w:ident),
    ) => {
        forms!(@add $features, add_f16, f32, u16, $narrow, $load, $store, $add, from_f16);
        forms!(@add $features, add_bf16, f32, u16, $narrow, $load, $store, $add, from_bf16);
        forms!(@add $features, add_f32, f32, f32, $narrow, $load, $store, $add, $load);
        forms!(@add $features, add_f64, f64, f64, $wide, $load_w, $store_w, $add_w, $load_w);
        forms!(@blend $features, blend_f32, f32, $narrow, $load, $store, $add, $mul, $set);
        forms!(@blend $features, blend_f64, f64, $wide, $load_w, $store_w, $add_w, $mul_w, $set_w);
    };
    (
        @add $features:literal, $form:ident, $to:ty, $from:ty, $lanes:literal,
        $load:ident, $store:ident, $add:ident, $convert:ident
    ) => {
        #[target_feature(enable = $features)]
        pub(crate) fn $form(to: &mut [$to], from: &[$from]) {
            let (sums, sums_left) = to.as_chunks_mut::<$lanes>();
            let (values, values_left) = from.as_chunks::<$lanes>();
            for (sum, values) in sums.iter_mut().zip(values) {
                let total = $add($load(sum), $convert(values));
                $store(sum, total);
            }
            crate::scalar::$form(sums_left, values_left);
        }
    };
    (
        @blend $features:literal, $form:ident, $kind:ty, $lanes:literal,
        $load:ident, $store:ident, $add:ident, $mul:ident, $set:ident
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
                let total = $add($mul($load(a), weights_a), $mul($load(b), weights_b));
                $store(to, total);
            }
            crate::scalar::$form(to_left, a_left, b_left, weight_a, weight_b);
        }
    };
}
use forms;
