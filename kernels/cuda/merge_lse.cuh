// Two partial attention outputs into one, as src/merge.rs, where the formulas are.
//
// A block takes MERGE_BLOCK_ROWS rows at a time: one thread a row works out the weights in FP64,
// then all threads blend. So FP64 is one exponential a row, not one a thread, also on the GPUs that
// have little of it. An output may be the very buffer of its own input: each element is read and
// written by one thread, and a row's log-sum-exps too.
#pragma once

#include "common.cuh"

// Outputs of type T. Log-sum-exps and weights have the type of its accumulators.
template <class T>
struct Merge {
    const T* out1;
    const Wide<T>* lse1;
    const T* out2;
    const Wide<T>* lse2;
    T* out;
    Wide<T>* lse;
    u64 rows;
    u64 head_dim;
    u32 base;
    u32 empty;
};

// Which parts of a row have keys, and what they weigh.
enum class Joined { Neither, First, Second, Both };

template <class W>
struct Row {
    Joined joined;
    W weight1;
    W weight2;
};

__device__ inline bool is_broken(double lse, u32 empty) {
    return lse != lse || (lse == INFINITY && empty != EMPTY_PLUS_INFINITY);
}

// The row's plan; `lse` gets its merged log-sum-exp.
template <class W>
__device__ Row<W> join(W first, W second, u32 base, u32 empty, W* lse) {
    const double l1 = first, l2 = second;
    if (is_broken(l1, empty) || is_broken(l2, empty)) {
        *lse = W(NAN);
        return {Joined::Both, W(NAN), W(NAN)};
    }
    const bool none1 = fabs(l1) == INFINITY, none2 = fabs(l2) == INFINITY;
    if (none1 && none2) {
        *lse = -W(INFINITY);
        return {Joined::Neither, W(0), W(0)};
    }
    if (none1 || none2) {
        *lse = none2 ? first : second;
        return {none2 ? Joined::First : Joined::Second, W(0), W(0)};
    }
    const bool swapped = l2 > l1;
    const double top = swapped ? l2 : l1, below = swapped ? l1 : l2;
    const double other = base == BASE_TWO ? exp2(below - top) : exp(below - top);
    const double log_sum = base == BASE_TWO ? log1p(other) * M_LOG2E : log1p(other);
    *lse = W(top + log_sum);
    const W larger = W(1.0 / (1.0 + other)), smaller = W(other / (1.0 + other));
    return {Joined::Both, swapped ? smaller : larger, swapped ? larger : smaller};
}

template <class T, u32 N>
__device__ Lanes<T, N> blend(const Row<Wide<T>>& row, const Lanes<T, N>* out1, const Lanes<T, N>* out2) {
    // An empty part's output is not read: it may hold anything.
    if (row.joined == Joined::First) return *out1;
    if (row.joined == Joined::Second) return *out2;
    Lanes<T, N> out = {};
    if (row.joined == Joined::Neither) return out;
    const Lanes<T, N> a = *out1, b = *out2;
    for (u32 lane = 0; lane < N; lane++) {
        // Three roundings, and that of a narrower T: the build forbids contraction.
        const Wide<T> sum = widen(a.lane[lane]) * row.weight1 + widen(b.lane[lane]) * row.weight2;
        out.lane[lane] = narrow<T>(sum);
    }
    return out;
}

// Blends `count` rows, the first of them number `first` of the tensors, by all threads of a block.
template <class T, u32 N>
__device__ void blend_rows(const Merge<T>& merge, const Row<Wide<T>>* rows, u64 first, u32 count) {
    using Group = Lanes<T, N>;
    const u64 width = merge.head_dim / N;
    if (width == 0) return;
    const Group* const out1 = reinterpret_cast<const Group*>(merge.out1) + first * width;
    const Group* const out2 = reinterpret_cast<const Group*>(merge.out2) + first * width;
    Group* const out = reinterpret_cast<Group*>(merge.out) + first * width;

    // Row and column go on by steps, since a division in the loop would cost more than the blend.
    // A row wider than the block gives step 0 and the block's width: hence the narrow type.
    const u32 divisor = width > blockDim.x ? blockDim.x + 1 : u32(width);
    const u32 row_step = blockDim.x / divisor, column_step = blockDim.x % divisor;
    u32 row = threadIdx.x / divisor;
    u64 column = threadIdx.x % divisor;
    for (u64 at = threadIdx.x; row < count; at += blockDim.x) {
        out[at] = blend(rows[row], out1 + at, out2 + at);
        row += row_step;
        column += column_step;
        if (column >= width) {
            column -= width;
            row++;
        }
    }
}

template <class T>
__device__ void merge_lse(const Merge<T>& merge) {
    constexpr u32 LANES = VECTOR_LANES<T>;
    using Vector = Lanes<T, LANES>;
    __shared__ Row<Wide<T>> rows[MERGE_BLOCK_ROWS];
    const bool vectors = merge.head_dim % LANES == 0 && is_aligned<Vector>(merge.out1) &&
                         is_aligned<Vector>(merge.out2) && is_aligned<Vector>(merge.out);
    const u64 step = u64{gridDim.x} * MERGE_BLOCK_ROWS;
    for (u64 first = u64{blockIdx.x} * MERGE_BLOCK_ROWS; first < merge.rows; first += step) {
        const u64 left = merge.rows - first;
        const u32 count = left < MERGE_BLOCK_ROWS ? u32(left) : MERGE_BLOCK_ROWS;
        for (u32 row = threadIdx.x; row < count; row += blockDim.x) {
            const u64 at = first + row;
            rows[row] =
                join(merge.lse1[at], merge.lse2[at], merge.base, merge.empty, &merge.lse[at]);
        }
        __syncthreads();
        if (vectors) {
            blend_rows<T, LANES>(merge, rows, first, count);
        } else {
            blend_rows<T, 1>(merge, rows, first, count);
        }
        __syncthreads(); // `rows` is the next round's
    }
}
