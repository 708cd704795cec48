/* Threads with handles of their own in one runtime: no call of one is refused because of another, and every byte
 * stays. Arguments: a folder, and the number of rounds. */
#include "check.h"

enum { THREADS = 4, LAYERS = 2, BLOCKS = 3, LOG_BYTES = 8192 };
#define BYTES ((size_t)1 << 16)

static dormouse_runtime_t *runtime;
static const char *folder;
static int rounds;
static pthread_barrier_t all;

/* Sleeps and wakes; memory that finds no room stays awake. */
static void tags(unsigned seed)
{
    dormouse_tag_t *tag = NULL;
    void *blocks[BLOCKS] = {NULL};
    char name[DORMOUSE_NAME_BYTES];
    snprintf(name, sizeof name, "thread %u", seed);
    OK(dormouse_tag_create(runtime, name, 0, &tag));
    OK(dormouse_tag_enter(tag));
    for (unsigned at = 0; at < BLOCKS; at++) {
        OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &blocks[at]));
        fill(blocks[at], BYTES, seed + at);
    }
    OK(dormouse_tag_leave(tag));
    dormouse_status_t status = dormouse_tag_sleep(tag, 1 + (int32_t)(seed % 2), NULL);
    EXPECT(status == DORMOUSE_OK || status == DORMOUSE_PARTIAL || status == DORMOUSE_DECLINED);
    OK(dormouse_tag_wake(tag, NULL));
    for (unsigned at = 0; at < BLOCKS; at++) {
        dormouse_mem_info_t info;
        DORMOUSE_INIT(&info);
        EXPECT(is_filled(blocks[at], BYTES, seed + at));
        OK(dormouse_mem_query(runtime, blocks[at], &info));
        EXPECT(info.base == blocks[at] && strncmp(info.name, name, 24) == 0);
        OK(dormouse_mem_free(runtime, blocks[at], NULL));
    }
    OK(dormouse_tag_destroy(tag));
}

/* Plans a group and runs a prefix of its own. */
static void prefixes(unsigned seed)
{
    uint64_t loss_from[2];
    dormouse_forest_t *forest = group_of(4, 2, 2, loss_from);
    dormouse_plan_t *plan = plan_of_two(forest, loss_from, LAYERS);
    dormouse_prefix_t *prefix = NULL;
    dormouse_op_t op;
    void *saved[LAYERS] = {NULL}, *gradient = NULL;
    float boundary[4] = {1, 2, 3, 4};
    OK(dormouse_prefix_create(runtime, plan, 0, LAYERS, &prefix));
    OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_A, NULL));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_BEGIN, layer, NULL));
        OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &saved[layer]));
        fill(saved[layer], BYTES, seed + layer);
        OK(dormouse_prefix_add_boundary(prefix, layer, 0, boundary, sizeof boundary, 4, DORMOUSE_DTYPE_F32, NULL,
                                        &gradient));
        OK(dormouse_prefix_add_dormant(prefix, layer, (const void *const *)&saved[layer], 1));
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_END, layer, NULL));
    }
    OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_B, NULL));
    for (int is_over = 0; !is_over;) {
        DORMOUSE_INIT(&op);
        OK(dormouse_plan_get_op(plan, &op));
        is_over = op.kind == DORMOUSE_OP_DONE || failures != 0;
        OK(is_over ? DORMOUSE_OK : dormouse_plan_complete_op(plan, op.id));
    }
    OK(dormouse_prefix_accumulate(prefix, LAYERS - 1, 0, boundary, 4, DORMOUSE_DTYPE_F32, NULL));
    EXPECT(((float *)gradient)[3] == 4);
    OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_C, NULL));
    for (uint32_t layer = LAYERS; layer-- > 0;) {
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_BACKWARD_BEGIN, layer, NULL));
        EXPECT(is_filled(saved[layer], BYTES, seed + layer));
        OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_BACKWARD_END, layer, NULL));
        OK(dormouse_mem_free(runtime, saved[layer], NULL));
    }
    OK(dormouse_prefix_destroy(prefix));
    OK(dormouse_plan_destroy(plan));
    OK(dormouse_forest_destroy(forest));
}

/* Functions of the whole runtime. */
static void figures(unsigned seed)
{
    static char log[THREADS][LOG_BYTES];
    char path[512];
    dormouse_stats_t stats;
    dormouse_info_t info;
    dormouse_param_t param;
    uint64_t count = 0;
    DORMOUSE_INIT(&stats);
    OK(dormouse_runtime_get_stats(runtime, seed % 2 ? DORMOUSE_STATS_RESET_PEAKS : 0, &stats));
    EXPECT(stats.allocated.current_bytes <= stats.mapped.current_bytes + stats.asleep.current_bytes);
    DORMOUSE_INIT(&info);
    OK(dormouse_runtime_get_info(runtime, &info));
    DORMOUSE_INIT(&param);
    OK(dormouse_param_get(seed % 8, &param));
    OK(dormouse_log_read(log[seed % THREADS], LOG_BYTES, &count));
    OK(dormouse_runtime_trim(runtime, &count));
    OK(dormouse_runtime_set_budget(runtime, DORMOUSE_TIER_HOST, (uint64_t)(1 + seed % 3) << 17)); /* 0 closes the tier */
    snprintf(path, sizeof path, "%s/dump-%u", folder, seed % THREADS);
    OK(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_PFTRACE, path));
    OK(dormouse_stash_put(runtime, log[seed % THREADS], 64, seed, NULL, &count));
    OK(dormouse_stash_drop(runtime, count));
}

static void *work(void *number)
{
    unsigned seed = (unsigned)(uintptr_t)number;
    pthread_barrier_wait(&all);
    for (int round = 0; round < rounds; round++, seed += THREADS) {
        tags(seed);
        prefixes(seed);
        figures(seed);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    dormouse_stats_t stats;
    if (argc != 3) {
        return 2;
    }
    folder = argv[1];
    rounds = atoi(argv[2]);
    runtime = runtime_in(folder, 16);
    EXPECT(pthread_barrier_init(&all, NULL, THREADS) == 0);
    for (uintptr_t at = 0; at < THREADS; at++) {
        EXPECT(pthread_create(&threads[at], NULL, work, (void *)at) == 0);
    }
    for (int at = 0; at < THREADS; at++) {
        pthread_join(threads[at], NULL);
    }
    pthread_barrier_destroy(&all);
    DORMOUSE_INIT(&stats);
    OK(dormouse_runtime_get_stats(runtime, 0, &stats));
    EXPECT(stats.allocated.count == 0 && stats.asleep.count == 0 && stats.roles[DORMOUSE_ROLE_DORMANT].count == 0);
    OK(dormouse_runtime_destroy(runtime));
    return done("threads");
}
