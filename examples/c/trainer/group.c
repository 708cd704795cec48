/* One rollout group (group.h). */
#include "group.h"

#include "check.h"

#include <math.h>

static const uint64_t response_tokens[RESPONSES] = {9, 17, 5, 12, 21, 8};
/* Advantages, for example: each response has its own weight in the loss. */
static const double response_weights[RESPONSES] = {0.5, -0.25, 1.0, -0.75, 0.125, 0.375};

/* Token ids: a shared prompt, then a response of its own. */
static int token(uint32_t sequence, uint64_t position)
{
    return (int)((position < PROMPT_TOKENS ? position * 7 : sequence * 11 + position * (position + 5)) % VOCAB);
}

dormouse_plan_t *group_plan(void)
{
    /* A flat group: the prompt, and a child of it for each response. Sequences end in the leaves. */
    uint32_t parents[RESPONSES + 1] = {DORMOUSE_NODE_NONE};
    uint64_t lengths[RESPONSES + 1] = {PROMPT_TOKENS}, loss_from[RESPONSES];
    dormouse_sequences_t sequences;
    dormouse_forest_t *forest = NULL;
    dormouse_model_t model;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    for (uint32_t r = 0; r < RESPONSES; r++) {
        lengths[r + 1] = response_tokens[r];
        loss_from[r] = PROMPT_TOKENS;
    }
    DORMOUSE_INIT(&sequences);
    sequences.parents = parents;
    sequences.lengths = lengths;
    sequences.node_count = RESPONSES + 1;
    check(dormouse_forest_create(&sequences, &forest), "dormouse_forest_create");
    DORMOUSE_INIT(&model);
    model.layers = LAYERS;
    model.heads = HEADS;
    model.kv_heads = HEADS;
    model.head_dim = HEAD_DIM;
    model.dtype_bytes = sizeof(double);
    model.layer_linear_weights = sizeof(layer_weights) / sizeof(double);
    model.kv_linear_weights = 2 * HIDDEN * HIDDEN;
    model.head_weights = HIDDEN * VOCAB;
    for (int which = 0; which < SAVED_KEY; which++) {
        model.saved_bytes_per_token_layer += saved_elems(which, 1) * sizeof(double);
    }
    DORMOUSE_INIT(&options);
    options.sequence_count = RESPONSES;
    options.loss_from = loss_from;
    options.weights = response_weights;
    options.vocab = VOCAB;
    options.microbatch_rows = MICROBATCH_ROWS;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    options.model = &model;
    check(dormouse_plan_create(forest, &options, &plan), "dormouse_plan_create");
    check(dormouse_forest_destroy(forest), "dormouse_forest_destroy");
    return plan;
}

static rows rows_create(size_t count)
{
    return (rows){count, zeros(count, sizeof(row)), zeros(count * HIDDEN, sizeof(double))};
}

void rows_destroy(rows *it)
{
    free(it->each);
    free(it->hidden);
}

/* The rows [begin, end) are the tokens of a sequence from a position on, and attend to each other. */
static void fill(rows *it, size_t begin, size_t end, uint32_t sequence, uint64_t position)
{
    for (size_t r = begin; r < end; r++, position++) {
        it->each[r].token = token(sequence, position);
        it->each[r].position = position;
        it->each[r].first = begin;
    }
}

/* The rows [begin, end) predict the tokens of a sequence from a position on. */
static void score(rows *it, size_t begin, size_t end, uint32_t sequence, uint64_t label, double weight)
{
    for (size_t r = begin; r < end; r++, label++) {
        it->each[r].label = token(sequence, label);
        it->each[r].weight = weight;
    }
}

rows microbatch_rows(const dormouse_op_t *op)
{
    /* Suffixes [P[-1]] + S[:-1], packed: the prompt's last token predicts the response's first. */
    rows it = rows_create(op->members[op->member_count - 1].row_end);
    for (const dormouse_member_t *m = op->members; m < op->members + op->member_count; m++) {
        fill(&it, m->row_begin, m->row_end, m->sequence, m->first_position);
    }
    for (const dormouse_score_t *s = op->scores; s < op->scores + op->score_count; s++) {
        score(&it, s->row_begin, s->row_end, s->sequence, s->first_label, s->weight);
    }
    return it;
}

rows sequence_rows(uint32_t sequence, size_t count)
{
    rows it = rows_create(count);
    fill(&it, 0, count, sequence, 0);
    return it;
}

void saved_take(dormouse_runtime_t *runtime, saved *it, size_t row_count)
{
    /* One block for what nothing else reads, and one each for K and V. */
    void *memory = NULL;
    size_t elems = 0, offset = 0;
    for (int which = 0; which < SAVED_KEY; which++) {
        elems += saved_elems(which, row_count);
    }
    check(dormouse_mem_alloc(runtime, elems * sizeof(double), 0, NULL, &memory), "dormouse_mem_alloc");
    for (int which = 0; which < SAVED_KEY; which++) {
        it->tensors[which] = (double *)memory + offset;
        offset += saved_elems(which, row_count);
    }
    for (int which = SAVED_KEY; which < SAVED_COUNT; which++) {
        size_t bytes = saved_elems(which, row_count) * sizeof(double);
        check(dormouse_mem_alloc(runtime, bytes, 0, NULL, &memory), "dormouse_mem_alloc");
        it->tensors[which] = memory;
    }
}

void saved_give(dormouse_runtime_t *runtime, saved *it, int which)
{
    check(dormouse_mem_free(runtime, it->tensors[which], NULL), "dormouse_mem_free");
}

void saved_give_all(dormouse_runtime_t *runtime, saved *it)
{
    saved_give(runtime, it, SAVED_OWN);
    saved_give(runtime, it, SAVED_KEY);
    saved_give(runtime, it, SAVED_VALUE);
}

double dense_run(dormouse_runtime_t *runtime, const model_weights *weights, model_weights *gradient)
{
    double loss = 0;
    for (uint32_t s = 0; s < RESPONSES; s++) {
        pass it = {.rows = sequence_rows(s, PROMPT_TOKENS + response_tokens[s] - 1)};
        score(&it.rows, PROMPT_TOKENS - 1, it.rows.count, s, PROMPT_TOKENS, response_weights[s]);
        embed_forward(weights, &it.rows);
        for (uint32_t l = 0; l < LAYERS; l++) {
            saved_take(runtime, &it.saved[l], it.rows.count);
            check(layer_forward(&weights->layers[l], &it.rows, NULL, &it.saved[l]), "layer_forward");
        }
        loss += head_loss(weights, gradient, &it.rows);
        for (uint32_t l = LAYERS; l-- > 0;) {
            layer_backward(&weights->layers[l], &gradient->layers[l], &it.rows, NULL, NULL, &it.saved[l]);
            saved_give_all(runtime, &it.saved[l]);
        }
        embed_backward(gradient, &it.rows);
        rows_destroy(&it.rows);
    }
    return loss;
}

double compare(const char *name, const void *a, const void *b, size_t bytes)
{
    const double *x = a, *y = b;
    double apart = 0, all = 0;
    for (size_t i = 0; i < bytes / sizeof *x; i++) {
        apart += (x[i] - y[i]) * (x[i] - y[i]);
        all += y[i] * y[i];
    }
    double distance = sqrt(apart / all);
    if (!(distance <= DISTANCE_MAX)) { /* not a number is too large */
        fail(EXIT_WRONG, "wrong: the gradient of %s is %.1e from the dense run's; accepted: %.0e", name, distance,
             DISTANCE_MAX);
    }
    return distance;
}
