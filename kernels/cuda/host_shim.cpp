// The kernels as functions of a shared library: `host_` and the kernel's name.
#include "dormouse_kernels.cu"

#define DORMOUSE_HOST(name)                                                          \
    extern "C" void host_##name(unsigned grid, unsigned block, void** parameters) {  \
        host_shim::launch<name>(grid, block, parameters);                            \
    }

DORMOUSE_HOST(dormouse_accumulate_f16)
DORMOUSE_HOST(dormouse_accumulate_bf16)
DORMOUSE_HOST(dormouse_accumulate_f32)
DORMOUSE_HOST(dormouse_accumulate_f64)
DORMOUSE_HOST(dormouse_merge_lse_f16)
DORMOUSE_HOST(dormouse_merge_lse_bf16)
DORMOUSE_HOST(dormouse_merge_lse_f32)
DORMOUSE_HOST(dormouse_merge_lse_f64)
