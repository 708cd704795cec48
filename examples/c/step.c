/*
 * One shared-prefix update driven from C alone: prefix forward (A), suffix microbatches (B), prefix
 * backward (C). The saved activations of each layer sleep in a file from the moment the next layer
 * has run until its backward, at unchanged addresses; every byte is verified when it is back.
 *
 *   cc -std=c99 -Iffi/include examples/c/step.c -Ltarget/release -ldormouse -o step
 *   LD_LIBRARY_PATH=target/release ./step /var/tmp
 *   LD_LIBRARY_PATH=target/release LD_PRELOAD=target/release/libdormouse_preload.so ./step /var/tmp
 *
 * With the preload library the activations come from malloc, as a trainer's would; without it
 * from dormouse_mem_alloc. The file is made in the directory given and is gone at exit.
 */
#include <dormouse.h>

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LAYERS 12u
#define SAVED_PER_LAYER 2u
#define SAVED_BYTES (4u << 20)
#define BOUNDARY_ELEMS 4096u
#define PROMPT_TOKENS 512u
#define RESPONSES 8u
#define RESPONSE_TOKENS 33u
#define MICROBATCH_TOKENS 128u

typedef struct layer {
    uint64_t *saved[SAVED_PER_LAYER];
    float *boundary[2]; /* K and V */
    void *gradient[2];  /* their accumulators */
} layer;

static dormouse_runtime_t *runtime;
static int is_preloaded;

static void check(dormouse_status_t status, const char *what)
{
    if (status == DORMOUSE_OK) {
        return;
    }
    fprintf(stderr, "%s: %s\n  %s\n", what, dormouse_get_status_string(status), dormouse_get_last_error());
    exit(1);
}

static void require(int is_true, const char *what)
{
    if (!is_true) {
        fprintf(stderr, "wrong: %s\n", what);
        exit(1);
    }
}

static void *take(size_t bytes)
{
    void *memory = NULL;
    if (is_preloaded) {
        memory = malloc(bytes);
    } else {
        check(dormouse_mem_alloc(runtime, bytes, 64, NULL, &memory), "dormouse_mem_alloc");
    }
    require(memory != NULL, "an allocation failed");
    return memory;
}

static void give(void *memory)
{
    if (is_preloaded) {
        free(memory);
    } else {
        check(dormouse_mem_free(runtime, memory, NULL), "dormouse_mem_free");
    }
}

/* Fills a tensor with values that differ at every position, in place of a forward. */
static uint64_t expected(uint32_t l, uint32_t which, size_t at)
{
    uint64_t x = ((uint64_t)(l + 1) << 40) ^ ((uint64_t)(which + 1) << 32) ^ at;
    x *= UINT64_C(0x9e3779b97f4a7c15);
    return x ^ (x >> 29);
}

static double resident_mib(void)
{
    long pages = 0, all = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file != NULL) {
        if (fscanf(file, "%ld %ld", &all, &pages) != 2) {
            pages = 0;
        }
        fclose(file);
    }
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}

static void row(const char *phase)
{
    dormouse_stats_t stats;
    DORMOUSE_INIT(&stats);
    check(dormouse_runtime_get_stats(runtime, 0, &stats), "dormouse_runtime_get_stats");
    printf("%-26s %9.1f %9.1f %9.1f %9.1f\n", phase, resident_mib(),
           (double)stats.allocated.current_bytes / (1 << 20),
           (double)stats.asleep.current_bytes / (1 << 20),
           (double)stats.copies[DORMOUSE_COPY_NVME_READ].bytes / (1 << 20));
}

static void forward(dormouse_prefix_t *node, layer *layers)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        const void *named[SAVED_PER_LAYER];
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_BEGIN, l, NULL), "forward begins");
        for (uint32_t which = 0; which < SAVED_PER_LAYER; which++) {
            uint64_t *saved = (uint64_t *)take(SAVED_BYTES);
            for (size_t at = 0; at < SAVED_BYTES / sizeof *saved; at++) {
                saved[at] = expected(l, which, at);
            }
            layers[l].saved[which] = saved;
            named[which] = saved;
        }
        for (uint32_t slot = 0; slot < 2; slot++) {
            size_t bytes = BOUNDARY_ELEMS * sizeof(float);
            float *boundary = (float *)take(bytes);
            for (size_t at = 0; at < BOUNDARY_ELEMS; at++) {
                boundary[at] = (float)(l + slot);
            }
            layers[l].boundary[slot] = boundary;
            check(dormouse_prefix_add_boundary(node, l, slot, boundary, bytes, BOUNDARY_ELEMS,
                                               DORMOUSE_DTYPE_F32, NULL, &layers[l].gradient[slot]),
                  "dormouse_prefix_add_boundary");
        }
        check(dormouse_prefix_add_dormant(node, l, named, SAVED_PER_LAYER), "dormouse_prefix_add_dormant");
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_END, l, NULL), "forward ends");
    }
}

/* Each suffix adds weight * boundary to the accumulators of the boundary tensors it read. */
static void microbatch(dormouse_prefix_t *node, const layer *layers, const dormouse_op_t *op)
{
    static float gradient[BOUNDARY_ELEMS];
    for (uint32_t m = 0; m < op->member_count; m++) {
        float weight = (float)op->members[m].weight;
        for (uint32_t l = 0; l < LAYERS; l++) {
            for (uint32_t slot = 0; slot < 2; slot++) {
                for (size_t at = 0; at < BOUNDARY_ELEMS; at++) {
                    gradient[at] = weight * layers[l].boundary[slot][at];
                }
                check(dormouse_prefix_accumulate(node, l, slot, gradient, BOUNDARY_ELEMS,
                                               DORMOUSE_DTYPE_F32, NULL),
                      "dormouse_prefix_accumulate");
            }
        }
    }
}

static void backward(dormouse_prefix_t *node, layer *layers)
{
    for (uint32_t l = LAYERS; l-- > 0;) {
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_BEGIN, l, NULL), "backward begins");
        for (uint32_t which = 0; which < SAVED_PER_LAYER; which++) {
            uint64_t *saved = layers[l].saved[which];
            for (size_t at = 0; at < SAVED_BYTES / sizeof *saved; at++) {
                require(saved[at] == expected(l, which, at), "a byte changed while it slept");
            }
            give(saved);
        }
        for (uint32_t slot = 0; slot < 2; slot++) {
            const float *sum = (const float *)layers[l].gradient[slot];
            float want = (float)(l + slot) * (float)RESPONSES / 2; /* every weight is 0.5 */
            for (size_t at = 0; at < BOUNDARY_ELEMS; at++) {
                require(sum[at] == want, "an accumulator is not the sum of its parts");
            }
        }
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_END, l, NULL), "backward ends");
    }
}

static dormouse_plan_t *make_plan(void)
{
    /* A flat group: the prompt, and a child of it for each response. Sequences end in the leaves. */
    static uint32_t parents[RESPONSES + 1];
    static uint64_t lengths[RESPONSES + 1], loss_from[RESPONSES];
    static double weights[RESPONSES];
    dormouse_sequences_t sequences;
    dormouse_forest_t *forest = NULL;
    dormouse_model_t model;
    dormouse_plan_options_t options;
    dormouse_plan_t *plan = NULL;
    parents[0] = DORMOUSE_NODE_NONE;
    lengths[0] = PROMPT_TOKENS;
    for (uint32_t r = 0; r < RESPONSES; r++) {
        lengths[r + 1] = RESPONSE_TOKENS;
        loss_from[r] = PROMPT_TOKENS;
        weights[r] = 0.5;
    }
    DORMOUSE_INIT(&sequences);
    sequences.parents = parents;
    sequences.lengths = lengths;
    sequences.node_count = RESPONSES + 1;
    check(dormouse_forest_create(&sequences, &forest), "dormouse_forest_create");
    DORMOUSE_INIT(&model);
    model.layers = LAYERS;
    model.heads = 8;
    model.kv_heads = 2;
    model.head_dim = 64;
    model.dtype_bytes = 4;
    model.layer_linear_weights = 3u << 20;
    model.kv_linear_weights = 128u << 10;
    model.head_weights = 8u << 20;
    model.saved_bytes_per_token_layer = SAVED_PER_LAYER * SAVED_BYTES / PROMPT_TOKENS;
    DORMOUSE_INIT(&options);
    options.sequence_count = RESPONSES;
    options.loss_from = loss_from;
    options.weights = weights;
    options.vocab = 32000;
    options.microbatch_rows = MICROBATCH_TOKENS;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    options.model = &model;
    check(dormouse_plan_create(forest, &options, &plan), "dormouse_plan_create");
    check(dormouse_forest_destroy(forest), "dormouse_forest_destroy");
    return plan;
}

static void report(dormouse_prefix_t *node)
{
    dormouse_prefix_report_t it;
    DORMOUSE_INIT(&it);
    check(dormouse_prefix_get_report(node, &it, NULL, 0, NULL), "dormouse_prefix_get_report");
    printf("\ndormant %.1f MiB, asleep in B %.1f MiB, stall %.1f ms (bound %.1f ms)%s%s\n",
           (double)it.dormant_bytes / (1 << 20), (double)it.asleep_at_b_bytes / (1 << 20),
           (double)it.stall_ns / 1e6, (double)it.stall_bound_ns / 1e6,
           it.declined[0] ? ", declined: " : "", it.declined);
    require(it.dormant_bytes == (uint64_t)LAYERS * SAVED_PER_LAYER * SAVED_BYTES,
            "every saved tensor and nothing else is dormant");
}

int main(int argc, char **argv)
{
    static layer layers[LAYERS];
    dormouse_options_t options;
    dormouse_info_t info;
    dormouse_op_t op;
    dormouse_plan_t *plan;
    dormouse_prefix_t *node = NULL;

    DORMOUSE_INIT(&options);
    options.nvme_dir = argc > 1 ? argv[1] : NULL; /* or DORMOUSE_NVME_DIR */
    options.nvme_file_bytes = UINT64_C(256) << 20;
    check(dormouse_runtime_create(&options, &runtime), "dormouse_runtime_create");
    DORMOUSE_INIT(&info);
    check(dormouse_runtime_get_info(runtime, &info), "dormouse_runtime_get_info");
    is_preloaded = (info.modes & DORMOUSE_MODE_PRELOAD) != 0;
    if ((info.tier_flags & DORMOUSE_TIER_FLAG_NVME) == 0) {
        fprintf(stderr, "usage: step DIRECTORY (or DORMOUSE_NVME_DIR): %s\n", info.unavailable_reason);
        return 2;
    }
    printf("memory from %s\n\n%-26s %9s %9s %9s %9s\n",
           is_preloaded ? "malloc (preload)" : "dormouse_mem_alloc", "MiB", "resident", "awake",
           "asleep", "read back");
    row("idle");

    plan = make_plan();
    check(dormouse_prefix_create(runtime, plan, 0, LAYERS, &node), "dormouse_prefix_create");
    for (;;) {
        DORMOUSE_INIT(&op);
        check(dormouse_plan_get_op(plan, &op), "dormouse_plan_get_op");
        if (op.kind == DORMOUSE_OP_DONE) {
            break;
        }
        switch (op.kind) {
        case DORMOUSE_OP_PREFIX_FORWARD:
            check(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_A, NULL), "phase A");
            forward(node, layers);
            row("A  prefix forward");
            check(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_B, NULL), "phase B");
            break;
        case DORMOUSE_OP_MICROBATCH:
            microbatch(node, layers, &op);
            row(op.last ? "B  last microbatch" : "B  microbatch");
            break;
        case DORMOUSE_OP_PREFIX_BACKWARD:
            check(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_C, NULL), "phase C");
            backward(node, layers);
            row("C  prefix backward");
            break;
        default:
            require(0, "an operation this program knows");
        }
        check(dormouse_plan_complete_op(plan, op.id), "dormouse_plan_complete_op");
    }
    report(node);
    check(dormouse_prefix_destroy(node), "dormouse_prefix_destroy");
    check(dormouse_plan_destroy(plan), "dormouse_plan_destroy");
    for (uint32_t l = 0; l < LAYERS; l++) {
        give(layers[l].boundary[0]);
        give(layers[l].boundary[1]);
    }
    if (argc > 2) {
        check(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_HTML, argv[2]), "dormouse_runtime_dump");
    }
    check(dormouse_runtime_destroy(runtime), "dormouse_runtime_destroy");
    printf("every byte came back\n");
    return 0;
}
