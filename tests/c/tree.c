/* A trainer in C: two ranks plan their parts of one forest and agree on their collective order; then one
 * rank runs a tree op by op, with sleeping memory. */
#include "check.h"

#include <stdarg.h>

enum { RANKS = 2, LAYERS = 6, NODES_MAX = 32, OPS_MAX = 128, TEXT_BYTES = 1 << 16 };

#define MODEL                                                                                      \
    "{\"layers\": 6, \"heads\": 1, \"kv_heads\": 1, \"head_dim\": 4, \"dtype_bytes\": 4,"              \
    " \"layer_linear_weights\": 100, \"kv_linear_weights\": 20, \"last_layer_prefix_weights\": 25,"    \
    " \"head_weights\": 50, \"saved_bytes_per_token_layer\": 1000}"

static void model_of(dormouse_model_t *model)
{
    DORMOUSE_INIT(model);
    model->layers = LAYERS;
    model->heads = 1;
    model->kv_heads = 1;
    model->head_dim = 4;
    model->dtype_bytes = 4;
    model->layer_linear_weights = 100;
    model->kv_linear_weights = 20;
    model->last_layer_prefix_weights = 25;
    model->head_weights = 50;
    model->saved_bytes_per_token_layer = 1000;
}

/* ---- Ranks ---- */

static char request[4 * TEXT_BYTES];

/* Sends the query `{"version": 1, ...}` with the fields of `format`. */
__attribute__((format(printf, 2, 3))) static dormouse_status_t query(char *answer, const char *format, ...)
{
    uint64_t needed = 0;
    va_list fields;
    int begin = sprintf(request, "{\"version\": 1, ");
    va_start(fields, format);
    int bytes = vsnprintf(request + begin, sizeof request - (size_t)begin, format, fields);
    va_end(fields);
    EXPECT(bytes > 0 && (size_t)(begin + bytes) + 2 < sizeof request);
    strcat(request, "}");
    answer[0] = '\0';
    return dormouse_schedule_query(request, answer, TEXT_BYTES, &needed);
}

/* Removes the envelope of an answer. */
static void open_answer(char *answer)
{
    static const char key[] = "\"answer\":";
    char *begin = strstr(answer, key), *end = strrchr(answer, '}');
    if (begin == NULL || end == NULL || failures > 0) {
        fprintf(stderr, "no answer to %s\n", request);
        exit(1);
    }
    *end = '\0';
    begin += strlen(key);
    memmove(answer, begin, strlen(begin) + 1);
}

/* The numbers of the nth list of that name, NULLs as DORMOUSE_NODE_NONE. */
static uint64_t numbers(const char *text, const char *name, int nth, uint64_t *into)
{
    uint64_t count = 0;
    for (const char *at = text; (at = strstr(at, name)) != NULL; at++) {
        if (nth-- > 0) {
            continue;
        }
        at = strchr(at, '[') + 1;
        while (*at != ']' && count < NODES_MAX) {
            char *end = NULL;
            int is_none = strncmp(at, "null", 4) == 0;
            into[count++] = is_none ? DORMOUSE_NODE_NONE : strtoull(at, &end, 10);
            at = is_none ? at + 4 : end;
            at += *at == ',';
        }
        return count;
    }
    EXPECT(!"there is a list of that name");
    return 0;
}

/* Adds sequences one by one, as rollouts finish. Both ranks add all of them. */
static dormouse_forest_t *grown(void)
{
    static const int32_t rollouts[][8] = {
        {1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 5, 6, 9, 9}, {1, 2, 3, 4, 5, 0, 1, 2},
        {1, 2, 3, 4, 7, 7, 7, 7}, {1, 2, 3, 4, 7, 7, 8, 8}, {1, 2, 3, 4, 5, 6, 7, 8},
    };
    dormouse_sequences_t none;
    dormouse_forest_info_t info;
    dormouse_forest_t *forest = NULL;
    DORMOUSE_INIT(&none);
    none.vocab = 10;
    none.flags = DORMOUSE_SEQUENCES_GROW;
    OK(dormouse_forest_create(&none, &forest));
    for (uint32_t at = 0; at < 6; at++) {
        uint32_t number = UINT32_MAX;
        OK(dormouse_forest_add(forest, rollouts[at], 4, 8, 0, &number));
        EXPECT(number == at);
        DORMOUSE_INIT(&info);
        OK(dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0));
        EXPECT(info.sequences == at + 1 && info.dense_tokens == 8 * (at + 1));
    }
    return forest;
}

/* Plans the part of a forest that contains `sequences`. */
static dormouse_plan_t *plan_of_part(const char *forest, const char *sequences)
{
    static char part[TEXT_BYTES];
    uint64_t parents[NODES_MAX], lengths[NODES_MAX];
    uint32_t narrow[NODES_MAX];
    dormouse_ending_t endings[NODES_MAX];
    dormouse_sequences_t it;
    dormouse_forest_t *own = NULL;
    dormouse_model_t model;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    OK(query(part, "\"query\": \"part\", \"forest\": %s, \"sequences\": %s", forest, sequences));
    open_answer(part);
    DORMOUSE_INIT(&it);
    it.node_count = numbers(part, "\"parents\"", 0, parents);
    EXPECT(numbers(part, "\"lengths\"", 0, lengths) == it.node_count);
    for (uint64_t node = 0; node < it.node_count; node++) {
        narrow[node] = (uint32_t)parents[node];
    }
    /* [{"node":1,"tokens":7},...]: the part's own numbers. */
    for (const char *at = strstr(part, "\"endings\""); (at = strstr(at, "{\"node\":")) != NULL; at++) {
        unsigned node = 0, count = 0;
        EXPECT(sscanf(at, "{\"node\":%u,\"tokens\":%u}", &node, &count) == 2);
        endings[it.sequence_count++] = (dormouse_ending_t){node, 0, count};
    }
    it.parents = narrow;
    it.lengths = lengths;
    it.endings = endings;
    OK(dormouse_forest_create(&it, &own));
    model_of(&model);
    DORMOUSE_INIT(&options);
    options.sequence_count = it.sequence_count;
    options.vocab = 10;
    options.microbatch_rows = 4;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE;
    options.model = &model;
    OK(dormouse_plan_create(own, &options, &plan));
    OK(dormouse_forest_destroy(own));
    return plan;
}

/* Writes the kind of each op, as the query `collective_order` takes it; returns the labels scored. */
static uint64_t passes_of(dormouse_plan_t *plan, char *passes)
{
    uint64_t labels = 0;
    dormouse_op_t op;
    strcpy(passes, "[");
    for (int at = 0; at < OPS_MAX; at++) {
        DORMOUSE_INIT(&op);
        OK(dormouse_plan_get_op(plan, &op));
        if (op.kind == DORMOUSE_OP_DONE) {
            break;
        }
        strcat(passes, at > 0 ? "," : "");
        strcat(passes, op.kind == DORMOUSE_OP_MICROBATCH            ? "\"microbatch\""
                     : op.kind == DORMOUSE_OP_PREFIX_BACKWARD ? "\"backward\""
                                                            : "\"forward\"");
        for (uint64_t score = 0; score < op.score_count; score++) {
            labels += op.scores[score].row_end - op.scores[score].row_begin;
        }
        OK(dormouse_plan_complete_op(plan, op.id));
    }
    strcat(passes, "]");
    return labels;
}

/* The nth word of a list of words. */
static const char *word_at(const char *list, uint64_t nth)
{
    const char *at = strchr(list, '"');
    while (nth-- > 0) {
        at = strchr(strchr(at + 1, '"') + 1, '"');
    }
    return at;
}

static void ranks(void)
{
    static char forest[TEXT_BYTES], shares[TEXT_BYTES], common[TEXT_BYTES];
    static char passes[RANKS][TEXT_BYTES];
    const char *options =
        "{\"ranks\": 2, \"method\": \"contiguous\", \"unit\": \"leaf\", \"exchange\": false,"
        " \"ops_hold_collectives\": true, \"microbatch_tokens\": 4,"
        " \"rates\": {\"nodes\": 1e-6, \"microbatches\": 1e-6, \"rows\": 1e-6}, \"model\": " MODEL
        ", \"machine\": {}}";
    uint64_t needed = 0, labels = 0, own[NODES_MAX];
    dormouse_forest_t *whole = grown();
    OK(dormouse_forest_get_json(whole, forest, sizeof forest, &needed));
    OK(dormouse_forest_destroy(whole));
    OK(query(shares, "\"query\": \"shares\", \"forest\": %s, \"options\": %s", forest, options));
    open_answer(shares);
    for (int rank = 0; rank < RANKS; rank++) {
        char sequences[256] = "[";
        uint64_t count = numbers(shares, "\"sequences\"", rank, own);
        EXPECT(count > 0);
        for (uint64_t at = 0; at < count; at++) {
            sprintf(sequences + strlen(sequences), "%s%u", at > 0 ? "," : "", (unsigned)own[at]);
        }
        strcat(sequences, "]");
        dormouse_plan_t *plan = plan_of_part(forest, sequences);
        labels += passes_of(plan, passes[rank]);
        OK(dormouse_plan_destroy(plan));
    }
    EXPECT(labels == 6 * 7); /* all tokens of each sequence but the first, on one rank */

    /* Both ranks run the same kinds of ops, and each rank's own passes in order. */
    OK(query(common, "\"query\": \"collective_order\", \"passes\": [%s,%s]", passes[0], passes[1]));
    open_answer(common);
    for (int rank = 0; rank < RANKS; rank++) {
        const char *at = strstr(common, "\"own\":[[") + strlen("\"own\":[");
        at = rank == 0 ? at : strchr(at, ']') + 2;
        uint64_t index = 0;
        for (at++; *at != ']'; at += *at == ',') {
            uint64_t place = strtoull(at, (char **)(uintptr_t)&at, 10);
            const char *kind = word_at(strstr(common, "\"kinds\":") + strlen("\"kinds\":"), place);
            const char *wanted = word_at(passes[rank], index++);
            EXPECT(strncmp(kind, wanted, strcspn(wanted, ",]")) == 0);
        }
        EXPECT(index > 0 && word_at(passes[rank], index - 1) != NULL);
        EXPECT(strchr(word_at(passes[rank], index - 1), ',') == NULL); /* no pass is left out */
    }
}

/* ---- Memory ---- */

enum { SAVED_BYTES = 1 << 20, ELEMS = 64, WINDOW = 2, TRIES_MAX = 10000 };

/* A node of the plan while it is in use. */
typedef struct held {
    dormouse_prefix_t *node;
    unsigned char *saved[LAYERS];
    float *boundary;
    void *gradient;
    float read; /* number of ops that read it */
} held;

static dormouse_runtime_t *runtime;
static held nodes[NODES_MAX];
static dormouse_plan_node_t planned[NODES_MAX];

/*   0 ─┬─ 1 ─┬─ leaf 2          1 has a leaf of its own and a child,
 *      │     └─ 3 ── leaves 4 5  3 leaves alone,
 *      └─ 6 ──── 7 ── leaves 8 9  6 one child alone. */
static dormouse_forest_t *nested(void)
{
    static const uint32_t parents[] = {DORMOUSE_NODE_NONE, 0, 1, 1, 3, 3, 0, 6, 7, 7};
    static const uint64_t lengths[] = {64, 32, 4, 32, 4, 4, 32, 32, 4, 4};
    return tree_of(parents, lengths, 10);
}

/* Plans with the smallest device budget: every inner node sleeps. */
static dormouse_plan_t *tight_plan(void)
{
    dormouse_forest_t *forest = nested();
    dormouse_model_t model;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    uint64_t low = 1, high = UINT64_C(1) << 32, needed = 0;
    model_of(&model);
    DORMOUSE_INIT(&options);
    options.sequence_count = 5;
    options.vocab = 10;
    options.microbatch_rows = 8;
    options.wake_window_layers = WINDOW;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE;
    options.model = &model;
    while (low < high) {
        options.device_bytes = low + (high - low) / 2;
        if (dormouse_plan_create(forest, &options, &plan) == DORMOUSE_OK) {
            OK(dormouse_plan_destroy(plan));
            high = options.device_bytes;
        } else {
            low = options.device_bytes + 1;
        }
    }
    options.device_bytes = low;
    OK(dormouse_plan_create(forest, &options, &plan));
    OK(dormouse_forest_destroy(forest));
    OK(dormouse_plan_get_nodes(plan, planned, NODES_MAX, &needed));
    EXPECT(needed == 10);
    return plan;
}

static int is_inner(uint32_t node)
{
    return planned[node].subtree_end > node + 1;
}

static void forward(dormouse_plan_t *plan, const dormouse_op_t *op)
{
    held *it = &nodes[op->node];
    OK(dormouse_prefix_create(runtime, plan, op->node, LAYERS, &it->node));
    OK(dormouse_prefix_enter_phase(it->node, DORMOUSE_PHASE_A, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        void *saved = NULL, *boundary = NULL;
        const void *named;
        OK(dormouse_prefix_mark_edge(it->node, DORMOUSE_EDGE_FORWARD_BEGIN, layer, NULL));
        OK(dormouse_mem_alloc(runtime, SAVED_BYTES, 0, NULL, &saved));
        fill(saved, SAVED_BYTES, op->node * LAYERS + layer);
        it->saved[layer] = saved;
        named = saved;
        if (layer == 0) {
            OK(dormouse_mem_alloc(runtime, ELEMS * sizeof(float), 0, NULL, &boundary));
            it->boundary = boundary;
            OK(dormouse_prefix_add_boundary(it->node, 0, 0, boundary, ELEMS * sizeof(float), ELEMS,
                                            DORMOUSE_DTYPE_F32, NULL, &it->gradient));
        }
        OK(dormouse_prefix_add_dormant(it->node, layer, &named, 1));
        OK(dormouse_prefix_mark_edge(it->node, DORMOUSE_EDGE_FORWARD_END, layer, NULL));
    }
    OK(dormouse_prefix_enter_phase(it->node, DORMOUSE_PHASE_B, NULL));
}

/* Adds gradients to a node and its ancestors, which were read. */
static void accumulate(uint32_t node)
{
    static float ones[ELEMS];
    for (int at = 0; at < ELEMS; at++) {
        ones[at] = 1;
    }
    for (; node != DORMOUSE_NODE_NONE; node = planned[node].parent) {
        OK(dormouse_prefix_accumulate(nodes[node].node, 0, 0, ones, ELEMS, DORMOUSE_DTYPE_F32, NULL));
        nodes[node].read++;
    }
}

static void backward(const dormouse_op_t *op)
{
    held *it = &nodes[op->node];
    EXPECT(op->residency == DORMOUSE_RESIDENCY_SLEEP && op->wake_window_layers == WINDOW);
    OK(dormouse_prefix_enter_phase(it->node, DORMOUSE_PHASE_C, NULL));
    for (uint32_t layer = LAYERS; layer-- > 0;) {
        OK(dormouse_prefix_mark_edge(it->node, DORMOUSE_EDGE_BACKWARD_BEGIN, layer, NULL));
        EXPECT(is_filled(it->saved[layer], SAVED_BYTES, op->node * LAYERS + layer));
        OK(dormouse_mem_free(runtime, it->saved[layer], NULL));
        OK(dormouse_prefix_mark_edge(it->node, DORMOUSE_EDGE_BACKWARD_END, layer, NULL));
    }
    EXPECT(it->read > 0 && ((float *)it->gradient)[ELEMS - 1] == it->read);
    accumulate(op->reads);
    OK(dormouse_prefix_destroy(it->node));
    OK(dormouse_mem_free(runtime, it->boundary, NULL));
    memset(it, 0, sizeof *it);
}

static int rests(const held *it)
{
    int32_t state = state_of(runtime, it->saved[LAYERS - 1]);
    return state == DORMOUSE_STATE_HOST || state == DORMOUSE_STATE_NVME;
}

/* Waits until the last layer of every live node is asleep, except of nodes that wake. */
static void all_rest(const int *is_due)
{
    for (uint32_t node = 0; node < 10; node++) {
        int tries = 0;
        while (nodes[node].node != NULL && !is_due[node] && !rests(&nodes[node])) {
            EXPECT(++tries < TRIES_MAX);
            if (tries >= TRIES_MAX) {
                return;
            }
            usleep(1000);
        }
    }
}

/* Reads the node whose backward follows each op from the plan's JSON. */
static void backwards_next(dormouse_plan_t *plan, uint32_t *next)
{
    static char text[TEXT_BYTES];
    uint64_t needed = 0;
    int op = -1;
    OK(dormouse_plan_get_json(plan, text, sizeof text, &needed));
    for (char *at = strstr(text, "\"ops\":"); (at = strstr(at, "\"kind\": \"")) != NULL; at++) {
        unsigned node = 0;
        next[++op] = DORMOUSE_NODE_NONE;
        if (op > 0 && strncmp(at, "\"kind\": \"prefix_backward\"", 23) == 0) {
            EXPECT(sscanf(strstr(at, "\"node\":"), "\"node\": %u", &node) == 1);
            next[op - 1] = node;
        }
    }
}

static void memory(const char *dir)
{
    uint32_t next[OPS_MAX], begun[NODES_MAX] = {0};
    int is_due[NODES_MAX] = {0}, named = 0, alone = 0;
    dormouse_plan_t *plan = tight_plan();
    dormouse_prefix_t *none = NULL;
    dormouse_op_t op;
    runtime = runtime_in(dir, 64);
    backwards_next(plan, next);
    RETURNS(dormouse_prefix_create(runtime, plan, 2, LAYERS, &none), DORMOUSE_ERR_ARGUMENT, "prefix_id is 2");
    RETURNS(dormouse_prefix_create(runtime, plan, DORMOUSE_NODE_NONE, LAYERS, &none),
          DORMOUSE_ERR_ARGUMENT, "4294967295");
    for (int at = 0; at < OPS_MAX; at++) {
        DORMOUSE_INIT(&op);
        all_rest(is_due);
        OK(dormouse_plan_get_op(plan, &op));
        if (op.kind == DORMOUSE_OP_DONE || failures > 0) {
            break;
        }
        named += op.waking != DORMOUSE_NODE_NONE;
        alone += next[at] != DORMOUSE_NODE_NONE && !is_due[next[at]];
        if (op.waking != DORMOUSE_NODE_NONE) {
            is_due[op.waking] = 1;
        }
        if (next[at] != DORMOUSE_NODE_NONE) {
            is_due[next[at]] = 1;
        }
        /* Returning the op starts the wakes that are due, and no others. */
        for (uint32_t node = 0; node < 10; node++) {
            if (nodes[node].node != NULL) {
                EXPECT(rests(&nodes[node]) == !is_due[node]);
                begun[node] |= (uint32_t)is_due[node];
            }
        }
        OK(dormouse_plan_get_op(plan, &op)); /* idempotent */
        switch (op.kind) {
        case DORMOUSE_OP_PREFIX_FORWARD:
            EXPECT(op.residency == DORMOUSE_RESIDENCY_SLEEP && is_inner(op.node));
            forward(plan, &op);
            RETURNS(dormouse_prefix_create(runtime, plan, op.node, LAYERS, &none), DORMOUSE_ERR_BUSY,
                  "is live");
            break;
        case DORMOUSE_OP_MICROBATCH:
            accumulate(op.reads);
            break;
        case DORMOUSE_OP_PREFIX_BACKWARD:
            backward(&op);
            break;
        default:
            EXPECT(!"an operation this program knows");
        }
        OK(dormouse_plan_complete_op(plan, op.id));
    }
    EXPECT(named == 2 && alone == 3);
    EXPECT(begun[0] && begun[1] && begun[3] && begun[6] && begun[7] && none == NULL);
    OK(dormouse_plan_destroy(plan));
    OK(dormouse_runtime_destroy(runtime));
}

/* The runtime decides residency: the prefix wakes at the first gradient of the last microbatch. */
static void flat(const char *dir)
{
    const int is_due[NODES_MAX] = {0};
    uint64_t loss_from[2];
    dormouse_forest_t *forest = group_of(64, 4, 2, loss_from);
    dormouse_model_t model;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    dormouse_op_t op;
    uint64_t needed = 0;
    runtime = runtime_in(dir, 64);
    model_of(&model);
    DORMOUSE_INIT(&options);
    options.sequence_count = 2;
    options.loss_from = loss_from;
    options.vocab = 10;
    options.microbatch_rows = 4;
    options.wake_window_layers = WINDOW;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    options.model = &model;
    OK(dormouse_plan_create(forest, &options, &plan));
    OK(dormouse_forest_destroy(forest));
    OK(dormouse_plan_get_nodes(plan, planned, NODES_MAX, &needed));
    for (int at = 0; at < 4 && failures == 0; at++) {
        DORMOUSE_INIT(&op);
        OK(dormouse_plan_get_op(plan, &op));
        if (op.kind == DORMOUSE_OP_PREFIX_FORWARD) {
            forward(plan, &op);
            all_rest(is_due);
        } else if (op.kind == DORMOUSE_OP_MICROBATCH) {
            EXPECT(rests(&nodes[0]) && op.last == (at == 2));
            accumulate(op.reads);
            EXPECT(rests(&nodes[0]) == (at == 1));
        } else {
            backward(&op);
        }
        OK(dormouse_plan_complete_op(plan, op.id));
    }
    OK(dormouse_plan_get_op(plan, &op));
    EXPECT(op.kind == DORMOUSE_OP_DONE);
    OK(dormouse_plan_destroy(plan));
    OK(dormouse_runtime_destroy(runtime));
}

int main(int argc, char **argv)
{
    ranks();
    memory(argc > 1 ? argv[1] : "/var/tmp");
    flat(argc > 1 ? argv[1] : "/var/tmp");
    return done("tree");
}
