// Enough of CUDA to compile the kernels as C++17 and run them on a CPU, one thread at a time
// (tests/host_shim.rs). A kernel's thread is a fiber: __syncthreads() goes back to the scheduler,
// which resumes each fiber of the block in turn. So a missing barrier is seen as a wrong result:
// thread 0 always runs ahead of the others. One launch at a time.
#pragma once

#include <math.h>
#include <stddef.h>
#include <ucontext.h>

#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Dimensions {
    unsigned x;
};
inline Dimensions threadIdx, blockIdx, blockDim, gridDim;

struct __half {
    unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half half) {
    const int exponent = half.bits >> 10 & 31, fraction = half.bits & 1023;
    const float magnitude = exponent == 0    ? ldexpf(float(fraction), -24)
                            : exponent != 31 ? ldexpf(float(1024 + fraction), exponent - 25)
                            : fraction == 0  ? INFINITY
                                             : NAN;
    return half.bits >> 15 ? -magnitude : magnitude;
}

inline unsigned short __half_as_ushort(__half half) { return half.bits; }

inline __half __float2half_rn(float value) {
    if (value != value) return {0x7fff};
    const int sign = signbit(value) ? 0x8000 : 0;
    const double magnitude = fabs(double(value));
    if (magnitude >= 65520) return {(unsigned short)(sign | 31 << 10)};
    int exponent;
    frexp(magnitude, &exponent);
    // In units of the last place: of subnormals, or of the value's binade. lrint rounds to even.
    const int unit = magnitude == 0 || exponent < -13 ? -24 : exponent - 11;
    const long units = lrint(ldexp(magnitude, -unit));
    // 1024 units and more carry into the exponent.
    const long bits = unit == -24 ? units : (long(unit + 24) << 10) + units;
    return {(unsigned short)(sign | bits)};
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

namespace host_shim {

constexpr size_t STACK_BYTES = 64 << 10;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool finished;
};

inline ucontext_t scheduler;
inline Fiber* running;
// What a fiber runs: makecontext takes no argument that a pointer fits in.
inline void (*body)(void** parameters);
inline void** body_parameters;

inline void enter() {
    body(body_parameters);
    running->finished = true;
}

inline void run_block(unsigned threads) {
    static std::vector<Fiber> fibers; // kept: fresh stacks would be most of a launch
    fibers.resize(threads);
    for (Fiber& fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.finished = false;
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned finished = 0; finished < threads;) {
        finished = 0;
        for (unsigned thread = 0; thread < threads; thread++) {
            running = &fibers[thread];
            threadIdx.x = thread;
            if (!running->finished) swapcontext(&scheduler, &running->context);
            finished += running->finished;
        }
    }
}

// As cuLaunchKernel reads them: `parameters[i]` points to the i-th one.
template <class... P, size_t... I>
void call_with(void (*kernel)(P...), void** parameters, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(parameters[I])...);
}

template <class... P>
void call(void (*kernel)(P...), void** parameters) {
    call_with(kernel, parameters, std::index_sequence_for<P...>());
}

template <auto kernel>
void launch(unsigned grid, unsigned block, void** parameters) {
    body = [](void** parameters) { call(kernel, parameters); };
    body_parameters = parameters;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) run_block(block);
}

} // namespace host_shim

inline void __syncthreads() { swapcontext(&host_shim::running->context, &host_shim::scheduler); }
