// What the kernels share: the numbers Rust knows too, groups of lanes, exact conversions.
#pragma once

#ifdef DORMOUSE_HOST_SHIM
#include "host_shim.hpp"
#else
#include <cuda_fp16.h>
#endif
#include <math.h>

using u32 = unsigned int;
using u64 = unsigned long long;

// Mirrored in src/cuda/kernel.rs; a test reads this file and compares.
constexpr u32 ACCUMULATE_BLOCK_THREADS = 256;
constexpr u32 MERGE_BLOCK_THREADS = 128;
constexpr u32 MERGE_BLOCK_ROWS = 32;
constexpr u32 VECTOR_BYTES = 16;

// Codes of LogBase and Empty in src/merge.rs; the same test compares them.
constexpr u32 BASE_TWO = 1;
constexpr u32 EMPTY_PLUS_INFINITY = 1;

// FP16 and bfloat16 by their bits, as types of their own.
struct F16 {
    unsigned short bits;
};
struct Bf16 {
    unsigned short bits;
};

// N elements moved by one load or store.
template <class T, u32 N>
struct alignas(sizeof(T) * N) Lanes {
    T lane[N];
};

template <class T>
constexpr u32 VECTOR_LANES = VECTOR_BYTES / sizeof(T);

__device__ inline float widen(F16 value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ inline float widen(Bf16 value) { return __uint_as_float(u32{value.bits} << 16); }
__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }

// The type of sums of T, and of its log-sum-exps.
template <class T>
using Wide = decltype(widen(T{}));

// The nearest value of T, of two as near the even one. The payload of a NaN is unspecified.
template <class T>
__device__ inline T narrow(Wide<T> value) {
    return value;
}
template <>
__device__ inline F16 narrow<F16>(float value) {
    return {__half_as_ushort(__float2half_rn(value))};
}
template <>
__device__ inline Bf16 narrow<Bf16>(float value) {
    const u32 bits = __float_as_uint(value);
    // All lower bits of a GPU's own NaN are set: rounded up it would be a zero.
    if (value != value) return {static_cast<unsigned short>(bits >> 16 | 0x40)};
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class Group>
__device__ bool is_aligned(const void* address) {
    return reinterpret_cast<u64>(address) % alignof(Group) == 0;
}
