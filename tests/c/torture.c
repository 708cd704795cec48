/* Stress test of the malloc family: many threads, frees on other threads, sizes around the minimum that
 * the library serves, and checks of all contents. Not linked to the library: it tests the preload
 * library. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define THREADS 6
#define ROUNDS 4000
#define SLOTS 64

typedef struct slot {
    pthread_mutex_t lock;
    unsigned char *memory;
    size_t bytes;
    unsigned char mark;
} slot;

static slot slots[SLOTS];
static int failures;

static void wrong(const char *what)
{
    fprintf(stderr, "wrong: %s\n", what);
    __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
}

static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static size_t some_size(uint64_t *state)
{
    static const size_t around[] = {1, 100, 4096, 65535, 65536, 65537, 200000, 1 << 20, 3 << 20};
    return around[next(state) % (sizeof around / sizeof *around)] + next(state) % 64;
}

static unsigned char *some_memory(uint64_t *state, size_t bytes)
{
    void *memory = NULL;
    size_t align = (size_t)16 << next(state) % 10;
    switch (next(state) % 7) {
    case 0:
        return (unsigned char *)malloc(bytes);
    case 1:
        memory = calloc(bytes / 8 + 1, 8);
        for (size_t at = 0; memory != NULL && at < bytes; at += 61) {
            if (((unsigned char *)memory)[at] != 0) {
                wrong("calloc gave bytes that are not zero");
                break;
            }
        }
        return (unsigned char *)memory;
    case 2:
        if (posix_memalign(&memory, align, bytes) != 0) {
            return NULL;
        }
        break;
    case 3:
        memory = aligned_alloc(align, (bytes + align - 1) / align * align);
        break;
    case 4:
        memory = memalign(align, bytes);
        break;
    case 5:
        align = 4096;
        memory = valloc(bytes);
        break;
    default:
        align = 4096;
        memory = pvalloc(bytes);
        break;
    }
    if ((uintptr_t)memory % align != 0) {
        wrong("alignment");
    }
    return (unsigned char *)memory;
}

static int is_marked(const unsigned char *memory, size_t bytes, unsigned char mark)
{
    for (size_t at = 0; at < bytes; at += 509) {
        if (memory[at] != mark) {
            return 0;
        }
    }
    return memory[bytes - 1] == mark;
}

static void *worker(void *seed)
{
    uint64_t state = (uint64_t)(uintptr_t)seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (int round = 0; round < ROUNDS; round++) {
        slot *it = &slots[next(&state) % SLOTS];
        pthread_mutex_lock(&it->lock);
        if (it->memory != NULL && !is_marked(it->memory, it->bytes, it->mark)) {
            wrong("contents");
        }
        if (it->memory != NULL && next(&state) % 3 == 0) {
            size_t bytes = some_size(&state);
            size_t kept = bytes < it->bytes ? bytes : it->bytes;
            unsigned char *moved = (unsigned char *)(next(&state) % 2 ? realloc(it->memory, bytes)
                                                     : reallocarray(it->memory, 1, bytes));
            if (moved == NULL || moved[0] != it->mark || moved[kept - 1] != it->mark) {
                wrong("realloc");
            } else {
                it->memory = moved;
                it->bytes = bytes;
                memset(moved, it->mark, bytes);
            }
        } else if (it->memory != NULL) {
            errno = 77;
            free(it->memory); /* often allocated by another thread */
            if (errno != 77) {
                wrong("free changed errno");
            }
            it->memory = NULL;
        } else {
            it->bytes = some_size(&state);
            it->mark = (unsigned char)next(&state);
            it->memory = some_memory(&state, it->bytes);
            if (it->memory == NULL || malloc_usable_size(it->memory) < it->bytes) {
                wrong("allocation");
            } else {
                memset(it->memory, it->mark, it->bytes);
            }
        }
        pthread_mutex_unlock(&it->lock);
    }
    return NULL;
}

static void edges(void)
{
    void *memory = (void *)&failures;
    /* volatile keeps the compiler from refusing or removing these */
    volatile size_t huge = SIZE_MAX - 100, half = SIZE_MAX / 2;
    free(NULL);
    if (malloc(huge) != NULL || calloc(half, 3) != NULL || realloc(NULL, huge) != NULL) {
        wrong("impossible sizes");
    }
    errno = 0;
    if (reallocarray(NULL, half, 3) != NULL || errno != ENOMEM) {
        wrong("overflow");
    }
    if (posix_memalign(&memory, 24, 100) != EINVAL || posix_memalign(&memory, 2, 100) != EINVAL
        || memory != (void *)&failures) {
        wrong("posix_memalign refuses odd alignments");
    }
    if (posix_memalign(&memory, 64, huge) != ENOMEM) {
        wrong("posix_memalign says that there is no memory");
    }
    if (malloc_usable_size(NULL) != 0) {
        wrong("malloc_usable_size of NULL");
    }
    memory = malloc(1 << 20);
    memory = realloc(memory, 0);
    if (memory != NULL) {
        wrong("realloc to 0 frees");
    }
    memory = malloc(0);
    if (memory == NULL) {
        wrong("malloc of 0");
    }
    free(memory);
}

int main(void)
{
    pthread_t threads[THREADS];
    for (int s = 0; s < SLOTS; s++) {
        pthread_mutex_init(&slots[s].lock, NULL);
    }
    edges();
    for (uintptr_t t = 0; t < THREADS; t++) {
        pthread_create(&threads[t], NULL, worker, (void *)(t + 1));
    }
    for (int t = 0; t < THREADS; t++) {
        pthread_join(threads[t], NULL);
    }
    for (int s = 0; s < SLOTS; s++) {
        free(slots[s].memory);
    }
    if (failures == 0) {
        printf("torture: all checks passed\n");
    }
    return failures == 0 ? 0 : 1;
}
