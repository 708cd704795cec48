/* Handles that are destroyed in the wrong order, twice, or not at all: what still needs them keeps them, and what does
 * not goes on. */
#include "check.h"

#define BYTES ((size_t)1 << 16)
enum { LAYERS = 2 };

static dormouse_runtime_t *runtime;

static unsigned char *block_of(unsigned seed)
{
    void *block = NULL;
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
    fill(block, BYTES, seed);
    return block;
}

/* Forward of all layers, phases B and C: the plan and the forest of the prefix are gone. */
static void run_prefix(dormouse_prefix_t *prefix)
{
    OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_A, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_BEGIN, layer, NULL));
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_END, layer, NULL));
    }
    OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_B, NULL));
    OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_C, NULL));
    for (uint32_t layer = LAYERS; layer-- > 0;) {
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_BACKWARD_BEGIN, layer, NULL));
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_BACKWARD_END, layer, NULL));
    }
}

/* The forest, then the plan, then the runtime, before the prefix. */
static void reversed(void)
{
    uint64_t loss_from[2], id = 0;
    dormouse_forest_t *forest = group_of(4, 2, 2, loss_from);
    dormouse_plan_t *plan = plan_of_two(forest, loss_from, LAYERS);
    dormouse_prefix_t *prefix = NULL;
    dormouse_tag_t *tag = NULL;
    unsigned char *block = block_of(3);

    OK(dormouse_forest_destroy(forest));
    OK(dormouse_prefix_create(runtime, plan, 0, LAYERS, &prefix));
    OK(dormouse_plan_destroy(plan));
    OK(dormouse_tag_create(runtime, "late", 0, &tag));
    OK(dormouse_stash_put(runtime, block, BYTES, 1, NULL, &id));
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "prefix 0");
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "tag late");
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "1 stash id");
    run_prefix(prefix); /* the refused calls changed nothing */
    RETURNS(dormouse_forest_destroy(forest), DORMOUSE_ERR_STALE, "accepted: a live forest");
    RETURNS(dormouse_plan_destroy(plan), DORMOUSE_ERR_STALE, "accepted: a live plan");
    OK(dormouse_stash_drop(runtime, id));
    RETURNS(dormouse_stash_drop(runtime, id), DORMOUSE_ERR_STALE, "accepted: a live stash");
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "prefix 0, tag late");
    OK(dormouse_prefix_destroy(prefix));
    RETURNS(dormouse_prefix_destroy(prefix), DORMOUSE_ERR_STALE, "accepted: a live prefix");
    OK(dormouse_tag_destroy(tag));
    RETURNS(dormouse_tag_destroy(tag), DORMOUSE_ERR_STALE, "accepted: a live tag");
    OK(dormouse_mem_free(runtime, block, NULL));
}

/* A prefix that is destroyed in each phase, with a layer's window open on this thread. */
static void unfinished(void)
{
    for (int phase = 0; phase <= DORMOUSE_PHASE_B; phase++) {
        dormouse_prefix_t *prefix = NULL;
        void *block = NULL;
        OK(dormouse_prefix_create(runtime, NULL, 0, 1, &prefix));
        if (phase >= DORMOUSE_PHASE_A) {
            OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_A, NULL));
            OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_BEGIN, 0, NULL));
            OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
            fill(block, BYTES, 5);
        }
        if (phase == DORMOUSE_PHASE_B) {
            OK(dormouse_prefix_add_dormant(prefix, 0, (const void *const *)&block, 1));
            OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_END, 0, NULL));
            OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_B, NULL));
        }
        OK(dormouse_prefix_destroy(prefix));
        if (block != NULL) {
            EXPECT(is_filled(block, BYTES, 5) && state_of(runtime, block) == DORMOUSE_STATE_AWAKE);
            OK(dormouse_mem_free(runtime, block, NULL));
        }
    }
}

/* Blocks that are freed while they sleep, and tags that are destroyed while they do. */
static void asleep(void)
{
    dormouse_tag_t *tag = NULL;
    unsigned char *freed = block_of(6), *kept = block_of(7);
    OK(dormouse_tag_create(runtime, "asleep", 0, &tag));
    OK(dormouse_tag_add(tag, freed, BYTES));
    OK(dormouse_tag_add(tag, kept, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_HOST, NULL));
    OK(dormouse_mem_free(runtime, freed, NULL));
    RETURNS(dormouse_mem_free(runtime, freed, NULL), DORMOUSE_ERR_NOT_OURS, "");
    OK(dormouse_tag_destroy(tag));
    EXPECT(is_filled(kept, BYTES, 7));
    OK(dormouse_mem_free(runtime, kept, NULL));
}

/* Ends inside a tag. */
static void *never_leaves(void *tag)
{
    OK(dormouse_tag_enter(tag));
    return NULL;
}

/* A block outlives its runtime, and the next one frees it. */
static void outlived(const char *folder)
{
    dormouse_runtime_t *first = runtime;
    unsigned char *block = block_of(8);
    OK(dormouse_runtime_destroy(first));
    EXPECT(is_filled(block, BYTES, 8));
    RETURNS(dormouse_mem_free(first, block, NULL), DORMOUSE_ERR_STALE, "accepted: a live runtime");
    runtime = runtime_in(folder, 16);
    EXPECT(runtime != first);
    RETURNS(dormouse_runtime_destroy(first), DORMOUSE_ERR_STALE, "accepted: a live runtime");
    EXPECT(is_filled(block, BYTES, 8));
    OK(dormouse_mem_free(runtime, block, NULL));
}

int main(int argc, char **argv)
{
    const char *folder = argc > 1 ? argv[1] : NULL;
    dormouse_tag_t *tag = NULL;
    pthread_t other;
    runtime = runtime_in(folder, 16);
    reversed();
    unfinished();
    asleep();
    outlived(folder);
    OK(dormouse_tag_create(runtime, "entered", 0, &tag));
    EXPECT(pthread_create(&other, NULL, never_leaves, tag) == 0);
    pthread_join(other, NULL);
    RETURNS(dormouse_tag_destroy(tag), DORMOUSE_ERR_BUSY, "not left");
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "tag entered");
    return done("order"); /* and a live runtime */
}
