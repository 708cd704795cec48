/* Shared by the C test programs: checks that print the line and the value seen. */
#ifndef DORMOUSE_TESTS_CHECK_H
#define DORMOUSE_TESTS_CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dormouse.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

/* Checks the status and a part of its message; "" accepts any message. */
#define RETURNS(call, status, piece) check_status((call), (status), (piece), #call, __LINE__)

static inline void check_status(dormouse_status_t seen, dormouse_status_t wanted, const char *piece,
                         const char *call, int line)
{
    if (seen != wanted) {
        fprintf(stderr, "line %d: %s returned %d (%s: %s), not %d (%s)\n", line, call, (int)seen,
                dormouse_get_status_string(seen), dormouse_get_last_error(), (int)wanted,
                dormouse_get_status_string(wanted));
        failures++;
    } else if (wanted != DORMOUSE_OK && strstr(dormouse_get_last_error(), piece) == NULL) {
        fprintf(stderr, "line %d: the message of %s is \"%s\", without \"%s\"\n", line, call,
                dormouse_get_last_error(), piece);
        failures++;
    }
}

#define OK(call) RETURNS(call, DORMOUSE_OK, "")

/* Creates a runtime with a file of `mib` MiB in `dir`; exits on failure. */
static inline dormouse_runtime_t *runtime_in(const char *dir, uint64_t mib)
{
    dormouse_options_t options;
    dormouse_runtime_t *runtime = NULL;
    DORMOUSE_INIT(&options);
    options.nvme_dir = dir;
    options.nvme_file_bytes = mib << 20;
    OK(dormouse_runtime_create(&options, &runtime));
    if (runtime == NULL) {
        exit(1);
    }
    return runtime;
}

/* Creates a tree from lengths: `nodes` nodes, each after its parent. */
static inline dormouse_forest_t *tree_of(const uint32_t *parents, const uint64_t *lengths,
                                         uint32_t nodes)
{
    dormouse_sequences_t sequences;
    dormouse_forest_t *forest = NULL;
    DORMOUSE_INIT(&sequences);
    sequences.parents = parents;
    sequences.lengths = lengths;
    sequences.node_count = nodes;
    OK(dormouse_forest_create(&sequences, &forest));
    return forest;
}

/* Creates a flat group: a prompt and `responses` responses of `tokens` tokens. `loss_from` receives the
   position of the first label of each response. */
static inline dormouse_forest_t *group_of(uint64_t prompt, uint64_t tokens, uint32_t responses,
                                          uint64_t *loss_from)
{
    uint32_t *parents = (uint32_t *)calloc(responses + 1, sizeof *parents);
    uint64_t *lengths = (uint64_t *)calloc(responses + 1, sizeof *lengths);
    dormouse_forest_t *forest;
    if (parents == NULL || lengths == NULL) {
        exit(1);
    }
    parents[0] = DORMOUSE_NODE_NONE;
    lengths[0] = prompt;
    for (uint32_t at = 0; at < responses; at++) {
        lengths[at + 1] = tokens;
        loss_from[at] = prompt;
    }
    forest = tree_of(parents, lengths, responses + 1);
    free(parents);
    free(lengths);
    return forest;
}

static inline void fill(unsigned char *memory, size_t bytes, unsigned seed)
{
    for (size_t at = 0; at < bytes; at++) {
        memory[at] = (unsigned char)(seed + at * 7 + (at >> 12));
    }
}

static inline int is_filled(const unsigned char *memory, size_t bytes, unsigned seed)
{
    for (size_t at = 0; at < bytes; at++) {
        if (memory[at] != (unsigned char)(seed + at * 7 + (at >> 12))) {
            return 0;
        }
    }
    return 1;
}

static inline int32_t state_of(dormouse_runtime_t *runtime, const void *memory)
{
    dormouse_mem_info_t info;
    DORMOUSE_INIT(&info);
    OK(dormouse_mem_query(runtime, memory, &info));
    return info.state;
}

/* Creates the plan of a forest of two sequences, for a small model. */
static inline dormouse_plan_t *plan_of_two(dormouse_forest_t *forest, const uint64_t *loss_from,
                                           uint32_t layers)
{
    dormouse_model_t model;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    DORMOUSE_INIT(&model);
    model.layers = layers;
    model.heads = model.kv_heads = 2;
    model.head_dim = model.dtype_bytes = 4;
    model.layer_linear_weights = 1000;
    model.head_weights = 100;
    DORMOUSE_INIT(&options);
    options.sequence_count = 2;
    options.loss_from = loss_from;
    options.vocab = 10;
    options.microbatch_rows = 8;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    options.model = &model;
    OK(dormouse_plan_create(forest, &options, &plan));
    return plan;
}

static inline int done(const char *name)
{
    if (failures == 0) {
        printf("%s: all checks passed\n", name);
    }
    return failures == 0 ? 0 : 1;
}

#endif
