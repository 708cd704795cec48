// Every kernel by the name the driver finds it under. Parameters are packed by src/cuda/launch.rs
// in this order: eight-byte ones first.
#include "accumulate.cuh"
#include "merge_lse.cuh"

#define DORMOUSE_ACCUMULATE(name, Source, Sum)                                         \
    extern "C" __global__ void __launch_bounds__(ACCUMULATE_BLOCK_THREADS)             \
        name(Sum* sums, const Source* values, u64 elems) {                             \
        accumulate(sums, values, elems);                                               \
    }

DORMOUSE_ACCUMULATE(dormouse_accumulate_f16, F16, float)
DORMOUSE_ACCUMULATE(dormouse_accumulate_bf16, Bf16, float)
DORMOUSE_ACCUMULATE(dormouse_accumulate_f32, float, float)
DORMOUSE_ACCUMULATE(dormouse_accumulate_f64, double, double)

#define DORMOUSE_MERGE_LSE(name, T)                                                    \
    extern "C" __global__ void __launch_bounds__(MERGE_BLOCK_THREADS)                  \
        name(const T* out1, const Wide<T>* lse1, const T* out2, const Wide<T>* lse2,   \
             T* out, Wide<T>* lse, u64 rows, u64 head_dim, u32 base, u32 empty) {      \
        merge_lse<T>({out1, lse1, out2, lse2, out, lse, rows, head_dim, base, empty}); \
    }

DORMOUSE_MERGE_LSE(dormouse_merge_lse_f16, F16)
DORMOUSE_MERGE_LSE(dormouse_merge_lse_bf16, Bf16)
DORMOUSE_MERGE_LSE(dormouse_merge_lse_f32, float)
DORMOUSE_MERGE_LSE(dormouse_merge_lse_f64, double)
