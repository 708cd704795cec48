/* Memory and copies. */
#include "runtime.h"

#include <string.h>

/* The driver refuses sizes of zero and null pointers where the runtime has nothing to do. */

cudaError_t cudaMalloc(void **pointer, size_t size_bytes)
{
    CUdeviceptr address = 0;
    cudaError_t error = enter_context();
    if (error == cudaSuccess && size_bytes != 0) {
        error = DRIVER(cuMemAlloc_v2, &address, size_bytes);
    }
    *pointer = (void *)address;
    return remember(error);
}

/* Waits for all work, as the real call does; torch gives memory back without asking whether a
 * stream is done with it. The stand-in driver is stricter than that. */
cudaError_t cudaFree(void *pointer)
{
    cudaError_t error = enter_context();
    if (error == cudaSuccess && pointer != NULL) {
        error = DRIVER(cuCtxSynchronize) ?: DRIVER(cuMemFree_v2, (CUdeviceptr)pointer);
    }
    return remember(error);
}

cudaError_t cudaHostAlloc(void **pointer, size_t size_bytes, unsigned int flags)
{
    *pointer = NULL;
    if (size_bytes == 0) {
        return remember(enter_context());
    }
    return IN_CONTEXT(cuMemHostAlloc, pointer, size_bytes, flags);
}

cudaError_t cudaMallocHost(void **pointer, size_t size_bytes)
{
    return cudaHostAlloc(pointer, size_bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *pointer)
{
    if (pointer == NULL) {
        return remember(enter_context());
    }
    return IN_CONTEXT(cuMemFreeHost, pointer);
}

cudaError_t cudaHostRegister(void *pointer, size_t size_bytes, unsigned int flags)
{
    return IN_CONTEXT(cuMemHostRegister_v2, pointer, size_bytes, flags);
}

cudaError_t cudaHostUnregister(void *pointer)
{
    return IN_CONTEXT(cuMemHostUnregister, pointer);
}

/* Addresses are unified, so the driver sees the direction from the pointers and the kind only has
 * to be one. */
static cudaError_t check_kind(enum cudaMemcpyKind kind)
{
    return (unsigned)kind <= cudaMemcpyDefault ? cudaSuccess : cudaErrorInvalidMemcpyDirection;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size_bytes, enum cudaMemcpyKind kind)
{
    cudaError_t error = enter_context() ?: check_kind(kind);
    if (error == cudaSuccess && size_bytes != 0) {
        error = DRIVER(cuMemcpy, (CUdeviceptr)to, (CUdeviceptr)from, size_bytes);
    }
    return remember(error);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size_bytes,
                            enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaError_t error = enter_context() ?: check_kind(kind);
    if (error == cudaSuccess && size_bytes != 0) {
        error = DRIVER(cuMemcpyAsync, (CUdeviceptr)to, (CUdeviceptr)from, size_bytes, stream);
    }
    return remember(error);
}

cudaError_t cudaMemset(void *pointer, int value, size_t size_bytes)
{
    cudaError_t error = enter_context();
    if (error == cudaSuccess && size_bytes != 0) {
        error = DRIVER(cuMemsetD8_v2, (CUdeviceptr)pointer, (unsigned char)value, size_bytes);
    }
    return remember(error);
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size_bytes, cudaStream_t stream)
{
    cudaError_t error = enter_context();
    if (error == cudaSuccess && size_bytes != 0) {
        error = DRIVER(cuMemsetD8Async, (CUdeviceptr)pointer, (unsigned char)value, size_bytes,
                       stream);
    }
    return remember(error);
}

static enum cudaMemoryType type_of(CUmemorytype type, unsigned int managed)
{
    if (managed) {
        return cudaMemoryTypeManaged;
    }
    switch (type) {
    case CU_MEMORYTYPE_HOST:
        return cudaMemoryTypeHost;
    case CU_MEMORYTYPE_DEVICE:
        return cudaMemoryTypeDevice;
    default:
        return cudaMemoryTypeUnregistered;
    }
}

/* Memory the driver does not know is no error: the driver leaves its attributes zero. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    CUmemorytype type = 0;
    unsigned int managed = 0;
    int device = cudaInvalidDeviceId;
    CUdeviceptr on_device = 0;
    void *on_host = NULL;
    CUpointer_attribute names[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,    CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        CU_POINTER_ATTRIBUTE_HOST_POINTER,
    };
    void *values[] = {&type, &managed, &device, &on_device, &on_host};

    cudaError_t error = enter_context()
                        ?: DRIVER(cuPointerGetAttributes, sizeof names / sizeof *names, names,
                                  values, (CUdeviceptr)pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = type_of(type, managed);
    attributes->device = device;
    attributes->devicePointer = (void *)on_device;
    attributes->hostPointer = on_host;
    return remember(error);
}
