/* Wrong calls of every function: each returns its typed error with a message, and correct calls in
 * between work. */
#include "check.h"

#include <pthread.h>

static void null_pointers(dormouse_runtime_t *runtime)
{
    dormouse_runtime_t *other = NULL;
    dormouse_prefix_t *node = NULL;
    dormouse_plan_t *plan = NULL;
    dormouse_tag_t *tag = NULL;
    dormouse_options_t options;
    void *memory = NULL;
    uint64_t number = 77;

    DORMOUSE_INIT(&options);
    RETURNS(dormouse_param_get(0, NULL), DORMOUSE_ERR_NULL, "param_out");
    RETURNS(dormouse_runtime_dump(NULL, DORMOUSE_FORMAT_CONFIG, NULL), DORMOUSE_ERR_NULL, "path");
    RETURNS(dormouse_runtime_dump(NULL, DORMOUSE_FORMAT_HTML, "x"), DORMOUSE_ERR_NULL, "runtime");
    RETURNS(dormouse_runtime_create(&options, NULL), DORMOUSE_ERR_NULL, "runtime_out");
    RETURNS(dormouse_runtime_get_info(runtime, NULL), DORMOUSE_ERR_NULL, "info_out");
    RETURNS(dormouse_runtime_get_info(NULL, NULL), DORMOUSE_ERR_NULL, "");
    RETURNS(dormouse_runtime_get_stats(runtime, 0, NULL), DORMOUSE_ERR_NULL, "stats_out");
    RETURNS(dormouse_runtime_get_stats(NULL, DORMOUSE_STATS_RESET_PEAKS, NULL), DORMOUSE_ERR_NULL, "runtime");
    RETURNS(dormouse_runtime_get_stats(runtime, 4, NULL), DORMOUSE_ERR_ARGUMENT, "flags is 0x4");
    RETURNS(dormouse_runtime_trim(NULL, &number), DORMOUSE_ERR_NULL, "runtime");
    RETURNS(dormouse_runtime_trim(runtime, NULL), DORMOUSE_ERR_NULL, "freed_bytes_out");
    RETURNS(dormouse_runtime_set_budget(NULL, 0, 1), DORMOUSE_ERR_NULL, "runtime");
    RETURNS(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_HTML, NULL), DORMOUSE_ERR_NULL, "path");
    RETURNS(dormouse_mem_alloc(NULL, 4096, 0, NULL, &memory), DORMOUSE_ERR_NULL, "runtime");
    RETURNS(dormouse_mem_alloc(runtime, 4096, 0, NULL, NULL), DORMOUSE_ERR_NULL, "ptr_out");
    RETURNS(dormouse_mem_query(runtime, NULL, NULL), DORMOUSE_ERR_NULL, "info_out");
    RETURNS(dormouse_mem_record_stream(runtime, NULL, NULL), DORMOUSE_ERR_NULL, "ptr");
    RETURNS(dormouse_mem_read(runtime, NULL, 8, &number, NULL), DORMOUSE_ERR_NULL, "ptr");
    RETURNS(dormouse_mem_read(runtime, &number, 8, NULL, NULL), DORMOUSE_ERR_NULL, "dst");
    RETURNS(dormouse_tag_create(runtime, NULL, 0, &tag), DORMOUSE_ERR_NULL, "name");
    RETURNS(dormouse_tag_create(runtime, "x", 0, NULL), DORMOUSE_ERR_NULL, "tag_out");
    RETURNS(dormouse_tag_enter(NULL), DORMOUSE_ERR_NULL, "tag");
    RETURNS(dormouse_tag_sleep(NULL, DORMOUSE_TIER_NVME, NULL), DORMOUSE_ERR_NULL, "tag");
    RETURNS(dormouse_stash_put(runtime, NULL, 16, 1, NULL, &number), DORMOUSE_ERR_NULL, "ptr");
    RETURNS(dormouse_stash_get(runtime, 1, NULL, NULL), DORMOUSE_ERR_NULL, "dst");
    RETURNS(dormouse_plan_create(NULL, NULL, &plan), DORMOUSE_ERR_NULL, "forest");
    RETURNS(dormouse_plan_get_op(NULL, NULL), DORMOUSE_ERR_NULL, "");
    RETURNS(dormouse_plan_complete_op(NULL, 1), DORMOUSE_ERR_NULL, "plan");
    RETURNS(dormouse_prefix_create(runtime, NULL, 0, 4, NULL), DORMOUSE_ERR_NULL, "prefix_out");
    RETURNS(dormouse_prefix_create(NULL, NULL, 0, 4, &node), DORMOUSE_ERR_NULL, "runtime");
    RETURNS(dormouse_prefix_enter_phase(NULL, DORMOUSE_PHASE_A, NULL), DORMOUSE_ERR_NULL, "prefix");
    RETURNS(dormouse_kernel_merge_lse(NULL, NULL), DORMOUSE_ERR_NULL, "args");

    /* Results are written on success only, and destroying NULL is a no-op. */
    EXPECT(number == 77 && other == NULL && node == NULL && plan == NULL && tag == NULL);
    OK(dormouse_runtime_destroy(NULL));
    OK(dormouse_plan_destroy(NULL));
    OK(dormouse_prefix_destroy(NULL));
    OK(dormouse_tag_destroy(NULL));
    OK(dormouse_mem_free(runtime, NULL, NULL));
}

static void structs(dormouse_runtime_t *runtime)
{
    dormouse_options_t options;
    dormouse_runtime_t *other = NULL;
    dormouse_info_t info;
    struct {
        dormouse_options_t known;
        uint64_t later;
    } newer;

    DORMOUSE_INIT(&options);
    options.version = 9;
    RETURNS(dormouse_runtime_create(&options, &other), DORMOUSE_ERR_VERSION, "version 9; accepted: 1");
    DORMOUSE_INIT(&options);
    options.size = 12;
    RETURNS(dormouse_runtime_create(&options, &other), DORMOUSE_ERR_VERSION, "size 12; accepted: ");
    memset(&newer, 0, sizeof newer);
    newer.known.size = sizeof newer;
    newer.known.version = 1;
    newer.later = 1;
    RETURNS(dormouse_runtime_create(&newer.known, &other), DORMOUSE_ERR_VERSION, "zeros");
    newer.later = 0; /* accepted with zeros: the next error is the live runtime */
    RETURNS(dormouse_runtime_create(&newer.known, &other), DORMOUSE_ERR_BUSY, "live runtime");
    memset(&info, 0, sizeof info);
    RETURNS(dormouse_runtime_get_info(runtime, &info), DORMOUSE_ERR_VERSION, "version 0");
    DORMOUSE_INIT(&info);
    info.size = 4;
    RETURNS(dormouse_runtime_get_info(runtime, &info), DORMOUSE_ERR_VERSION, "size 4");

    /* An older caller receives only its fields. */
    DORMOUSE_INIT(&info);
    info.size = 16;
    info.page_bytes = 99;
    OK(dormouse_runtime_get_info(runtime, &info));
    EXPECT(info.size == 16 && info.device_kind == DORMOUSE_DEVICE_HOST && info.page_bytes == 99);

    DORMOUSE_INIT(&options);
    options.device_kind = DORMOUSE_DEVICE_CUDA;
    RETURNS(dormouse_runtime_create(&options, &other), DORMOUSE_ERR_UNSUPPORTED, "CUDA");
    options.device_kind = 17;
    RETURNS(dormouse_runtime_create(&options, &other), DORMOUSE_ERR_ARGUMENT, "17");
    DORMOUSE_INIT(&options);
    options.checksum = 5;
    RETURNS(dormouse_runtime_create(&options, &other), DORMOUSE_ERR_ARGUMENT, "checksum is 5");
    EXPECT(other == NULL);
}

static void handles(dormouse_runtime_t *runtime)
{
    dormouse_tag_t *tag = NULL, *again = NULL;
    dormouse_prefix_t *node = NULL;
    uint64_t local = 0;
    dormouse_info_t info;

    OK(dormouse_tag_create(runtime, "weights", 0, &tag));
    RETURNS(dormouse_tag_wake((dormouse_tag_t *)(void *)&local, NULL), DORMOUSE_ERR_HANDLE, "no tag");
    RETURNS(dormouse_tag_wake((dormouse_tag_t *)runtime, NULL), DORMOUSE_ERR_HANDLE, "no tag");
    OK(dormouse_tag_destroy(tag));
    RETURNS(dormouse_tag_wake(tag, NULL), DORMOUSE_ERR_STALE, "destroyed");
    RETURNS(dormouse_tag_destroy(tag), DORMOUSE_ERR_STALE, "destroyed");
    OK(dormouse_tag_create(runtime, "weights", 0, &again));
    EXPECT(again != tag);
    RETURNS(dormouse_tag_wake(tag, NULL), DORMOUSE_ERR_STALE, "destroyed");

    OK(dormouse_prefix_create(runtime, NULL, 3, 4, &node));
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "prefix 3");
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "tag weights");
    OK(dormouse_prefix_destroy(node));
    OK(dormouse_tag_destroy(again));
    RETURNS(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_A, NULL), DORMOUSE_ERR_STALE, "destroyed");
    DORMOUSE_INIT(&info);
    OK(dormouse_runtime_get_info(runtime, &info));
}

static void memory(dormouse_runtime_t *runtime)
{
    void *block = NULL, *none = NULL;
    int local = 0;
    dormouse_mem_info_t info;

    RETURNS(dormouse_mem_alloc(runtime, 0, 0, NULL, &none), DORMOUSE_ERR_ARGUMENT, "bytes is 0");
    RETURNS(dormouse_mem_alloc(runtime, 4096, 48, NULL, &none), DORMOUSE_ERR_ARGUMENT, "48");
    RETURNS(dormouse_mem_alloc(runtime, 4096, 0, &local, &none), DORMOUSE_ERR_ARGUMENT, "NULL");
    RETURNS(dormouse_mem_alloc(runtime, UINT64_MAX, 0, NULL, &none), DORMOUSE_ERR_ARGUMENT, "bytes is");
    RETURNS(dormouse_mem_alloc(runtime, UINT64_C(1) << 50, 0, NULL, &none),
          DORMOUSE_ERR_OUT_OF_MEMORY, "");
    EXPECT(none == NULL);

    OK(dormouse_mem_alloc(runtime, 10000, 0, NULL, &block));
    /* Whole pages: what lies beside it can sleep apart. */
    void *beside[4];
    for (int at = 0; at < 4; at++) {
        OK(dormouse_mem_alloc(runtime, 100, at % 2 ? 64 : 0, NULL, &beside[at]));
        for (int other = 0; other < at; other++) {
            EXPECT((uintptr_t)beside[at] / 4096 != (uintptr_t)beside[other] / 4096);
        }
        EXPECT(at % 2 || (uintptr_t)beside[at] % 4096 == 0);
    }
    for (int at = 0; at < 4; at++) {
        OK(dormouse_mem_free(runtime, beside[at], NULL));
    }
    EXPECT((uintptr_t)block % 4096 == 0);
    DORMOUSE_INIT(&info);
    OK(dormouse_mem_query(runtime, (char *)block + 9999, &info));
    EXPECT(info.base == block && info.requested_bytes == 10000 && info.bytes >= 10000);
    EXPECT(info.role == DORMOUSE_ROLE_NONE && info.layer == -1 && info.name[0] == '\0');
    RETURNS(dormouse_mem_query(runtime, &local, &info), DORMOUSE_ERR_NOT_OURS, "no live block");
    RETURNS(dormouse_mem_free(runtime, &local, NULL), DORMOUSE_ERR_NOT_OURS, "");
    RETURNS(dormouse_mem_free(runtime, (char *)block + 4096, NULL), DORMOUSE_ERR_NOT_OURS, "start");
    RETURNS(dormouse_mem_read(runtime, &local, 4, &info, NULL), DORMOUSE_ERR_NOT_OURS, "");
    RETURNS(dormouse_mem_read(runtime, block, 4, &info, NULL), DORMOUSE_ERR_STATE, "awake");
    OK(dormouse_mem_record_stream(runtime, block, NULL));
    OK(dormouse_mem_free(runtime, block, NULL));
    RETURNS(dormouse_mem_free(runtime, block, NULL), DORMOUSE_ERR_NOT_OURS, "");

    RETURNS(dormouse_runtime_set_budget(runtime, DORMOUSE_TIER_DEVICE, 0), DORMOUSE_ERR_ARGUMENT,
          "bytes is 0");
    RETURNS(dormouse_runtime_set_budget(runtime, 9, 1 << 20), DORMOUSE_ERR_ARGUMENT, "tier is 9");
    RETURNS(dormouse_runtime_dump(runtime, 9, "/tmp/never"), DORMOUSE_ERR_ARGUMENT, "format is 9");
    RETURNS(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_HTML, "/nowhere/at/all.html"),
          DORMOUSE_ERR_IO, "/nowhere/at/all.html");
}

static void tags(dormouse_runtime_t *runtime)
{
    dormouse_tag_t *tag = NULL, *other = NULL;
    void *block = NULL;
    int32_t local = 0;
    char name[DORMOUSE_NAME_BYTES + 1];

    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = '\0';
    RETURNS(dormouse_tag_create(runtime, name, 0, &tag), DORMOUSE_ERR_ARGUMENT, "64 bytes");
    RETURNS(dormouse_tag_create(runtime, "", 0, &tag), DORMOUSE_ERR_ARGUMENT, "0 bytes");
    RETURNS(dormouse_tag_create(runtime, "t", 8, &tag), DORMOUSE_ERR_ARGUMENT, "0x8");
    OK(dormouse_tag_create(runtime, "t", 0, &tag));
    OK(dormouse_tag_create(runtime, "u", 0, &other));
    RETURNS(dormouse_tag_leave(tag), DORMOUSE_ERR_STATE, "no tag");
    OK(dormouse_tag_enter(tag));
    RETURNS(dormouse_tag_destroy(tag), DORMOUSE_ERR_BUSY, "not left");
    OK(dormouse_tag_enter(other));
    RETURNS(dormouse_tag_leave(tag), DORMOUSE_ERR_STATE, "another tag");
    OK(dormouse_tag_leave(other));
    OK(dormouse_mem_alloc(runtime, 1 << 20, 0, NULL, &block));
    OK(dormouse_tag_leave(tag));
    for (int depth = 0; depth < 16; depth++) {
        OK(dormouse_tag_enter(tag));
    }
    RETURNS(dormouse_tag_enter(tag), DORMOUSE_ERR_LIMIT, "16 tags");
    for (int depth = 0; depth < 16; depth++) {
        OK(dormouse_tag_leave(tag));
    }
    RETURNS(dormouse_tag_add(tag, &local, 4), DORMOUSE_ERR_NOT_OURS, "");
    RETURNS(dormouse_tag_add(tag, block, (1 << 20) + 1), DORMOUSE_ERR_ARGUMENT, "accepted: 1 to");
    RETURNS(dormouse_tag_sleep(tag, DORMOUSE_TIER_DEVICE, NULL), DORMOUSE_ERR_ARGUMENT, "DEVICE");
    RETURNS(dormouse_tag_sleep(tag, 5, NULL), DORMOUSE_ERR_ARGUMENT, "tier is 5");
    OK(dormouse_tag_destroy(other));
    OK(dormouse_tag_destroy(tag));
    OK(dormouse_mem_free(runtime, block, NULL));
}

static void nodes(dormouse_runtime_t *runtime)
{
    dormouse_prefix_t *node = NULL;
    float values[8] = {0};
    void *place = NULL;

    RETURNS(dormouse_prefix_create(runtime, NULL, 0, 0, &node), DORMOUSE_ERR_ARGUMENT, "0");
    OK(dormouse_prefix_create(runtime, NULL, 0, 2, &node));
    RETURNS(dormouse_prefix_enter_phase(node, 7, NULL), DORMOUSE_ERR_ARGUMENT, "phase is 7");
    RETURNS(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_B, NULL), DORMOUSE_ERR_STATE, "");
    OK(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_A, NULL));
    RETURNS(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_A, NULL), DORMOUSE_ERR_STATE, "");
    RETURNS(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_C, NULL), DORMOUSE_ERR_STATE, "");
    RETURNS(dormouse_prefix_mark_edge(node, 9, 0, NULL), DORMOUSE_ERR_ARGUMENT, "edge is 9");
    RETURNS(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_BEGIN, 2, NULL), DORMOUSE_ERR_ARGUMENT, "2");
    RETURNS(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_END, 0, NULL), DORMOUSE_ERR_STATE, "");
    RETURNS(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_BEGIN, 0, NULL), DORMOUSE_ERR_STATE, "");
    OK(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_BEGIN, 0, NULL));
    RETURNS(dormouse_prefix_add_boundary(node, 0, 0, values, sizeof values, 8, 9, NULL, &place),
          DORMOUSE_ERR_ARGUMENT, "dtype is 9");
    RETURNS(dormouse_prefix_add_boundary(node, 0, 0, NULL, 32, 8, DORMOUSE_DTYPE_F32, NULL, &place),
          DORMOUSE_ERR_NULL, "ptr");
    EXPECT(place == NULL);
    OK(dormouse_prefix_add_boundary(node, 0, 0, values, sizeof values, 8, DORMOUSE_DTYPE_F32, NULL, &place));
    EXPECT(place != NULL && ((float *)place)[7] == 0.0f);
    RETURNS(dormouse_prefix_add_dormant(node, 0, NULL, 3), DORMOUSE_ERR_NULL, "ptrs");
    OK(dormouse_prefix_add_dormant(node, 0, NULL, 0));
    OK(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_END, 0, NULL));
    RETURNS(dormouse_prefix_accumulate(node, 1, 0, values, 8, DORMOUSE_DTYPE_F32, NULL),
          DORMOUSE_ERR_ARGUMENT, "");
    RETURNS(dormouse_prefix_get_report(node, NULL, NULL, 0, NULL), DORMOUSE_ERR_NULL, "report_out");
    RETURNS(dormouse_prefix_accumulate(node, 0, 0, values, 7, DORMOUSE_DTYPE_F32, NULL),
          DORMOUSE_ERR_ARGUMENT, "7");
    OK(dormouse_prefix_destroy(node)); /* accepted in any phase */
}

/* Opens a layer's window on a thread that never closes it, and allocates there after phase A. */
struct stray {
    dormouse_runtime_t *runtime;
    dormouse_prefix_t *node;
    pthread_barrier_t turn;
};

static void *leave_window_open(void *argument)
{
    struct stray *stray = argument;
    void *memory = NULL;
    OK(dormouse_prefix_mark_edge(stray->node, DORMOUSE_EDGE_FORWARD_BEGIN, 0, NULL));
    pthread_barrier_wait(&stray->turn);
    pthread_barrier_wait(&stray->turn);
    OK(dormouse_mem_alloc(stray->runtime, 1 << 20, 0, NULL, &memory));
    OK(dormouse_mem_free(stray->runtime, memory, NULL));
    return NULL;
}

static void window_left_open(dormouse_runtime_t *runtime)
{
    struct stray stray;
    pthread_t other;
    stray.runtime = runtime;
    OK(dormouse_prefix_create(runtime, NULL, 0, 2, &stray.node));
    OK(dormouse_prefix_enter_phase(stray.node, DORMOUSE_PHASE_A, NULL));
    EXPECT(pthread_barrier_init(&stray.turn, NULL, 2) == 0);
    EXPECT(pthread_create(&other, NULL, leave_window_open, &stray) == 0);
    pthread_barrier_wait(&stray.turn);
    OK(dormouse_prefix_mark_edge(stray.node, DORMOUSE_EDGE_FORWARD_END, 0, NULL));
    OK(dormouse_prefix_enter_phase(stray.node, DORMOUSE_PHASE_B, NULL));
    pthread_barrier_wait(&stray.turn);
    pthread_join(other, NULL);
    pthread_barrier_destroy(&stray.turn);
    OK(dormouse_prefix_destroy(stray.node));
}

static void plans(void)
{
    int64_t ids[10] = {1, 2, 3, 4, 5, 1, 2, 3, 6, 7};
    uint64_t offsets[3] = {0, 5, 10}, lengths[3] = {3, 2, 2}, from[2] = {3, 3};
    uint32_t parents[3] = {DORMOUSE_NODE_NONE, 0, 0};
    double weights[2] = {0.5, 0.5};
    dormouse_sequences_t sequences;
    dormouse_forest_t *forest = NULL;
    dormouse_model_t model;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    dormouse_op_t op;
    dormouse_prediction_t prediction;
    uint64_t needed = 0;
    char small[4];

    DORMOUSE_INIT(&model);
    model.layers = 2;
    model.heads = 2;
    model.kv_heads = 2;
    model.head_dim = 4;
    model.dtype_bytes = 4;
    model.layer_linear_weights = 1000;
    model.head_weights = 100;
    DORMOUSE_INIT(&sequences);
#define UNSHARED(change, back, piece)                                                              \
    do {                                                                                           \
        change;                                                                                    \
        RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, piece);          \
        back;                                                                                      \
    } while (0)
    sequences.ids = ids;
    sequences.id_bytes = 8;
    sequences.offsets = offsets;
    sequences.sequence_count = 2;
    sequences.vocab = 10;
    UNSHARED(offsets[1] = 0, offsets[1] = 5, "");
    UNSHARED(offsets[1] = 11, offsets[1] = 5, "offsets");
    UNSHARED(ids[1] = 10, ids[1] = 2, "10");
    UNSHARED(ids[9] = -1, ids[9] = 7, "-1");
    sequences.offsets = NULL;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_NULL, "offsets");
    DORMOUSE_INIT(&sequences);
    sequences.parents = parents;
    sequences.lengths = lengths;
    sequences.node_count = 3;
    UNSHARED(lengths[1] = 0, lengths[1] = 2, "node 1 has 0 tokens");
    UNSHARED(parents[2] = 1; parents[1] = 2, parents[1] = parents[2] = 0, "node 1 has parent 2");
    EXPECT(forest == NULL);
    OK(dormouse_forest_create(&sequences, &forest));

    DORMOUSE_INIT(&options);
    options.sequence_count = 2;
    options.loss_from = from;
    options.weights = weights;
    options.vocab = 10;
    options.microbatch_rows = 8;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    options.model = &model;

#define REFUSED(change, back, piece)                                                               \
    do {                                                                                           \
        change;                                                                                    \
        RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, piece);        \
        back;                                                                                      \
    } while (0)
    REFUSED(weights[1] = 0.0 / (weights[0] - 0.5), weights[1] = 0.5, "weight 1");
    REFUSED(from[1] = 6, from[1] = 3, "sequence 1");
    REFUSED(options.microbatch_rows = 0, options.microbatch_rows = 8, "microbatch_rows is 0");
    REFUSED(options.flags = 64, options.flags = 6, "0x40");
    model.version = 3;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_VERSION, "model");
    model.version = 1;
    options.model = NULL;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_NULL, "model");
    options.model = &model;
    /* Refused before an array of that size is read. */
    options.sequence_count = UINT32_MAX;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "4294967295");
    options.sequence_count = 2;
    model.reserved = 3;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT,
            "options.model.reserved is 3; accepted: 0");
    model.reserved = 0;
    RETURNS(dormouse_plan_create(forest, NULL, &plan), DORMOUSE_ERR_NULL, "options");
    EXPECT(plan == NULL);

    OK(dormouse_plan_create(forest, &options, &plan));
    OK(dormouse_forest_destroy(forest));
    RETURNS(dormouse_plan_complete_op(plan, 12345), DORMOUSE_ERR_ORDER, "12345");
    DORMOUSE_INIT(&op);
    OK(dormouse_plan_get_op(plan, &op));
    EXPECT(op.kind == DORMOUSE_OP_PREFIX_FORWARD && op.token_begin == 0 && op.token_end == 2);
    RETURNS(dormouse_plan_complete_op(plan, op.id + 1), DORMOUSE_ERR_ORDER, "");
    OK(dormouse_plan_complete_op(plan, op.id));
    RETURNS(dormouse_plan_complete_op(plan, op.id), DORMOUSE_ERR_ORDER, "");
    DORMOUSE_INIT(&op);
    OK(dormouse_plan_get_op(plan, &op));
    EXPECT(op.kind == DORMOUSE_OP_MICROBATCH && op.member_count == 2 && op.last == 1);
    EXPECT(op.members[0].first_position == 2 && op.members[1].sequence == 1);
    EXPECT(op.members[1].weight == 0.5 && op.members[1].row_end == 4);
    DORMOUSE_INIT(&prediction);
    OK(dormouse_plan_predict(plan, &prediction));
    EXPECT(prediction.flops_dense > prediction.flops_shared);
    OK(dormouse_plan_get_json(plan, NULL, 0, &needed));
    EXPECT(needed > 10);
    RETURNS(dormouse_plan_get_json(plan, small, sizeof small, &needed), DORMOUSE_ERR_LIMIT, "at least");
    OK(dormouse_plan_destroy(plan));
    RETURNS(dormouse_plan_get_op(plan, &op), DORMOUSE_ERR_STALE, "destroyed");

    plan = NULL;
    RETURNS(dormouse_plan_load(NULL, &plan), DORMOUSE_ERR_NULL, "text");
    RETURNS(dormouse_plan_load("", NULL), DORMOUSE_ERR_NULL, "plan_out");
    RETURNS(dormouse_plan_load("{}\n{}\n", &plan), DORMOUSE_ERR_ARGUMENT, "does not begin as a plan file");
    RETURNS(dormouse_plan_load("{\"dormouse_plan\":1,\"bytes\":2,\"crc32\":\"00000000\"}\n{}\n", &plan),
            DORMOUSE_ERR_ARGUMENT, "its checksum is");
    EXPECT(plan == NULL);
}

static void kernels(void)
{
    float out1[2] = {1, 2}, out2[2] = {3, 4}, lse[1] = {0}, out[2];
    dormouse_merge_args_t args;
    DORMOUSE_INIT(&args);
    args.out1 = out1;
    args.lse1 = lse;
    args.out2 = out2;
    args.lse2 = lse;
    args.out = out;
    args.rows = 1;
    args.head_dim = 2;
    args.dtype = DORMOUSE_DTYPE_F32;
    RETURNS(dormouse_kernel_merge_lse(&args, NULL), DORMOUSE_ERR_NULL, "lse");
    args.lse = lse;
    args.dtype = 5;
    RETURNS(dormouse_kernel_merge_lse(&args, NULL), DORMOUSE_ERR_ARGUMENT, "dtype is 5");
    args.dtype = DORMOUSE_DTYPE_F32;
    args.flags = 32;
    RETURNS(dormouse_kernel_merge_lse(&args, NULL), DORMOUSE_ERR_ARGUMENT, "flags");
    args.flags = DORMOUSE_MERGE_ON_GPU;
    RETURNS(dormouse_kernel_merge_lse(&args, NULL), DORMOUSE_ERR_ARGUMENT, "GPU's heap");
    args.flags = 0;
    args.reserved = 3;
    RETURNS(dormouse_kernel_merge_lse(&args, NULL), DORMOUSE_ERR_ARGUMENT,
            "args.reserved is 3; accepted: 0");
    args.reserved = 0;
    args.flags = 0;
    OK(dormouse_kernel_merge_lse(&args, NULL));
    EXPECT(out[0] > 1.9999f && out[0] < 2.0001f && lse[0] > 0.693f && lse[0] < 0.694f);
}

int main(int argc, char **argv)
{
    dormouse_runtime_t *runtime = runtime_in(argc > 1 ? argv[1] : NULL, 16);
    EXPECT(dormouse_get_version() >= 1000);
    EXPECT(strstr(dormouse_get_status_string(-99999), "unknown") != NULL);
    null_pointers(runtime);
    structs(runtime);
    handles(runtime);
    memory(runtime);
    tags(runtime);
    nodes(runtime);
    window_left_open(runtime);
    plans();
    kernels();
    OK(dormouse_runtime_destroy(runtime));
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_STALE, "destroyed");
    return done("misuse");
}
