/* The device: its number, its figures, its versions. None of these needs a context. */
#include "runtime.h"

#include <stdio.h>
#include <string.h>

cudaError_t check_device(int device)
{
    return device == DEVICE ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    return remember(enter_driver() ?: DRIVER(cuDeviceGetCount, count));
}

cudaError_t cudaGetDevice(int *device)
{
    *device = DEVICE;
    return remember(enter_driver());
}

cudaError_t cudaSetDevice(int device)
{
    return remember(enter_driver() ?: check_device(device) ?: use_primary_context());
}

cudaError_t cudaDriverGetVersion(int *version)
{
    return remember(enter_driver() ?: DRIVER(cuDriverGetVersion, version));
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* The numbers of cudaDeviceAttr are those of CUdevice_attribute. */
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    return remember(enter_driver() ?: check_device(device)
                    ?: DRIVER(cuDeviceGetAttribute, value, (CUdevice_attribute)attribute, device));
}

/* Properties that are attributes under another name: those that torch shows or divides work by. */
#define PROPERTIES(X)                                                                              \
    X(asyncEngineCount, ASYNC_ENGINE_COUNT)                                                        \
    X(canMapHostMemory, CAN_MAP_HOST_MEMORY)                                                       \
    X(concurrentKernels, CONCURRENT_KERNELS)                                                       \
    X(cooperativeLaunch, COOPERATIVE_LAUNCH)                                                       \
    X(hostRegisterSupported, HOST_REGISTER_SUPPORTED)                                              \
    X(l2CacheSize, L2_CACHE_SIZE)                                                                  \
    X(major, COMPUTE_CAPABILITY_MAJOR)                                                             \
    X(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR)                                   \
    X(maxGridSize[0], MAX_GRID_DIM_X)                                                              \
    X(maxGridSize[1], MAX_GRID_DIM_Y)                                                              \
    X(maxGridSize[2], MAX_GRID_DIM_Z)                                                              \
    X(maxThreadsDim[0], MAX_BLOCK_DIM_X)                                                           \
    X(maxThreadsDim[1], MAX_BLOCK_DIM_Y)                                                           \
    X(maxThreadsDim[2], MAX_BLOCK_DIM_Z)                                                           \
    X(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK)                                                   \
    X(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR)                                 \
    X(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH)                                                     \
    X(memPitch, MAX_PITCH)                                                                         \
    X(minor, COMPUTE_CAPABILITY_MINOR)                                                             \
    X(multiProcessorCount, MULTIPROCESSOR_COUNT)                                                   \
    X(pciBusID, PCI_BUS_ID)                                                                        \
    X(pciDeviceID, PCI_DEVICE_ID)                                                                  \
    X(pciDomainID, PCI_DOMAIN_ID)                                                                  \
    X(regsPerBlock, MAX_REGISTERS_PER_BLOCK)                                                       \
    X(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR)                                     \
    X(reservedSharedMemPerBlock, RESERVED_SHARED_MEMORY_PER_BLOCK)                                 \
    X(sharedMemPerBlock, MAX_SHARED_MEMORY_PER_BLOCK)                                              \
    X(sharedMemPerBlockOptin, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)                                   \
    X(sharedMemPerMultiprocessor, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)                            \
    X(streamPrioritiesSupported, STREAM_PRIORITIES_SUPPORTED)                                      \
    X(textureAlignment, TEXTURE_ALIGNMENT)                                                         \
    X(totalConstMem, TOTAL_CONSTANT_MEMORY)                                                        \
    X(unifiedAddressing, UNIFIED_ADDRESSING)                                                       \
    X(warpSize, WARP_SIZE)

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    cudaError_t error =
        enter_driver() ?: check_device(device)
        ?: DRIVER(cuDeviceGetName, properties->name, sizeof properties->name, device)
        ?: DRIVER(cuDeviceGetUuid_v2, (CUuuid *)&properties->uuid, device)
        ?: DRIVER(cuDeviceTotalMem_v2, &properties->totalGlobalMem, device);
    int value = 0;
#define ASK(member, name)                                                                          \
    error = error ?: DRIVER(cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_##name, device);     \
    properties->member = value;
    PROPERTIES(ASK)
#undef ASK
    return remember(error);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int text_bytes, int device)
{
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess) {
        return error;
    }
    int wanted = snprintf(text, (size_t)text_bytes, "%04x:%02x:%02x.0", properties.pciDomainID,
                          properties.pciBusID, properties.pciDeviceID);
    return remember(wanted < text_bytes ? cudaSuccess : cudaErrorInvalidValue);
}

/* A device is not its own peer. */
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = 0;
    return remember(enter_driver() ?: check_device(device) ?: check_device(peer));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    return IN_CONTEXT(cuCtxGetStreamPriorityRange, least, greatest);
}

cudaError_t cudaDeviceSynchronize(void)
{
    return IN_CONTEXT(cuCtxSynchronize);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    return IN_CONTEXT(cuMemGetInfo_v2, free_bytes, total_bytes);
}

/* How torch comes by the virtual memory calls. A name the driver lacks is no error here. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function,
                                             unsigned int version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status)
{
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *function = NULL;
    cudaError_t error =
        enter_driver()
        ?: DRIVER(cuGetProcAddress_v2, symbol, function, (int)version, flags, &found);
    if (status != NULL) {
        *status = (enum cudaDriverEntryPointQueryResult)found;
    }
    return remember(error == cudaErrorSymbolNotFound ? cudaSuccess : error);
}
