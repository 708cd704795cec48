/* Threads call the PyTorch entry points while another creates and destroys the runtime of their GPU. Blocks keep
 * their bytes, whoever frees them, and the counts are right at the end. For the stand-in GPU, whose memory the
 * CPU can write to. Arguments: a folder, and the number of runtimes. */
#include "check.h"

#include <sched.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
enum { USERS = 3, SLOTS = 24, TRIES_MAX = 100000, RANDOM_BLOCKS_MAX = 64, POOLS = 3, HISTORY_EVENTS = 256, RANGES_MAX = 4096 };

typedef struct {
    unsigned char *start;
    size_t bytes;
    unsigned seed;
} block_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block_t slots[SLOTS]; /* full ones are freed by whoever takes them */
static int is_over;
static long allocated, exhausted;

static uint64_t next(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

/* Small ones, some larger than a page of the GPU, few of 8 MiB. */
static size_t some_bytes(uint64_t *seed)
{
    uint64_t chance = next(seed) % 16;
    return chance == 0 ? 8 * MIB : chance < 4 ? 2 * MIB + next(seed) % MIB : 1 + next(seed) % 100000;
}

static void release(block_t block)
{
    EXPECT(is_filled(block.start, block.bytes, block.seed));
    dormouse_torch_free(block.start, block.bytes, 0, NULL);
}

static void allocate(uint64_t *seed)
{
    block_t block = {NULL, some_bytes(seed), (unsigned)next(seed)};
    uintptr_t whole = 0;
    int is_pool = next(seed) % 2 != 0;
    block.start = is_pool ? dormouse_torch_pool_malloc((intptr_t)block.bytes, 0, NULL)
                          : dormouse_torch_malloc((intptr_t)block.bytes, 0, NULL);
    if (block.start == NULL) {
        EXPECT(is_pool); /* the other one throws */
        __atomic_fetch_add(&exhausted, 1, __ATOMIC_RELAXED);
        return;
    }
    __atomic_fetch_add(&allocated, 1, __ATOMIC_RELAXED);
    fill(block.start, block.bytes, block.seed);
    if (next(seed) % 4 == 0) {
        dormouse_torch_record_stream(block.start, NULL);
    }
    EXPECT(dormouse_torch_get_base(block.start + block.bytes / 2, &whole) == block.start && whole >= block.bytes);
    pthread_mutex_lock(&lock);
    block_t *slot = &slots[next(seed) % SLOTS];
    block_t old = *slot;
    *slot = block;
    pthread_mutex_unlock(&lock);
    if (old.start != NULL) {
        release(old);
    }
}

static void *use(void *argument)
{
    uint64_t seed = (uintptr_t)argument * UINT64_C(0x9e3779b97f4a7c15);
    while (!__atomic_load_n(&is_over, __ATOMIC_ACQUIRE)) {
        allocate(&seed);
    }
    return NULL;
}

/* The calls for a whole GPU. */
static void *manage(void *argument)
{
    uint64_t seed = 77;
    (void)argument;
    while (!__atomic_load_n(&is_over, __ATOMIC_ACQUIRE)) {
        dormouse_stats_t stats;
        dormouse_block_t blocks[RANDOM_BLOCKS_MAX];
        uint64_t count = 0;
        unsigned long long pool = next(&seed) % POOLS;
        DORMOUSE_INIT(&stats);
        switch (next(&seed) % 6) {
        case 0:
            dormouse_torch_empty_cache();
            break;
        case 1:
            dormouse_torch_set_memory_fraction(next(&seed) % 2 ? 1.0 : 0.5, 0);
            break;
        case 2: {
            double fraction = dormouse_torch_get_memory_fraction(0);
            EXPECT(fraction > 0 && fraction <= 1);
            break;
        }
        case 3:
            dormouse_torch_begin_pool(0, 1, pool, NULL);
            sched_yield();
            dormouse_torch_end_pool(0, 1, pool);
            dormouse_torch_release_pool(0, 1, pool);
            break;
        case 4: {
            /* On and off under the requests of the other threads. */
            static dormouse_memory_event_t events[2 * HISTORY_EVENTS];
            static dormouse_range_t ranges[RANGES_MAX];
            dormouse_memory_history_t history;
            DORMOUSE_INIT(&history);
            OK(dormouse_torch_record_history(next(&seed) % 4 ? HISTORY_EVENTS : 0, 0, 0, next(&seed) % 2));
            sched_yield();
            OK(dormouse_torch_get_history(0, DORMOUSE_TIER_DEVICE, &history, ranges, RANGES_MAX, events,
                                          2 * HISTORY_EVENTS));
            EXPECT(history.event_count <= HISTORY_EVENTS && history.range_count <= RANGES_MAX);
            break;
        }
        default:
            OK(dormouse_torch_get_stats(0, &stats, blocks, RANDOM_BLOCKS_MAX, &count));
            EXPECT(count <= RANDOM_BLOCKS_MAX && stats.allocated.current_bytes <= stats.mapped.current_bytes);
        }
    }
    return NULL;
}

static dormouse_status_t patiently(dormouse_status_t (*destroy)(void *), void *it)
{
    dormouse_status_t status = DORMOUSE_ERR_BUSY;
    for (int tries = 0; tries < TRIES_MAX && status == DORMOUSE_ERR_BUSY; tries++) {
        status = destroy(it);
        sched_yield();
    }
    return status;
}

static dormouse_status_t destroy_runtime(void *it)
{
    return dormouse_runtime_destroy(it);
}

/* One runtime: a block of PyTorch's sleeps and wakes under it, and stays when it goes. */
static void live(const char *folder, unsigned seed)
{
    dormouse_options_t options;
    dormouse_runtime_t *runtime = NULL;
    dormouse_tag_t *tag = NULL;
    size_t bytes = 4 * MIB;
    DORMOUSE_INIT(&options);
    options.device_kind = DORMOUSE_DEVICE_CUDA;
    options.nvme_dir = folder;
    options.nvme_file_bytes = 16 * MIB;
    options.host_budget_bytes = 32 * MIB;
    unsigned char *block = dormouse_torch_malloc((intptr_t)bytes, 0, NULL);
    fill(block, bytes, seed);
    OK(dormouse_runtime_create(&options, &runtime));
    OK(dormouse_tag_create(runtime, "raced", 0, &tag));
    OK(dormouse_tag_add(tag, block, bytes));
    dormouse_status_t slept = dormouse_tag_sleep(tag, 1 + (int32_t)(seed % 2), NULL);
    EXPECT(slept == DORMOUSE_OK || slept == DORMOUSE_PARTIAL || slept == DORMOUSE_DECLINED);
    if (seed % 3 != 0) { /* otherwise the destruction of the tag wakes it */
        OK(dormouse_tag_wake(tag, NULL));
        EXPECT(is_filled(block, bytes, seed));
    }
    OK(dormouse_tag_destroy(tag));
    EXPECT(patiently(destroy_runtime, runtime) == DORMOUSE_OK);
    RETURNS(dormouse_tag_create(runtime, "late", 0, &tag), DORMOUSE_ERR_STALE, "");
    EXPECT(is_filled(block, bytes, seed));
    dormouse_torch_free(block, bytes, 0, NULL);
}

int main(int argc, char **argv)
{
    pthread_t threads[USERS + 1];
    dormouse_stats_t stats;
    uint64_t count = 1;
    if (argc != 3) {
        return 2;
    }
    for (uintptr_t at = 0; at <= USERS; at++) {
        EXPECT(pthread_create(&threads[at], NULL, at < USERS ? use : manage, (void *)(at + 1)) == 0);
    }
    for (int at = 0; at < atoi(argv[2]); at++) {
        live(argv[1], (unsigned)at);
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_RELEASE);
    for (int at = 0; at <= USERS; at++) {
        pthread_join(threads[at], NULL);
    }
    for (int at = 0; at < SLOTS; at++) {
        if (slots[at].start != NULL) {
            release(slots[at]);
        }
    }
    DORMOUSE_INIT(&stats);
    OK(dormouse_torch_get_stats(0, &stats, NULL, 0, &count));
    EXPECT(count == 0 && stats.allocated.current_bytes == 0 && stats.asleep.current_bytes == 0);
    EXPECT(allocated > 0);
    printf("allocated %ld, exhausted %ld\n", allocated, exhausted);
    return done("race_torch");
}
