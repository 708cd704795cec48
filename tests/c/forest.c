/* Creates, plans and runs forests, and checks refused arguments. */
#include "check.h"

static const int32_t ids[] = {1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 1, 2, 3, 4, 9, 8};
static const uint64_t offsets[] = {0, 4, 9, 11, 15, 17};

enum { SEQUENCES = 5, NODES = 4 };

static dormouse_forest_t *forest_of(uint64_t flags)
{
    dormouse_sequences_t sequences;
    dormouse_forest_t *forest = NULL;
    DORMOUSE_INIT(&sequences);
    sequences.ids = ids;
    sequences.id_bytes = 4;
    sequences.offsets = offsets;
    sequences.sequence_count = SEQUENCES;
    sequences.vocab = 10;
    sequences.flags = flags;
    OK(dormouse_forest_create(&sequences, &forest));
    return forest;
}

static void shape(dormouse_forest_t *forest)
{
    dormouse_forest_info_t info;
    dormouse_forest_node_t nodes[NODES];
    dormouse_ending_t endings[SEQUENCES];
    uint64_t needed = 0;
    char text[512];
    DORMOUSE_INIT(&info);
    OK(dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0));
    EXPECT(info.sequences == SEQUENCES && info.nodes == NODES && info.roots == 2);
    EXPECT(info.leaves == 3 && info.tree_tokens == 8 && info.dense_tokens == 17);
    EXPECT(info.compression > 2.12 && info.compression < 2.13);
    RETURNS(dormouse_forest_get_info(forest, &info, nodes, NODES - 1, NULL, 0), DORMOUSE_ERR_LIMIT, "4");
    RETURNS(dormouse_forest_get_info(forest, &info, NULL, 0, endings, SEQUENCES - 1), DORMOUSE_ERR_LIMIT, "5");
    OK(dormouse_forest_get_info(forest, &info, nodes, NODES, endings, SEQUENCES));
    EXPECT(nodes[0].parent == DORMOUSE_NODE_NONE && nodes[0].subtree_end == 3);
    EXPECT(nodes[2].parent == 0 && nodes[2].token_begin == 3 && nodes[2].token_end == 5);
    EXPECT(nodes[2].sequence == 1 && nodes[3].sequence == 4);
    EXPECT(endings[2].node == 0 && endings[2].tokens == 2);
    OK(dormouse_forest_get_json(forest, text, sizeof text, &needed));
    EXPECT(needed == strlen(text) + 1 && strstr(text, "\"parents\":[null,0,0,null]") != NULL);
}

static void model_of(dormouse_model_t *model)
{
    DORMOUSE_INIT(model);
    model->layers = 2;
    model->heads = 2;
    model->kv_heads = 1;
    model->head_dim = 4;
    model->dtype_bytes = 4;
    model->layer_linear_weights = 100;
    model->kv_linear_weights = 20;
    model->last_layer_prefix_weights = 25;
    model->head_weights = 50;
    model->saved_bytes_per_token_layer = 16;
}

/* Runs a plan: each label is scored once, and the nodes run in order. */
static void walk(dormouse_plan_t *plan)
{
    static const int32_t kinds[] = {DORMOUSE_OP_MICROBATCH, DORMOUSE_OP_PREFIX_FORWARD,
                                    DORMOUSE_OP_MICROBATCH, DORMOUSE_OP_PREFIX_BACKWARD};
    dormouse_plan_node_t nodes[NODES];
    uint64_t needed = 0, labels = 0;
    dormouse_op_t op;
    OK(dormouse_plan_get_nodes(plan, nodes, NODES, &needed));
    EXPECT(needed == NODES && nodes[2].parent == 0 && nodes[2].row_begin == 2);
    EXPECT(nodes[2].row_end == 4 && nodes[0].residency == DORMOUSE_RESIDENCY_KEEP);
    for (int at = 0;; at++) {
        DORMOUSE_INIT(&op);
        OK(dormouse_plan_get_op(plan, &op));
        if (op.kind == DORMOUSE_OP_DONE) {
            EXPECT(at == 4 && op.scores == NULL);
            break;
        }
        EXPECT(at < 4 && op.kind == kinds[at] && op.flags == 0);
        if (failures > 0) {
            return;
        }
        for (uint64_t score = 0; score < op.score_count; score++) {
            labels += op.scores[score].row_end - op.scores[score].row_begin;
        }
        if (at == 2) {
            EXPECT(op.reads == 0 && op.last == 1 && op.member_count == 2);
            EXPECT(op.members[1].node == 2 && op.members[1].first_position == 2);
            EXPECT(op.score_count == 3 && op.scores[1].weight == 4 && op.scores[1].row_end == 1);
        }
        if (at == 0) {
            EXPECT(op.reads == DORMOUSE_NODE_NONE && op.node == DORMOUSE_NODE_NONE);
        }
        OK(dormouse_plan_complete_op(plan, op.id));
    }
    EXPECT(labels == 17 - SEQUENCES);
}

/* A caller with the op of the first release receives only its fields. */
static void old_caller(dormouse_plan_t *plan)
{
    enum { FIRST = 64 };
    dormouse_op_t op;
    memset(&op, 0xab, sizeof op);
    op.size = FIRST;
    op.version = DORMOUSE_STRUCT_VERSION;
    OK(dormouse_plan_get_op(plan, &op));
    EXPECT(op.size == FIRST && op.kind == DORMOUSE_OP_MICROBATCH && op.member_count == 1);
    for (size_t at = FIRST; at < sizeof op; at++) {
        EXPECT(((const unsigned char *)&op)[at] == 0xab);
    }
}

static void batch(dormouse_forest_t *forest)
{
    static const double weights[] = {1, -0.5, 2, 4, 8};
    dormouse_model_t model;
    dormouse_machine_t machine;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    dormouse_prediction_t prediction;
    uint64_t from[] = {1, 1, 1, 1, 1}, ends[] = {0, 0, 0, 0, 0, 0};
    model_of(&model);
    DORMOUSE_INIT(&options);
    options.sequence_count = SEQUENCES;
    options.weights = weights;
    options.vocab = 10;
    options.microbatch_rows = 8;
    options.model = &model;
    OK(dormouse_plan_create(forest, &options, &plan));
    DORMOUSE_INIT(&prediction);
    OK(dormouse_plan_predict(plan, &prediction));
    EXPECT(prediction.seconds_dense < 0 && prediction.flops_dense > prediction.flops_shared);
    EXPECT(prediction.device_bytes[1] > 0 && prediction.host_bytes[1] == 0);
    old_caller(plan);
    walk(plan);
    OK(dormouse_plan_destroy(plan));
    plan = NULL;

    DORMOUSE_INIT(&machine);
    machine.flops_per_s = 1000000;
    options.machine = &machine;
    options.loss_from = from;
    OK(dormouse_plan_create(forest, &options, &plan));
    OK(dormouse_plan_predict(plan, &prediction));
    EXPECT(prediction.seconds_dense > prediction.seconds_shared && prediction.seconds_shared > 0);
    OK(dormouse_plan_destroy(plan));
    plan = NULL;

    /* A caller with the machine of the first release. */
    machine.size = 40;
    machine.host_bytes = UINT64_MAX;
    OK(dormouse_plan_create(forest, &options, &plan));
    OK(dormouse_plan_destroy(plan));
    plan = NULL;

    options.span_offsets = ends;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "one of them");
    options.span_offsets = NULL;
    from[2] = 3;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "sequence 2");
    options.loss_from = NULL;
    options.sequence_count = 4;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "sequence_count is 4");
    /* A stated size is checked before it is allocated. */
    options.sequence_count = UINT64_C(1) << 45;
    options.weights = NULL;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "35184372088832");
    options.weights = weights;
    options.sequence_count = SEQUENCES;
    options.flags = 64;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "0x40");
    options.flags = 0;
    options.device_bytes = 10;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "of 10 on");
    EXPECT(plan == NULL);
}

/* Counts of the ops of a plan. */
struct seen {
    int forwards, agains, microbatches, backwards, without_graph, sleeping;
    uint64_t nodes, device_bytes, host_bytes, origins;
    /* The last op that names a node in these fields. */
    uint64_t asleep, waking;
    dormouse_prediction_t prediction;
};

static struct seen seen_of(dormouse_forest_t *forest, const dormouse_plan_options_t *options)
{
    struct seen seen;
    dormouse_plan_node_t nodes[64];
    dormouse_plan_t *plan = NULL;
    dormouse_op_t op;
    memset(&seen, 0, sizeof seen);
    OK(dormouse_plan_create(forest, options, &plan));
    OK(dormouse_plan_get_nodes(plan, nodes, 64, &seen.nodes));
    for (uint64_t node = 0; node < seen.nodes && failures == 0; node++) {
        seen.origins += nodes[node].origin;
    }
    do {
        DORMOUSE_INIT(&op);
        OK(dormouse_plan_get_op(plan, &op));
        int runs = op.kind == DORMOUSE_OP_PREFIX_FORWARD || op.kind == DORMOUSE_OP_PREFIX_BACKWARD ||
                   op.kind == DORMOUSE_OP_FORWARD_AGAIN;
        EXPECT((op.residency == DORMOUSE_RESIDENCY_NONE) == !runs);
        seen.forwards += op.kind == DORMOUSE_OP_PREFIX_FORWARD;
        seen.agains += op.kind == DORMOUSE_OP_FORWARD_AGAIN;
        seen.microbatches += op.kind == DORMOUSE_OP_MICROBATCH;
        seen.backwards += op.kind == DORMOUSE_OP_PREFIX_BACKWARD;
        seen.sleeping += op.residency == DORMOUSE_RESIDENCY_SLEEP;
        seen.asleep = op.asleep != DORMOUSE_NODE_NONE ? op.id : seen.asleep;
        seen.waking = op.waking != DORMOUSE_NODE_NONE ? op.id : seen.waking;
        seen.without_graph += op.flags == DORMOUSE_OP_WITHOUT_GRAPH;
        seen.device_bytes = op.device_bytes > seen.device_bytes ? op.device_bytes : seen.device_bytes;
        seen.host_bytes = op.host_bytes > seen.host_bytes ? op.host_bytes : seen.host_bytes;
        if (op.kind != DORMOUSE_OP_DONE) {
            OK(dormouse_plan_complete_op(plan, op.id));
        }
    } while (op.kind != DORMOUSE_OP_DONE && failures == 0);
    DORMOUSE_INIT(&seen.prediction);
    OK(dormouse_plan_predict(plan, &seen.prediction));
    uint64_t device = 0, host = 0;
    for (int phase = 0; phase < 3; phase++) {
        uint64_t bytes = seen.prediction.device_bytes[phase];
        device = bytes > device ? bytes : device;
        bytes = seen.prediction.host_bytes[phase];
        host = bytes > host ? bytes : host;
    }
    EXPECT(device == seen.device_bytes && host == seen.host_bytes);
    OK(dormouse_plan_destroy(plan));
    return seen;
}

/* The same with the smallest device budget that has a plan. */
static struct seen tight(dormouse_forest_t *forest, dormouse_plan_options_t *options)
{
    uint64_t low = 1, high = UINT64_C(1) << 32;
    while (low < high) {
        dormouse_plan_t *plan = NULL;
        options->device_bytes = low + (high - low) / 2;
        if (dormouse_plan_create(forest, options, &plan) == DORMOUSE_OK) {
            OK(dormouse_plan_destroy(plan));
            high = options->device_bytes;
        } else {
            low = options->device_bytes + 1;
        }
    }
    options->device_bytes = low;
    struct seen seen = seen_of(forest, options);
    EXPECT(seen.device_bytes == low);
    options->device_bytes = 0;
    return seen;
}

/* A root with a leaf and an inner node, which has two leaves. */
static dormouse_forest_t *nested(void)
{
    static const uint32_t parents[] = {DORMOUSE_NODE_NONE, 0, 0, 2, 2};
    static const uint64_t lengths[] = {41, 4, 20, 4, 5};
    return tree_of(parents, lengths, 5);
}

/* Changes one option at a time and checks the effect. */
static void options(void)
{
    static const uint64_t from[] = {42, 62, 62};
    dormouse_forest_t *forest = nested();
    dormouse_model_t model;
    dormouse_machine_t machine;
    dormouse_plan_options_t options;
    model_of(&model);
    model.saved_bytes_per_token_layer = 1000;
    model.layers = 6;
    DORMOUSE_INIT(&machine);
    machine.flops_per_s = 1000000000;
    DORMOUSE_INIT(&options);
    options.sequence_count = 3;
    options.loss_from = from;
    options.vocab = 10;
    options.microbatch_rows = 16;
    options.wake_window_layers = 1;
    options.model = &model;
    options.machine = &machine;
    struct seen all = seen_of(forest, &options);
    EXPECT(all.forwards == 2 && all.backwards == 2 && all.microbatches == 2 && all.nodes == 5);
    EXPECT(all.agains == 0 && all.host_bytes == 0 && all.sleeping == 0 && all.origins == 10);
    EXPECT(all.prediction.pays == 1 && strstr(all.prediction.reason, "times the work") != NULL);

    options.block_rows = 20;
    struct seen blocks = seen_of(forest, &options);
    EXPECT(blocks.nodes == 6 && blocks.forwards == 3 && blocks.origins == 10);
    options.block_rows = 0;

    options.flags = DORMOUSE_PLAN_LAST_LAYER_DEAD;
    struct seen dead = seen_of(forest, &options);
    EXPECT(dead.prediction.flops_shared < all.prediction.flops_shared && dead.nodes == 5);
    options.flags = 0;

    struct seen asleep = tight(forest, &options);
    EXPECT(asleep.sleeping == 4 && asleep.asleep == 1 && asleep.waking == 2 && asleep.agains == 0);
    EXPECT(asleep.host_bytes == (40 + 20) * 6000 && asleep.device_bytes < all.device_bytes);
    options.wake_window_layers = 3;
    EXPECT(tight(forest, &options).device_bytes > asleep.device_bytes);
    options.wake_window_layers = 1;

    options.host_bytes = 1;
    struct seen again = tight(forest, &options);
    EXPECT(again.agains == 1 && again.without_graph == 1 && again.sleeping == 0);
    EXPECT(again.prediction.recomputed_rows == 40 && again.host_bytes == 0);
    options.host_bytes = 0;
    machine.host_bytes = 1;
    EXPECT(tight(forest, &options).agains == 1);
    machine.host_bytes = 0;

    /* If an op costs more than all of the work, leaves run alone unless sharing is forced. */
    machine.op_overhead_ns = 1000000000;
    options.microbatch_rows = 256;
    struct seen alone = seen_of(forest, &options);
    EXPECT(alone.forwards == 0 && alone.nodes == 3 && alone.prediction.pays == 0);
    EXPECT(strstr(alone.prediction.reason, "longer than that saves") != NULL);
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE;
    EXPECT(seen_of(forest, &options).forwards == 2);

    dormouse_plan_t *plan = NULL;
    uint64_t ends[] = {0, 1, 0, 1};
    dormouse_span_t span = {1, 2};
    options.loss_from = NULL;
    options.span_offsets = ends;
    options.spans = &span;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "from 1 to 0");
    options.spans = NULL;
    ends[2] = 1;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_NULL, "options.spans");
    options.spans = &span;
    options.reserved = 7;
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_ARGUMENT, "reserved is 7");
    options.reserved = 0;
    OK(dormouse_plan_create(forest, &options, &plan));
    OK(dormouse_plan_destroy(plan));
    RETURNS(dormouse_plan_create((dormouse_forest_t *)plan, &options, &plan), DORMOUSE_ERR_HANDLE,
          "no forest");
    RETURNS(dormouse_plan_predict((dormouse_plan_t *)forest, &all.prediction), DORMOUSE_ERR_HANDLE,
          "no plan");
    OK(dormouse_forest_destroy(forest));
    RETURNS(dormouse_plan_create(forest, &options, &plan), DORMOUSE_ERR_STALE, "forest");
}

static void grown(void)
{
    static const int64_t wide[] = {1, 2, 3, 7};
    static const uint64_t bad[] = {0, 4, 3, 17}, kinds[] = {5, 0, 0, 5, 5};
    dormouse_sequences_t sequences;
    dormouse_forest_t *forest = NULL, *fixed = forest_of(0);
    dormouse_forest_info_t info;
    uint32_t number = 99;
    DORMOUSE_INIT(&sequences);
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, "vocab is 0");
    sequences.vocab = 10;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, "sequences is 0");
    sequences.flags = DORMOUSE_SEQUENCES_GROW;
    OK(dormouse_forest_create(&sequences, &forest));
    OK(dormouse_forest_add(forest, wide, 8, 4, 0, &number));
    EXPECT(number == 0);
    OK(dormouse_forest_add(forest, ids, 4, 4, 0, &number));
    EXPECT(number == 1);
    RETURNS(dormouse_forest_add(forest, ids, 2, 4, 0, &number), DORMOUSE_ERR_ARGUMENT, "id_bytes is 2");
    RETURNS(dormouse_forest_add(forest, NULL, 4, 4, 0, &number), DORMOUSE_ERR_NULL, "ids");
    RETURNS(dormouse_forest_add(forest, ids, 4, 0, 0, &number), DORMOUSE_ERR_ARGUMENT, "0 tokens");
    RETURNS(dormouse_forest_add(fixed, ids, 4, 4, 0, &number), DORMOUSE_ERR_STATE, "GROW");
    EXPECT(number == 1);
    DORMOUSE_INIT(&info);
    OK(dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0));
    EXPECT(info.sequences == 2 && info.nodes == 3 && info.tree_tokens == 5);

    sequences.sequence_count = 3;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_NULL, "offsets");
    sequences.offsets = bad;
    sequences.ids = ids;
    sequences.id_bytes = 4;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, "from 4 to 3");
    sequences.node_count = 1;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, "nodes alone");
    sequences.ids = NULL;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, "nodes alone");
    sequences.flags = 2;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, "flags is 0x2");
    OK(dormouse_forest_destroy(forest));

    /* The first sequences keep their kinds. */
    sequences.flags = DORMOUSE_SEQUENCES_GROW;
    sequences.node_count = 0;
    sequences.ids = ids;
    sequences.offsets = offsets;
    sequences.sequence_count = SEQUENCES;
    sequences.kinds = kinds;
    OK(dormouse_forest_create(&sequences, &forest));
    OK(dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0));
    EXPECT(info.sequences == SEQUENCES && info.roots == 3 && info.tree_tokens == 4 + 5 + 2);
    OK(dormouse_forest_destroy(forest));
    RETURNS(dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0), DORMOUSE_ERR_STALE, "forest");
    OK(dormouse_forest_destroy(fixed));
    OK(dormouse_forest_destroy(NULL));
}

static void counted(void)
{
    static const uint32_t parents[] = {DORMOUSE_NODE_NONE, 0, 0};
    static const uint64_t lengths[] = {5, 2, 3};
    dormouse_ending_t endings[] = {{2, 0, 8}, {1, 0, 7}, {0, 0, 4}};
    dormouse_sequences_t sequences;
    dormouse_forest_t *forest = NULL;
    dormouse_forest_info_t info;
    DORMOUSE_INIT(&sequences);
    sequences.parents = parents;
    sequences.lengths = lengths;
    sequences.node_count = 3;
    sequences.endings = endings;
    sequences.sequence_count = 3;
    OK(dormouse_forest_create(&sequences, &forest));
    DORMOUSE_INIT(&info);
    OK(dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0));
    EXPECT(info.sequences == 3 && info.tree_tokens == 10 && info.dense_tokens == 19);
    OK(dormouse_forest_destroy(forest));
    endings[1].tokens = 6;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_ARGUMENT, "leaf 1");
    sequences.lengths = NULL;
    RETURNS(dormouse_forest_create(&sequences, &forest), DORMOUSE_ERR_NULL, "lengths");
}

static void queries(void)
{
    const char *request = "{\"version\": 1, \"query\": \"padded_microbatches\", \"rows\": [5, 1, 4, 2],"
                          " \"budget_rows\": 10, \"multiple\": 1}";
    const char *answer = "{\"version\":1,\"answer\":[{\"members\":[0,2],\"width\":5},"
                         "{\"members\":[1,3],\"width\":2}]}";
    char text[256] = "untouched";
    uint64_t needed = 0;
    OK(dormouse_schedule_query(request, NULL, 0, &needed));
    EXPECT(needed == strlen(answer) + 1);
    RETURNS(dormouse_schedule_query(request, text, 8, &needed), DORMOUSE_ERR_LIMIT, "at least");
    EXPECT(strcmp(text, "untouched") == 0);
    OK(dormouse_schedule_query(request, text, sizeof text, &needed));
    EXPECT(strcmp(text, answer) == 0);
    RETURNS(dormouse_schedule_query(NULL, text, sizeof text, &needed), DORMOUSE_ERR_NULL, "request");
    RETURNS(dormouse_schedule_query(request, text, sizeof text, NULL), DORMOUSE_ERR_NULL, "count_out");
    RETURNS(dormouse_schedule_query("{}", text, sizeof text, &needed), DORMOUSE_ERR_ARGUMENT, "version");
    RETURNS(dormouse_schedule_query("\xff", text, sizeof text, &needed), DORMOUSE_ERR_ARGUMENT, "UTF-8");
    RETURNS(dormouse_schedule_query("{\"version\": 1, \"query\": \"shapes\"}", text, sizeof text, &needed),
          DORMOUSE_ERR_ARGUMENT, "accepted: plan");
}

int main(void)
{
    dormouse_forest_t *forest = forest_of(DORMOUSE_SEQUENCES_GROW);
    shape(forest);
    batch(forest);
    /* The forest is usable after a plan was created from it. */
    shape(forest);
    OK(dormouse_forest_destroy(forest));
    forest = forest_of(0);
    shape(forest);
    batch(forest);
    RETURNS(dormouse_plan_create((dormouse_forest_t *)0x1234, NULL, NULL), DORMOUSE_ERR_NULL, "");
    OK(dormouse_forest_destroy(forest));
    grown();
    counted();
    options();
    queries();
    return done("forest");
}
