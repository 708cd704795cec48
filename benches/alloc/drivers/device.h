/* The stand-in driver as the drivers see it: streams, work on them, and its counts. Found by name,
 * so that a driver is compiled without CUDA's headers. */
#ifndef DORMOUSE_BENCH_DEVICE_H
#define DORMOUSE_BENCH_DEVICE_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* How long work lasts: longer than any allocator needs to free its memory and hand it out anew. */
enum { WORK_NS = 1000000 };

enum { DEVICE_STREAMS_MAX = 256, STREAM_NON_BLOCKING = 1 };

#define DEVICE_CALLS(X)                                                                            \
    X(int, cuInit, (unsigned))                                                                     \
    X(int, cuDevicePrimaryCtxRetain, (void **, int))                                               \
    X(int, cuCtxSetCurrent, (void *))                                                              \
    X(int, cuStreamCreate, (void **, unsigned))                                                    \
    X(int, cuLaunchHostFunc, (void *, void (*)(void *), void *))                                   \
    X(uint64_t, standin_calls, (const char *))                                                     \
    X(uint64_t, standin_calls_total, ())                                                           \
    X(uint64_t, standin_live, (const char *))

/* Calls that reports list separately, in addition to the sum of all. */
static const char *const counted_calls[] = {
    "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease",
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemGetInfo_v2",
    "cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventRecordWithFlags",
    "cuEventQuery", "cuEventSynchronize", "cuStreamWaitEvent", "cuStreamQuery",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuStreamIsCapturing",
    "cuStreamGetCaptureInfo_v2", "cuThreadExchangeStreamCaptureMode", "cuStreamGetId",
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
};
enum { COUNTED = sizeof counted_calls / sizeof *counted_calls };

static struct Device {
#define MEMBER(result, name, arguments) result(*name) arguments;
    DEVICE_CALLS(MEMBER)
#undef MEMBER
    void *context;
    void *streams[DEVICE_STREAMS_MAX];
    uint64_t calls[COUNTED], calls_total;
} device;

static void require(int status, const char *what)
{
    if (status != 0) {
        fprintf(stderr, "%s: driver code %d\n", what, status);
        exit(1);
    }
}

/* As a trainer's threads have it. */
static void device_start_thread()
{
    require(device.cuCtxSetCurrent(device.context), "cuCtxSetCurrent");
}

/* Loads the driver, and makes `streams` streams, of which the first is the default one. */
static void device_start(unsigned streams)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define FIND(result, name, arguments)                                                              \
    device.name = (result(*) arguments)dlsym(library, #name);                                      \
    require(device.name == nullptr, #name);
    DEVICE_CALLS(FIND)
#undef FIND
    require(device.cuInit(0), "cuInit");
    require(device.cuDevicePrimaryCtxRetain(&device.context, 0), "cuDevicePrimaryCtxRetain");
    device_start_thread();
    for (unsigned i = 1; i < streams; i++) {
        require(device.cuStreamCreate(&device.streams[i], STREAM_NON_BLOCKING), "cuStreamCreate");
    }
}

static void device_sleep(void *)
{
    struct timespec time = {0, WORK_NS};
    nanosleep(&time, nullptr);
}

/* Work on a stream, still at it when the call returns. It touches nothing: no bytes are there. */
static void device_use(unsigned stream)
{
    require(device.cuLaunchHostFunc(device.streams[stream], device_sleep, nullptr),
            "cuLaunchHostFunc");
}

static void device_nothing(void *)
{
}

/* Work that is over at once, but for the run-ahead of the stand-in driver. */
static void device_launch(unsigned stream)
{
    require(device.cuLaunchHostFunc(device.streams[stream], device_nothing, nullptr),
            "cuLaunchHostFunc");
}

static void device_mark()
{
    for (unsigned i = 0; i < COUNTED; i++) {
        device.calls[i] = device.standin_calls(counted_calls[i]);
    }
    device.calls_total = device.standin_calls_total();
}

static void device_report()
{
    printf(", \"peak_device_bytes\": %lu, \"calls_total\": %lu, \"calls\": {",
           device.standin_live("peak_bytes"), device.standin_calls_total() - device.calls_total);
    const char *comma = "";
    for (unsigned i = 0; i < COUNTED; i++) {
        uint64_t calls = device.standin_calls(counted_calls[i]) - device.calls[i];
        if (calls != 0) {
            printf("%s\"%s\": %lu", comma, counted_calls[i], calls);
            comma = ", ";
        }
    }
    printf("}");
}

#endif
