/* The stand-in CUDA runtime: real PyTorch on a machine without a GPU.
 *
 * Each runtime call is carried out by the driver, `libcuda.so.1`, found when the first call is
 * made: a cudaStream_t is its CUstream, a cudaEvent_t its CUevent, an error its number. So this
 * library holds no memory, stream or event of its own. Kernels do nothing (launch.c). What torch
 * needs but nobody wrote says so, aloud, and fails with cudaErrorNotSupported; `build` makes it.
 *
 * The types and prototypes are those of the CUDA runtime's own headers.
 */
#ifndef STANDIN_CUDART_RUNTIME_H
#define STANDIN_CUDART_RUNTIME_H

/* Each version of a driver call under its own name, as the driver exports it. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cuda_runtime_api.h>

/* The driver's calls that the runtime is made of, by the names the driver exports. */
#define DRIVER_CALLS(X)                                                                            \
    X(cuCtxGetCurrent)                                                                             \
    X(cuCtxGetStreamPriorityRange)                                                                 \
    X(cuCtxSetCurrent)                                                                             \
    X(cuCtxSynchronize)                                                                            \
    X(cuDeviceGetAttribute)                                                                        \
    X(cuDeviceGetCount)                                                                            \
    X(cuDeviceGetName)                                                                             \
    X(cuDeviceGetUuid_v2)                                                                          \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuDeviceTotalMem_v2)                                                                         \
    X(cuDriverGetVersion)                                                                          \
    X(cuEventCreate)                                                                               \
    X(cuEventDestroy_v2)                                                                           \
    X(cuEventElapsedTime)                                                                          \
    X(cuEventQuery)                                                                                \
    X(cuEventRecordWithFlags)                                                                      \
    X(cuEventSynchronize)                                                                          \
    X(cuGetProcAddress_v2)                                                                         \
    X(cuGraphDestroy)                                                                              \
    X(cuGraphExecDestroy)                                                                          \
    X(cuGraphGetNodes)                                                                             \
    X(cuGraphInstantiateWithFlags)                                                                 \
    X(cuGraphLaunch)                                                                               \
    X(cuInit)                                                                                      \
    X(cuLaunchHostFunc)                                                                            \
    X(cuMemAlloc_v2)                                                                               \
    X(cuMemFreeHost)                                                                               \
    X(cuMemFree_v2)                                                                                \
    X(cuMemGetInfo_v2)                                                                             \
    X(cuMemHostAlloc)                                                                              \
    X(cuMemHostRegister_v2)                                                                        \
    X(cuMemHostUnregister)                                                                         \
    X(cuMemcpy)                                                                                    \
    X(cuMemcpyAsync)                                                                               \
    X(cuMemsetD8Async)                                                                             \
    X(cuMemsetD8_v2)                                                                               \
    X(cuPointerGetAttributes)                                                                      \
    X(cuStreamBeginCapture_v2)                                                                     \
    X(cuStreamCreateWithPriority)                                                                  \
    X(cuStreamDestroy_v2)                                                                          \
    X(cuStreamEndCapture)                                                                          \
    X(cuStreamGetCaptureInfo_v2)                                                                   \
    X(cuStreamGetPriority)                                                                         \
    X(cuStreamIsCapturing)                                                                         \
    X(cuStreamQuery)                                                                               \
    X(cuStreamSynchronize)                                                                         \
    X(cuStreamWaitEvent)                                                                           \
    X(cuThreadExchangeStreamCaptureMode)

/* A call that the driver found at run time does not export is NULL. */
struct driver {
#define MEMBER(name) __typeof__(&(name)) name;
    DRIVER_CALLS(MEMBER)
#undef MEMBER
};
extern struct driver driver;

/* The driver is loaded and initialised; after exit() began, cudaErrorCudartUnloading. */
cudaError_t enter_driver(void);

/* The same, and this thread has a current context: the primary one unless it chose another. */
cudaError_t enter_context(void);

/* Makes the primary context this thread's current one, whatever was current before. */
cudaError_t use_primary_context(void);

/* Keeps an error as this thread's last one and gives it back. */
cudaError_t remember(cudaError_t error);

/* Says once per name that a call exists only by name; cudaErrorNotSupported. */
cudaError_t unsupported(const char *name);

/* The one device there is. */
#define DEVICE 0

cudaError_t check_device(int device);

/* One driver call as a runtime error. The numbers are the same since CUDA 10.1. */
#define DRIVER(name, ...)                                                                          \
    (driver.name == NULL ? unsupported(#name) : (cudaError_t)driver.name(__VA_ARGS__))

/* A whole runtime call that is one driver call in this thread's context. `a ?: b` is the first of
 * the two that failed, since success is zero. */
#define IN_CONTEXT(...) remember(enter_context() ?: DRIVER(__VA_ARGS__))

_Static_assert(cudaSuccess == 0, "`?:` chains calls until one fails");
_Static_assert((int)cudaErrorMemoryAllocation == (int)CUDA_ERROR_OUT_OF_MEMORY, "one to one");
_Static_assert((int)cudaErrorCudartUnloading == (int)CUDA_ERROR_DEINITIALIZED, "one to one");
_Static_assert((int)cudaErrorNotReady == (int)CUDA_ERROR_NOT_READY, "one to one");
_Static_assert((int)cudaErrorIllegalAddress == (int)CUDA_ERROR_ILLEGAL_ADDRESS, "one to one");

#endif
