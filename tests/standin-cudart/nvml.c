/* The stand-in libnvidia-ml.so.1: the few calls that torch's allocator makes of it, and crashes
 * without where there is a GPU. A library of its own; the header of the real one is not at hand. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

enum { NVML_SUCCESS = 0, NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_INSUFFICIENT_SIZE = 7 };

struct process {
    unsigned pid;
    unsigned long long used_bytes;
};

/* As far as both versions of the structure go; state 0 says that there is no fabric. */
struct fabric {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

int nvmlInit_v2(void)
{
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device)
{
    static char only_device;
    (void)bus_id;
    *device = &only_device;
    return NVML_SUCCESS;
}

int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *fabric)
{
    (void)device;
    memset((char *)fabric + sizeof fabric->version, 0, sizeof *fabric - sizeof fabric->version);
    return NVML_SUCCESS;
}

static void *driver_call(const char *name)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver == NULL ? NULL : dlsym(driver, name);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    int (*get_version)(int *) = (int (*)(int *))driver_call("cuDriverGetVersion");
    return get_version != NULL && get_version(version) == 0 ? NVML_SUCCESS
                                                            : NVML_ERROR_NOT_SUPPORTED;
}

/* This process alone uses the device; the driver knows how much of it. */
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, struct process *processes)
{
    size_t free_bytes = 0, total_bytes = 0;
    int (*get_info)(size_t *, size_t *) =
        (int (*)(size_t *, size_t *))driver_call("cuMemGetInfo_v2");
    (void)device;
    if (get_info == NULL || get_info(&free_bytes, &total_bytes) != 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (*count < 1) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    *count = 1;
    processes[0] = (struct process){(unsigned)getpid(), total_bytes - free_bytes};
    return NVML_SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type)
{
    (void)device, (void)link, (void)type;
    return NVML_ERROR_NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *pci)
{
    (void)device, (void)link, (void)pci;
    return NVML_ERROR_NOT_SUPPORTED;
}
