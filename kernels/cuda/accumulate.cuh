// sums[i] += values[i]: one IEEE addition an element, in the type of the sums, as src/scalar.rs.
#pragma once

#include "common.cuh"

// The first element from which both arrays can be read in groups; `elems` where there is none.
template <u32 LANES, class Source, class Sum>
__device__ u64 first_group(const Sum* sums, const Source* values, u64 elems) {
    const u64 past = reinterpret_cast<u64>(sums) / sizeof(Sum) % LANES;
    const u64 head = (LANES - past) % LANES;
    return head < elems && is_aligned<Lanes<Source, LANES>>(values + head) ? head : elems;
}

// A thread moves 16 bytes of the sums at a time and as many values, which may be 8 bytes: so the
// threads of a warp lie side by side in both arrays, and the sums are most of the bytes.
template <class Source, class Sum>
__device__ void accumulate(Sum* __restrict__ sums, const Source* __restrict__ values, u64 elems) {
    constexpr u32 LANES = VECTOR_LANES<Sum>;
    using Values = Lanes<Source, LANES>;
    using Sums = Lanes<Sum, LANES>;
    const u64 first = u64{blockIdx.x} * blockDim.x + threadIdx.x;
    const u64 step = u64{gridDim.x} * blockDim.x;
    const u64 head = first_group<LANES>(sums, values, elems);
    const u64 tail = head + (elems - head) / LANES * LANES;

    for (u64 at = head + first * LANES; at < tail; at += step * LANES) {
        const Values added = *reinterpret_cast<const Values*>(values + at);
        Sums* const to = reinterpret_cast<Sums*>(sums + at);
        Sums sum = *to;
        for (u32 lane = 0; lane < LANES; lane++) {
            sum.lane[lane] += widen(added.lane[lane]);
        }
        *to = sum;
    }
    for (u64 at = first; at < head; at += step) {
        sums[at] += widen(values[at]);
    }
    for (u64 at = tail + first; at < elems; at += step) {
        sums[at] += widen(values[at]);
    }
}
