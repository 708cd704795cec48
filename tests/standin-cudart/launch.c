/* Kernels: accepted, asked whether their stream may take them, and not run.
 *
 * One does what it says: torch.cuda._sleep's, which keeps a stream busy for a while. Tests of
 * what happens before a stream has caught up need it.
 */
#include "runtime.h"

#include <string.h>
#include <time.h>

/* Of an H200: what turns the cycles of torch.cuda._sleep into time. */
#define CYCLES_PER_MICROSECOND 1980

static const void *sleep_kernel;

/* What a compiled program calls when it is loaded and when it says f<<<...>>>(...); no header
 * declares them. */
void **__cudaRegisterFatBinary(void *fat_binary);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host_function, char *device_function,
                            const char *device_name, int thread_limit, uint3 *thread, uint3 *block,
                            dim3 *block_size, dim3 *grid_size, int *warp_size);
void __cudaRegisterVar(void **handle, char *host_variable, char *device_address,
                       const char *device_name, int external, size_t size_bytes, int constant,
                       int global);
unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                         struct CUstream_st *stream);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                       void *stream);
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared_bytes, cudaStream_t stream);

void **__cudaRegisterFatBinary(void *fat_binary)
{
    static void *handle;
    handle = fat_binary;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    (void)handle;
}

void __cudaRegisterFunction(void **handle, const char *host_function, char *device_function,
                            const char *device_name, int thread_limit, uint3 *thread, uint3 *block,
                            dim3 *block_size, dim3 *grid_size, int *warp_size)
{
    (void)handle, (void)device_function, (void)thread_limit, (void)thread, (void)block;
    (void)block_size, (void)grid_size, (void)warp_size;
    if (strstr(device_name, "spin_kernel") != NULL) {
        sleep_kernel = host_function;
    }
}

void __cudaRegisterVar(void **handle, char *host_variable, char *device_address,
                       const char *device_name, int external, size_t size_bytes, int constant,
                       int global)
{
    (void)handle, (void)host_variable, (void)device_address, (void)device_name, (void)external;
    (void)size_bytes, (void)constant, (void)global;
}

/* Between the <<<...>>> and the generated function that unpacks it nothing else can launch. */
static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} call;

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                         struct CUstream_st *stream)
{
    call.grid = grid;
    call.block = block;
    call.shared_bytes = shared_bytes;
    call.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream)
{
    *grid = call.grid;
    *block = call.block;
    *shared_bytes = call.shared_bytes;
    *(cudaStream_t *)stream = call.stream;
    return cudaSuccess;
}

static void sleep_for(void *microseconds)
{
    struct timespec left = {
        .tv_sec = (time_t)((size_t)microseconds / 1000000),
        .tv_nsec = (long)((size_t)microseconds % 1000000 * 1000),
    };
    while (nanosleep(&left, &left) != 0) {
    }
}

static cudaError_t launch(const void *function, void **arguments, cudaStream_t stream)
{
    /* The cheapest call that refuses a stream that is none, as a launch would. */
    CUstreamCaptureStatus capturing;
    cudaError_t error = enter_context() ?: DRIVER(cuStreamIsCapturing, stream, &capturing);
    if (error == cudaSuccess && function == sleep_kernel && function != NULL) {
        size_t microseconds = *(size_t *)arguments[0] / CYCLES_PER_MICROSECOND;
        error = DRIVER(cuLaunchHostFunc, stream, sleep_for, (void *)microseconds);
    }
    return remember(error);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t shared_bytes, cudaStream_t stream)
{
    (void)grid, (void)block, (void)shared_bytes;
    return launch(function, arguments, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block,
                                        void **arguments, size_t shared_bytes, cudaStream_t stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **arguments)
{
    return launch(function, arguments, config->stream);
}

/* A kernel's handle is the address of its host function. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared_bytes, cudaStream_t stream)
{
    return cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared_bytes, stream);
}

/* Figures any kernel could have; torch divides its work by them. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = 90;
    attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return cudaSuccess;
}

#define THREADS_PER_MULTIPROCESSOR 2048

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *function,
                                                                   int block_threads,
                                                                   size_t shared_bytes,
                                                                   unsigned int flags)
{
    (void)function, (void)shared_bytes, (void)flags;
    if (block_threads <= 0) {
        return remember(cudaErrorInvalidValue);
    }
    *blocks = THREADS_PER_MULTIPROCESSOR / block_threads;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                          int block_threads, size_t shared_bytes)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_threads,
                                                                  shared_bytes, 0);
}
