/* Finding the driver, giving each thread its context, and errors. */
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct driver driver;

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static cudaError_t load_error;
static atomic_bool unloading;
static __thread cudaError_t last_error;

/* Objects made before the first call are destroyed after this ran, and their destructors must
 * find a runtime that refuses politely, as the real one does. */
static void unload(void)
{
    atomic_store(&unloading, true);
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "stand-in cudart: %s\n", dlerror());
        load_error = cudaErrorInsufficientDriver;
        return;
    }
#define FIND(name) driver.name = (__typeof__(driver.name))dlsym(library, #name);
    DRIVER_CALLS(FIND)
#undef FIND
    load_error = DRIVER(cuInit, 0);
    atexit(unload);
}

cudaError_t enter_driver(void)
{
    if (atomic_load(&unloading)) {
        return cudaErrorCudartUnloading;
    }
    pthread_once(&load_once, load);
    return load_error;
}

cudaError_t use_primary_context(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static CUcontext primary;

    /* Retained once, so that the count of the driver's holders stays what a program expects. */
    pthread_mutex_lock(&lock);
    cudaError_t error =
        primary != NULL ? cudaSuccess : DRIVER(cuDevicePrimaryCtxRetain, &primary, DEVICE);
    pthread_mutex_unlock(&lock);
    return error ?: DRIVER(cuCtxSetCurrent, primary);
}

cudaError_t enter_context(void)
{
    CUcontext current = NULL;
    cudaError_t error = enter_driver() ?: DRIVER(cuCtxGetCurrent, &current);
    if (error != cudaSuccess || current != NULL) {
        return error;
    }
    return use_primary_context();
}

cudaError_t remember(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

/* Filled by `build` from the real runtime, which knows its errors without a driver. */
static const struct {
    cudaError_t error;
    const char *name;
    const char *sentence;
} error_texts[] = {
#include "errors.inc"
};

#define ERROR_TEXTS (sizeof error_texts / sizeof *error_texts)

const char *cudaGetErrorName(cudaError_t error)
{
    for (size_t i = 0; i < ERROR_TEXTS; i++) {
        if (error_texts[i].error == error) {
            return error_texts[i].name;
        }
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (size_t i = 0; i < ERROR_TEXTS; i++) {
        if (error_texts[i].error == error) {
            return error_texts[i].sentence;
        }
    }
    return "unrecognized error code";
}

/* More than torch imports from the runtime and we use of the driver together. */
#define UNSUPPORTED_MAX 512

static pthread_mutex_t unsupported_lock = PTHREAD_MUTEX_INITIALIZER;
static const char *unsupported_names[UNSUPPORTED_MAX];
static size_t unsupported_count;

cudaError_t unsupported(const char *name)
{
    size_t i = 0;
    pthread_mutex_lock(&unsupported_lock);
    while (i < unsupported_count && strcmp(unsupported_names[i], name) != 0) {
        i++;
    }
    if (i == unsupported_count && i < UNSUPPORTED_MAX) {
        unsupported_names[unsupported_count++] = name;
        fprintf(stderr, "stand-in cudart: nobody wrote %s\n", name);
    }
    pthread_mutex_unlock(&unsupported_lock);
    return remember(cudaErrorNotSupported);
}

/* For tests: the name of the index-th call that somebody made and nobody wrote, or NULL. */
const char *standin_cudart_unsupported(size_t index)
{
    pthread_mutex_lock(&unsupported_lock);
    const char *name = index < unsupported_count ? unsupported_names[index] : NULL;
    pthread_mutex_unlock(&unsupported_lock);
    return name;
}
