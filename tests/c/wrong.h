/* Calls with one wrong argument each, which ffi/tests/suite/wrong.rs generates from the header. They are made by the
 * first thread, by another one, while that one's thread-specific data is destroyed, in a forked child and while the
 * process exits. */
#ifndef DORMOUSE_TESTS_WRONG_H
#define DORMOUSE_TESTS_WRONG_H

#include "check.h"

enum { RUNTIME, TAG, FOREST, PLAN, PREFIX, HISTORY, DIALOGUE, KINDS };
enum { ARGUMENTS_MAX = 12, RESULT_BYTES = 8192, LONG_BYTES = 5000, BLOCK_BYTES = 65536, UNTOUCHED = 0xa5 };
enum { ONE, ANY };

static void *live[KINDS], *stale[KINDS];
static void *block, *asleep, *source;
static const void *block_pointer;
static uint64_t stashed;
static char long_text[LONG_BYTES + 1], dump[256];
static dormouse_options_t options;
static dormouse_sequences_t sequences;
static dormouse_plan_options_t plan_options;
static dormouse_merge_args_t merge_args;
static dormouse_model_t model;
static dormouse_history_options_t history_options;
static dormouse_rollout_t rollout;
static dormouse_draft_t draft;
static int32_t drafted[8];
static dormouse_dialogue_options_t dialogue_options;
static dormouse_turn_t turn;
static dormouse_query_t query;
static const char request[] = "{\"version\": 1, \"query\": \"draw_rank\", \"rank\": 0, "
                              "\"world\": {\"ranks\": [{\"steps\": [{\"compute_ns\": 100}]}]}}";
static uint32_t parents[] = {DORMOUSE_NODE_NONE, 0, 0};
static uint64_t lengths[] = {4, 2, 2};
static long calls;

/* What each argument points to, and how it was before the call. */
static _Alignas(16) char results[ARGUMENTS_MAX][RESULT_BYTES], before[ARGUMENTS_MAX][RESULT_BYTES];

static inline void reset(void)
{
    memset(results, UNTOUCHED, sizeof results);
}

static inline void remember(void)
{
    memcpy(before, results, sizeof results);
}

static inline void *result(int number)
{
    return results[number];
}

/* A versioned struct. */
static inline void *with_size(const void *it, uint32_t bytes)
{
    memcpy((char *)(uintptr_t)it, &bytes, sizeof bytes);
    return (void *)(uintptr_t)it;
}

static inline void *with_version(const void *it, uint32_t version)
{
    memcpy((char *)(uintptr_t)it + 4, &version, sizeof version);
    return (void *)(uintptr_t)it;
}

static inline void *sized(int number, size_t bytes)
{
    return with_version(with_size(results[number], (uint32_t)bytes), DORMOUSE_STRUCT_VERSION);
}

static inline void *given(int number, const void *it, size_t bytes)
{
    return memcpy(results[number], it, bytes);
}

/* A struct without a version. */
static inline void *copied(int number, const void *it, size_t bytes)
{
    return given(number, it, bytes);
}

static inline void check(const char *function, const char *what, dormouse_status_t seen, int wanted,
                         dormouse_status_t status, const int32_t *errors, int is_written)
{
    const char *message = dormouse_get_last_error();
    int is_known = wanted == ONE ? seen == status : seen >= 0;
    calls++;
    for (const int32_t *error = errors; wanted == ANY && *error != 0; error++) {
        is_known |= seen == *error;
    }
    if (!is_known) {
        fprintf(stderr, "%s, %s: returned %d (%s), not %d\n", function, what, (int)seen, seen == 0 ? "" : message,
                (int)status);
        failures++;
    } else if (seen <= DORMOUSE_ERR_NULL && seen >= DORMOUSE_ERR_VERSION && strstr(message, "accepted:") == NULL
               && strncmp(message, "invalid request: ", 17) != 0) { /* which names the place */
        fprintf(stderr, "%s, %s: \"%s\" does not say what is accepted\n", function, what, message);
        failures++;
    } else if (seen < 0 && !(is_written && seen == DORMOUSE_ERR_LIMIT) && memcmp(results, before, sizeof results) != 0) {
        fprintf(stderr, "%s, %s: returned %d (%s) and wrote a result\n", function, what, (int)seen, message);
        failures++;
    }
}

/* Makes a handle of each kind, a block that is awake and one that sleeps. */
static void make(const char *folder, void **handles)
{
    uint64_t first = 0;
    dormouse_forest_t *fixed = NULL;
    dormouse_sequences_t growing;
    DORMOUSE_INIT(&options);
    options.nvme_dir = folder;
    options.nvme_file_bytes = 4 << 20;
    OK(dormouse_runtime_create(&options, (dormouse_runtime_t **)&handles[RUNTIME]));
    OK(dormouse_tag_create(handles[RUNTIME], "right", 0, (dormouse_tag_t **)&handles[TAG]));
    DORMOUSE_INIT(&growing);
    growing.vocab = 10;
    growing.flags = DORMOUSE_SEQUENCES_GROW;
    OK(dormouse_forest_create(&growing, (dormouse_forest_t **)&handles[FOREST]));
    OK(dormouse_forest_create(&sequences, &fixed));
    OK(dormouse_plan_create(fixed, &plan_options, (dormouse_plan_t **)&handles[PLAN]));
    OK(dormouse_forest_destroy(fixed));
    OK(dormouse_prefix_create(handles[RUNTIME], NULL, 0, 2, (dormouse_prefix_t **)&handles[PREFIX]));
    OK(dormouse_history_create(&history_options, (dormouse_history_t **)&handles[HISTORY]));
    OK(dormouse_dialogue_create(&dialogue_options, (dormouse_dialogue_t **)&handles[DIALOGUE]));
    OK(dormouse_dialogue_record(handles[DIALOGUE], &turn, 1, &first));
}

static void unmake(void **handles)
{
    OK(dormouse_dialogue_destroy(handles[DIALOGUE]));
    OK(dormouse_history_destroy(handles[HISTORY]));
    OK(dormouse_prefix_destroy(handles[PREFIX]));
    OK(dormouse_plan_destroy(handles[PLAN]));
    OK(dormouse_forest_destroy(handles[FOREST]));
    OK(dormouse_tag_destroy(handles[TAG]));
    OK(dormouse_runtime_destroy(handles[RUNTIME]));
}

static void describe(void)
{
    DORMOUSE_INIT(&model);
    model.layers = 2;
    model.heads = model.kv_heads = 2;
    model.head_dim = model.dtype_bytes = 4;
    model.layer_linear_weights = 1000;
    model.head_weights = 100;
    DORMOUSE_INIT(&sequences);
    sequences.parents = parents;
    sequences.lengths = lengths;
    sequences.node_count = 3;
    DORMOUSE_INIT(&plan_options);
    plan_options.sequence_count = 2;
    plan_options.vocab = 10;
    plan_options.microbatch_rows = 8;
    plan_options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    plan_options.model = &model;
    DORMOUSE_INIT(&merge_args);
    merge_args.out1 = merge_args.out2 = merge_args.lse1 = merge_args.lse2 = source;
    merge_args.out = (char *)source + 4096;
    merge_args.lse = (char *)source + 8192;
    merge_args.rows = 4;
    merge_args.head_dim = 8;
    merge_args.dtype = DORMOUSE_DTYPE_F32;
    DORMOUSE_INIT(&dialogue_options);
    dialogue_options.dimension = 8;
    dialogue_options.entries_max = 3;
    dialogue_options.unsynced = 1;
    turn.embedding = query.embedding = source;
    turn.dimension = query.dimension = 8;
    turn.passage = (dormouse_bytes_t){source, 100};
    query.entries_max = 3;
    DORMOUSE_INIT(&history_options);
    history_options.vocab = 10;
    rollout.prompt = rollout.response = (dormouse_tokens_t){source, 8, 4, 0};
    draft.end = rollout.prompt;
    draft.ids = drafted;
    draft.capacity = 8;
    memset(long_text, 'n', LONG_BYTES);
}

static void (*all_wrong_calls)(void);
static pthread_key_t key;

static void at_the_end_of_a_thread(void *value)
{
    (void)value;
    all_wrong_calls();
}

static void *another_thread(void *unused)
{
    (void)unused;
    EXPECT(pthread_setspecific(key, &key) == 0);
    all_wrong_calls();
    return NULL;
}

static void at_exit(void)
{
    int earlier = failures;
    all_wrong_calls();
    if (failures != earlier) {
        _exit(1);
    }
}

/* Functions without a status, with values that are of no use to them. */
static void without_status(void)
{
    static int local;
    size_t bytes = 77;
    unsigned long long first = 1, second = 1;
    EXPECT(dormouse_get_version() > 0);
    EXPECT(strstr(dormouse_get_status_string(INT32_MIN), "unknown") != NULL);
    EXPECT(dormouse_get_last_error() != NULL);
    EXPECT(dormouse_torch_get_out_of_memory_construction() == 0);
    EXPECT(dormouse_torch_set_profiled(1) == 0 && dormouse_torch_set_profiled(0) == 0);
    EXPECT(dormouse_torch_pool_malloc(-1, 0, NULL) == NULL && dormouse_torch_pool_malloc(0, -1, NULL) == NULL);
    dormouse_torch_free(NULL, 0, 0, NULL);
    dormouse_torch_pool_free(NULL, 0, 0, NULL);
    dormouse_torch_record_stream(NULL, NULL);
    dormouse_torch_record_stream(&local, NULL);
    dormouse_torch_empty_cache();
    EXPECT(dormouse_torch_get_memory_fraction(-1) == 1 && dormouse_torch_get_memory_fraction(INT32_MAX) == 1);
    dormouse_torch_set_graph_hooks(0);
    dormouse_torch_get_pool_id(&local, &first, &second);
    EXPECT(first == 0 && second == 0);
    EXPECT(dormouse_torch_get_base(&local, &bytes) == NULL && dormouse_torch_get_base(NULL, NULL) == NULL);
    EXPECT(bytes == 77);
    dormouse_torch_set_metadata(0);
    dormouse_torch_annotate(&local, 1);
    dormouse_torch_annotate(NULL, 1);
    dormouse_torch_set_out_of_memory_observer(NULL);
}

static int run(int argc, char **argv, void (*wrong_calls)(void), void (*calls_in_a_child)(void))
{
    pthread_t other;
    int status = 0;
    pid_t child;
    dormouse_tag_t *sleeper = NULL;
    if (argc != 2) {
        return 2;
    }
    all_wrong_calls = wrong_calls;
    snprintf(dump, sizeof dump, "%s/dump", argv[1]);
    source = calloc(1, BLOCK_BYTES);
    describe();
    make(argv[1], stale);
    unmake(stale);
    make(argv[1], live);
    OK(dormouse_mem_alloc(live[RUNTIME], BLOCK_BYTES, 0, NULL, &block));
    OK(dormouse_mem_alloc(live[RUNTIME], BLOCK_BYTES, 0, NULL, &asleep));
    block_pointer = block;
    OK(dormouse_tag_create(live[RUNTIME], "sleeper", 0, &sleeper));
    OK(dormouse_tag_add(sleeper, asleep, BLOCK_BYTES));
    OK(dormouse_tag_sleep(sleeper, DORMOUSE_TIER_HOST, NULL));
    OK(dormouse_stash_put(live[RUNTIME], source, 4096, 1, NULL, &stashed));

    wrong_calls();
    without_status();
    EXPECT(pthread_key_create(&key, at_the_end_of_a_thread) == 0);
    EXPECT(pthread_create(&other, NULL, another_thread, NULL) == 0);
    pthread_join(other, NULL);
    child = fork();
    if (child == 0) {
        failures = 0;
        calls_in_a_child();
        without_status();
        _exit(failures == 0 ? 0 : 1);
    }
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT(atexit(at_exit) == 0);
    EXPECT(calls > 0);
    return done("wrong");
}

#endif
