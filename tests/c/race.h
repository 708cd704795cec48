/* Threads that race the destruction of handles with their use. The table of functions and the values of
 * their arguments are generated from the header by ffi/tests/suite/race.rs, which includes this file. */
#ifndef DORMOUSE_TESTS_RACE_H
#define DORMOUSE_TESTS_RACE_H

#include "check.h"

#include <sched.h>
#include <semaphore.h>
#include <stdarg.h>

enum { RUNTIME, TAG, FOREST, PLAN, PREFIX, HISTORY, DIALOGUE, KINDS };
enum { THREADS = 4, SLOTS = 3, BLOCKS = 16, SCRATCH_BYTES = 4 << 20, TRIES_MAX = 100000, LAYERS = 4, ROUNDS_MAX = 16 };

typedef struct {
    uint64_t seed;
    char *scratch; /* written by the library */
    char *source;  /* read by the library */
    const void *ptrs[4];
    dormouse_options_t options;
    dormouse_sequences_t sequences;
    dormouse_plan_options_t plan_options;
    dormouse_merge_args_t merge_args;
    dormouse_model_t model;
    uint64_t loss_from[4];
    uint32_t parents[5];
    uint64_t lengths[5];
    dormouse_history_options_t history_options;
    dormouse_rollout_t rollouts[4];
    dormouse_draft_t drafts[4];
    int32_t drafted[4][8];
    dormouse_dialogue_options_t dialogue_options;
    dormouse_turn_t turns[4];
    dormouse_query_t query;
} context_t;

typedef struct {
    const char *name;
    dormouse_status_t (*call)(context_t *);
    unsigned kinds;        /* bits of the kinds of its handles */
    const int32_t *errors; /* the documented ones, then 0 */
} entry_t;

static void *slots[KINDS][SLOTS];
static void *blocks[BLOCKS];
static uint64_t last_id, kept_id; /* of the stash: the latest, and one that lives as long as its runtime */
static void *asleep;              /* a block that is never freed, and sleeps under `keeper` of each runtime */
static dormouse_tag_t *keeper;
static const char *folder, *dump;
static int focus; /* the kind whose handles are destroyed; KINDS: all */
static int made[KINDS], successes, is_over;
static sem_t turns[2]; /* of the creating and of the destroying thread */
static const entry_t *entries;
static unsigned entry_count;

static inline uint64_t next(context_t *c)
{
    c->seed ^= c->seed << 13;
    c->seed ^= c->seed >> 7;
    c->seed ^= c->seed << 17;
    return c->seed;
}

/* One of `count` values. */
static inline uint64_t pick(context_t *c, int count, ...)
{
    va_list values;
    uint64_t value = 0;
    int at = (int)(next(c) % (uint64_t)count);
    va_start(values, count);
    for (int i = 0; i <= at; i++) {
        value = va_arg(values, uint64_t);
    }
    va_end(values);
    return value;
}

#define PICK2(c, a, b) pick(c, 2, (uint64_t)(a), (uint64_t)(b))
#define PICK4(c, a, b, d, e) pick(c, 4, (uint64_t)(a), (uint64_t)(b), (uint64_t)(d), (uint64_t)(e))

/* A handle of a kind, which other threads destroy meanwhile; at times NULL or no handle at all. */
static inline void *handle(context_t *c, int kind)
{
    uint64_t chance = next(c) % 64;
    return chance == 0   ? NULL
           : chance == 1 ? (void *)(uintptr_t)next(c)
                         : __atomic_load_n(&slots[kind][next(c) % SLOTS], __ATOMIC_ACQUIRE);
}

/* A block, which other threads free meanwhile. */
static inline void *block(context_t *c)
{
    return __atomic_load_n(&blocks[next(c) % BLOCKS], __ATOMIC_ACQUIRE);
}

/* A number of the stash, which other threads drop meanwhile. */
static inline uint64_t stash_id(context_t *c)
{
    return __atomic_load_n(next(c) % 2 ? &last_id : &kept_id, __ATOMIC_RELAXED);
}

/* A block that nobody else frees. */
static inline void *own_block(context_t *c)
{
    return __atomic_exchange_n(&blocks[next(c) % BLOCKS], NULL, __ATOMIC_ACQ_REL);
}

static inline const void *const *block_array(context_t *c)
{
    for (int at = 0; at < 4; at++) {
        c->ptrs[at] = block(c);
    }
    return c->ptrs;
}

static dormouse_status_t destroy(int kind, void *it)
{
    switch (kind) {
    case RUNTIME:
        dormouse_stash_drop(it, __atomic_load_n(&kept_id, __ATOMIC_RELAXED));
        dormouse_tag_destroy(__atomic_load_n(&keeper, __ATOMIC_ACQUIRE));
        return dormouse_runtime_destroy(it);
    case TAG:
        return dormouse_tag_destroy(it);
    case FOREST:
        return dormouse_forest_destroy(it);
    case PLAN:
        return dormouse_plan_destroy(it);
    case HISTORY:
        return dormouse_history_destroy(it);
    case DIALOGUE:
        return dormouse_dialogue_destroy(it);
    default:
        return dormouse_prefix_destroy(it);
    }
}

/* Destroys a handle, or finds it destroyed. */
static void destroy_now(int kind, void *it)
{
    dormouse_status_t status = DORMOUSE_ERR_BUSY;
    for (int tries = 0; tries < TRIES_MAX && status == DORMOUSE_ERR_BUSY; tries++) {
        status = destroy(kind, it);
        if (status == DORMOUSE_ERR_BUSY) {
            sched_yield();
        }
    }
    if (status != DORMOUSE_OK && status != DORMOUSE_ERR_STALE) {
        fprintf(stderr, "kind %d stays: %d (%s)\n", kind, (int)status, dormouse_get_last_error());
        __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    }
}

/* Gives a created handle to all threads. */
static inline void publish(context_t *c, int kind, void *it)
{
    void *old = it;
    __atomic_fetch_add(&made[kind], 1, __ATOMIC_RELAXED);
    /* A runtime with handles of its own is never destroyed. */
    if (focus != RUNTIME || kind == RUNTIME) {
        old = __atomic_exchange_n(&slots[kind][next(c) % SLOTS], it, __ATOMIC_ACQ_REL);
    }
    /* There is one runtime at a time: an older one is gone. */
    if (old != NULL && kind != RUNTIME) {
        destroy_now(kind, old);
    }
}

/* What follows a success, by function. */
static inline void after_tag_enter(dormouse_tag_t *tag)
{
    /* A tag that a thread has entered cannot be destroyed. */
    dormouse_status_t status = dormouse_tag_leave(tag);
    if (status != DORMOUSE_OK) {
        fprintf(stderr, "an entered tag: %d (%s)\n", (int)status, dormouse_get_last_error());
        __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    }
}

static inline void after_mem_alloc(context_t *c, dormouse_runtime_t *runtime, void *it)
{
    void *old = __atomic_exchange_n(&blocks[next(c) % BLOCKS], it, __ATOMIC_ACQ_REL);
    if (old != NULL) {
        dormouse_mem_free(runtime, old, NULL);
    }
}

static inline void after_stash_put(dormouse_runtime_t *runtime, uint64_t id)
{
    __atomic_store_n(&last_id, id, __ATOMIC_RELAXED);
    sched_yield();
    dormouse_stash_drop(runtime, id);
}

static void prepare(context_t *c, uint64_t seed)
{
    memset(c, 0, sizeof *c);
    c->seed = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    c->scratch = calloc(1, SCRATCH_BYTES);
    c->source = calloc(1, SCRATCH_BYTES);
    if (c->scratch == NULL || c->source == NULL) {
        exit(1);
    }
    DORMOUSE_INIT(&c->options);
    c->options.nvme_dir = folder;
    c->options.nvme_file_bytes = 4 << 20;
    c->options.alloc_budget_bytes = 256 << 20;
    DORMOUSE_INIT(&c->sequences);
    c->parents[0] = DORMOUSE_NODE_NONE;
    for (int at = 0; at < 5; at++) {
        c->lengths[at] = at == 0 ? 16 : 3;
    }
    for (int at = 0; at < 4; at++) {
        c->loss_from[at] = 16;
    }
    c->sequences.parents = c->parents;
    c->sequences.lengths = c->lengths;
    c->sequences.node_count = 5;
    DORMOUSE_INIT(&c->model);
    c->model.layers = LAYERS;
    c->model.heads = c->model.kv_heads = 2;
    c->model.head_dim = c->model.dtype_bytes = 4;
    c->model.layer_linear_weights = 1000;
    c->model.head_weights = 100;
    DORMOUSE_INIT(&c->plan_options);
    c->plan_options.sequence_count = 4;
    c->plan_options.loss_from = c->loss_from;
    c->plan_options.vocab = 10;
    c->plan_options.microbatch_rows = 8;
    c->plan_options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    c->plan_options.model = &c->model;
    DORMOUSE_INIT(&c->merge_args);
    c->merge_args.out1 = c->merge_args.out2 = c->merge_args.lse1 = c->merge_args.lse2 = c->source;
    c->merge_args.out = c->scratch;
    c->merge_args.lse = c->scratch + (1 << 20);
    c->merge_args.rows = 4;
    c->merge_args.head_dim = 8;
    c->merge_args.dtype = DORMOUSE_DTYPE_F32;
    DORMOUSE_INIT(&c->history_options);
    c->history_options.vocab = 10;
    c->history_options.budget_bytes = 4096;
    for (int at = 0; at < 4; at++) {
        /* Prompts and responses of zeros. */
        dormouse_tokens_t tokens = {c->source, 8, 4, 0};
        c->rollouts[at].prompt = c->rollouts[at].response = tokens;
        c->rollouts[at].prompt.count = (uint64_t)at;
        c->drafts[at].end = tokens;
        c->drafts[at].ids = c->drafted[at];
        c->drafts[at].capacity = 8;
        c->turns[at].embedding = (void *)c->source;
        c->turns[at].dimension = 8;
        c->turns[at].passage = (dormouse_bytes_t){c->source, 100};
    }
    DORMOUSE_INIT(&c->dialogue_options);
    c->dialogue_options.dimension = 8;
    c->dialogue_options.entries_max = 3;
    c->dialogue_options.unsynced = 1;
    c->query.embedding = (void *)c->source;
    c->query.dimension = 8;
    c->query.entries_max = 3;
}

/* Creates a handle in a state in which most functions have something to do. */
static void make(context_t *c, int kind)
{
    dormouse_runtime_t *runtime = NULL;
    dormouse_tag_t *tag = NULL;
    dormouse_forest_t *forest = NULL;
    dormouse_plan_t *plan = NULL;
    dormouse_prefix_t *prefix = NULL;
    dormouse_history_t *history = NULL;
    dormouse_dialogue_t *dialogue = NULL;
    uint64_t recorded = 0;
    void *live = __atomic_load_n(&slots[RUNTIME][0], __ATOMIC_ACQUIRE);
    switch (kind) {
    case RUNTIME:
        if (dormouse_runtime_create(&c->options, &runtime) == DORMOUSE_OK) {
            uint64_t id = 0;
            if (dormouse_stash_put(runtime, c->source, 4096, 9, NULL, &id) == DORMOUSE_OK) {
                __atomic_store_n(&kept_id, id, __ATOMIC_RELAXED);
            }
            void *memory = NULL;
            if (dormouse_mem_alloc(runtime, 65536, 0, NULL, &memory) == DORMOUSE_OK) {
                after_mem_alloc(c, runtime, memory);
            }
            if ((asleep != NULL || dormouse_mem_alloc(runtime, 65536, 0, NULL, &asleep) == DORMOUSE_OK) &&
                dormouse_tag_create(runtime, "asleep", 0, &tag) == DORMOUSE_OK) {
                OK(dormouse_tag_add(tag, asleep, 65536));
                OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_HOST, NULL));
                __atomic_store_n(&keeper, tag, __ATOMIC_RELEASE);
            }
            for (int at = 0; at < SLOTS; at++) {
                __atomic_store_n(&slots[RUNTIME][at], runtime, __ATOMIC_RELEASE);
            }
            __atomic_fetch_add(&made[RUNTIME], 1, __ATOMIC_RELAXED);
        }
        return;
    case TAG:
        if (dormouse_tag_create(live, "raced", 0, &tag) == DORMOUSE_OK) {
            void *memory = NULL;
            if (dormouse_mem_alloc(live, 65536, 0, NULL, &memory) == DORMOUSE_OK) {
                dormouse_tag_add(tag, memory, 65536);
                after_mem_alloc(c, live, memory);
            }
            publish(c, TAG, tag);
        }
        return;
    case FOREST:
        if (next(c) % 2 == 0) {
            dormouse_sequences_t growing;
            DORMOUSE_INIT(&growing);
            growing.vocab = 10;
            growing.flags = DORMOUSE_SEQUENCES_GROW;
            OK(dormouse_forest_create(&growing, &forest));
        } else {
            OK(dormouse_forest_create(&c->sequences, &forest));
        }
        publish(c, FOREST, forest);
        return;
    case PLAN:
        OK(dormouse_forest_create(&c->sequences, &forest));
        OK(dormouse_plan_create(forest, &c->plan_options, &plan));
        OK(dormouse_forest_destroy(forest));
        publish(c, PLAN, plan);
        return;
    case HISTORY:
        /* A directory has one history at a time. */
        c->history_options.dir = folder;
        if (dormouse_history_create(&c->history_options, &history) == DORMOUSE_ERR_BUSY) {
            c->history_options.dir = NULL;
            OK(dormouse_history_create(&c->history_options, &history));
        }
        OK(dormouse_history_record(history, c->rollouts, 4, &recorded));
        publish(c, HISTORY, history);
        return;
    case DIALOGUE:
        OK(dormouse_dialogue_create(&c->dialogue_options, &dialogue));
        OK(dormouse_dialogue_record(dialogue, c->turns, 4, &recorded));
        publish(c, DIALOGUE, dialogue);
        return;
    default:
        if (dormouse_prefix_create(live, NULL, 0, LAYERS, &prefix) == DORMOUSE_OK) {
            void *gradient;
            uint64_t state = next(c) % 4;
            if (state > 0) {
                dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_A, NULL);
            }
            if (state > 1) {
                dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_BEGIN, 0, NULL);
                dormouse_prefix_add_boundary(prefix, 0, 0, c->source, 4096, 1024, DORMOUSE_DTYPE_F32, NULL,
                                             &gradient);
            }
            if (state > 2) {
                dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_END, 0, NULL);
                for (uint32_t layer = 1; layer < LAYERS; layer++) {
                    dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_BEGIN, layer, NULL);
                    dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_END, layer, NULL);
                }
                dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_B, NULL);
            }
            publish(c, PREFIX, prefix);
        }
    }
}

static dormouse_status_t call(context_t *c, const entry_t *entry)
{
    dormouse_status_t status = entry->call(c);
    const int32_t *known = entry->errors;
    while (status < 0 && *known != 0 && *known != status) {
        known++;
    }
    if (status < 0 && *known == 0) {
        fprintf(stderr, "%s: undocumented %d (%s)\n", entry->name, (int)status, dormouse_get_last_error());
        __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    }
    if (status >= 0) {
        __atomic_fetch_add(&successes, 1, __ATOMIC_RELAXED);
    }
    return status;
}

typedef struct {
    int number, calls;
    const entry_t *entry; /* NULL: any */
    context_t context;
} worker_t;

static pthread_barrier_t all;

/* Lets the users get into their calls. */
static void pause_a_while(context_t *c)
{
    uint64_t rounds = next(c) % (1u << next(c) % 16);
    for (uint64_t at = next(c) % 16; at > 0; at--) {
        sched_yield();
    }
    for (volatile uint64_t at = 0; at < rounds; at++) {
    }
}

/* Thread 0 creates and thread 1 destroys, in turns; the others use. With any function, all use. */
static void *work(void *argument)
{
    worker_t *worker = argument;
    context_t *c = &worker->context;
    pthread_barrier_wait(&all);
    if (worker->entry == NULL) {
        for (int at = 0; at < worker->calls; at++) {
            if (at % 16 == 0) {
                make(c, (int)(next(c) % KINDS));
            }
            call(c, &entries[next(c) % entry_count]);
        }
    } else if (worker->number <= 1) {
        for (int at = 0; at < worker->calls; at++) {
            sem_wait(&turns[worker->number]);
            if (worker->number == 0) {
                make(c, focus);
            } else {
                pause_a_while(c);
                destroy(focus, handle(c, focus));
            }
            sem_post(&turns[1 - worker->number]);
        }
        __atomic_store_n(&is_over, 1, __ATOMIC_RELEASE);
    } else {
        while (!__atomic_load_n(&is_over, __ATOMIC_ACQUIRE)) {
            if (call(c, worker->entry) == DORMOUSE_ERR_STALE) {
                usleep(20); /* until the next one is created */
            }
        }
    }
    return NULL;
}

static void race(worker_t *workers, const entry_t *entry, int calls)
{
    pthread_t threads[THREADS];
    is_over = 0;
    sem_init(&turns[0], 0, 1);
    sem_init(&turns[1], 0, 0);
    for (int at = 0; at < THREADS; at++) {
        workers[at].number = at;
        workers[at].calls = calls;
        workers[at].entry = entry;
        EXPECT(pthread_create(&threads[at], NULL, work, &workers[at]) == 0);
    }
    for (int at = 0; at < THREADS; at++) {
        pthread_join(threads[at], NULL);
    }
}

/* Destroys all handles but the runtime. */
static void clear(void)
{
    for (int kind = KINDS - 1; kind > RUNTIME; kind--) {
        for (int at = 0; at < SLOTS; at++) {
            void *old = __atomic_exchange_n(&slots[kind][at], NULL, __ATOMIC_ACQ_REL);
            if (old != NULL) {
                destroy_now(kind, old);
            }
        }
    }
}

static int run(const entry_t *table, unsigned count, int argc, char **argv)
{
    static worker_t workers[THREADS];
    if (argc != 4) {
        return 2;
    }
    folder = argv[1];
    dump = argv[2];
    int calls = atoi(argv[3]);
    entries = table;
    entry_count = count;
    for (int at = 0; at < THREADS; at++) {
        prepare(&workers[at].context, (uint64_t)at + 1);
    }
    EXPECT(pthread_barrier_init(&all, NULL, THREADS) == 0);
    for (focus = RUNTIME; focus < KINDS; focus++) {
        for (unsigned at = 0; at < count; at++) {
            if (table[at].kinds & 1u << focus) {
                int before = successes;
                /* A runtime starts threads and a file: fewer of them. A busy machine may need several rounds. */
                for (int round = 0; round < ROUNDS_MAX && (round == 0 || successes == before); round++) {
                    make(&workers[0].context, RUNTIME);
                    race(workers, &table[at], focus == RUNTIME ? calls / 16 + 1 : calls);
                    clear();
                }
                if (successes == before) {
                    fprintf(stderr, "%s never succeeded\n", table[at].name);
                    failures++;
                }
            }
        }
        EXPECT(made[focus] > 1);
    }
    focus = KINDS;
    race(workers, NULL, calls * 8);
    clear();
    /* Nothing of it is left: a runtime with handles cannot be destroyed. One slot or more have the live one. */
    make(&workers[0].context, RUNTIME);
    int destroyed = 0;
    for (int at = 0; at < SLOTS; at++) {
        dormouse_status_t status = destroy(RUNTIME, slots[RUNTIME][at]);
        destroyed += status == DORMOUSE_OK && slots[RUNTIME][at] != NULL;
        EXPECT(status == DORMOUSE_OK || status == DORMOUSE_ERR_STALE);
    }
    EXPECT(destroyed == 1);
    pthread_barrier_destroy(&all);
    return done("race");
}

#endif
