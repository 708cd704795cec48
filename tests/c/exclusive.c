/* Threads that use one exclusive handle: a second thread receives DORMOUSE_ERR_BUSY, and no thread sees
 * incomplete work of another. */
#include "check.h"

#define RESPONSES 20000u
#define TRIES_MAX 1000000u

static dormouse_plan_t *plan;
static int saw_busy;
static pthread_barrier_t both;

static void *hammer(void *unused)
{
    (void)unused;
    pthread_barrier_wait(&both);
    for (unsigned tries = 0; tries < TRIES_MAX; tries++) {
        uint64_t needed = 0;
        dormouse_status_t status = dormouse_plan_get_json(plan, NULL, 0, &needed);
        if (status == DORMOUSE_ERR_BUSY) {
            EXPECT(strstr(dormouse_get_last_error(), "another thread") != NULL);
            __atomic_store_n(&saw_busy, 1, __ATOMIC_RELAXED);
        } else {
            EXPECT(status == DORMOUSE_OK && needed > RESPONSES);
        }
        if (__atomic_load_n(&saw_busy, __ATOMIC_RELAXED)) {
            return NULL;
        }
    }
    return NULL;
}

enum { THREADS = 4, ADDED = 200 };

static dormouse_forest_t *forest;
static int ended;

/* Adds sequences, with retries while BUSY; then all threads destroy the forest at once. */
static void *grow(void *unused)
{
    (void)unused;
    pthread_barrier_wait(&both);
    for (int32_t at = 0; at < ADDED; at++) {
        int32_t ids[] = {1, at, at};
        dormouse_status_t status = DORMOUSE_ERR_BUSY;
        for (unsigned tries = 0; tries < TRIES_MAX && status == DORMOUSE_ERR_BUSY; tries++) {
            uint32_t number = UINT32_MAX;
            status = dormouse_forest_add(forest, ids, 4, 3, 0, &number);
            EXPECT((status == DORMOUSE_OK) == (number != UINT32_MAX));
        }
        EXPECT(status == DORMOUSE_OK);
    }
    pthread_barrier_wait(&both);
    dormouse_forest_info_t info;
    DORMOUSE_INIT(&info);
    dormouse_status_t status = dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0);
    EXPECT(status == DORMOUSE_ERR_BUSY || (status == DORMOUSE_OK && info.sequences == THREADS * ADDED));
    pthread_barrier_wait(&both);
    status = dormouse_forest_destroy(forest);
    EXPECT(status == DORMOUSE_OK || status == DORMOUSE_ERR_BUSY || status == DORMOUSE_ERR_STALE);
    __atomic_fetch_add(&ended, status == DORMOUSE_OK, __ATOMIC_RELAXED);
    return NULL;
}

static void forests(void)
{
    dormouse_sequences_t none;
    dormouse_forest_info_t info;
    pthread_t threads[THREADS];
    DORMOUSE_INIT(&none);
    none.vocab = ADDED;
    none.flags = DORMOUSE_SEQUENCES_GROW;
    OK(dormouse_forest_create(&none, &forest));
    EXPECT(pthread_barrier_init(&both, NULL, THREADS) == 0);
    for (int at = 0; at < THREADS; at++) {
        EXPECT(pthread_create(&threads[at], NULL, grow, NULL) == 0);
    }
    for (int at = 0; at < THREADS; at++) {
        pthread_join(threads[at], NULL);
    }
    pthread_barrier_destroy(&both);
    EXPECT(ended == 1);
    DORMOUSE_INIT(&info);
    RETURNS(dormouse_forest_get_info(forest, &info, NULL, 0, NULL, 0), DORMOUSE_ERR_STALE, "destroyed");
    RETURNS(dormouse_forest_destroy(forest), DORMOUSE_ERR_STALE, "destroyed");
}

int main(void)
{
    static uint64_t loss_from[RESPONSES];
    dormouse_forest_t *group = group_of(16, 3, RESPONSES, loss_from);
    dormouse_model_t model;
    dormouse_plan_options_t options;
    pthread_t other;

    DORMOUSE_INIT(&model);
    model.layers = 2;
    model.heads = 2;
    model.kv_heads = 2;
    model.head_dim = 4;
    model.dtype_bytes = 4;
    model.layer_linear_weights = 1000;
    model.head_weights = 100;
    DORMOUSE_INIT(&options);
    options.sequence_count = RESPONSES;
    options.loss_from = loss_from;
    options.vocab = 10;
    options.microbatch_rows = 8;
    options.flags = DORMOUSE_PLAN_ALWAYS_SHARE | DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    options.model = &model;
    OK(dormouse_plan_create(group, &options, &plan));
    OK(dormouse_forest_destroy(group));
    EXPECT(pthread_barrier_init(&both, NULL, 2) == 0);
    EXPECT(pthread_create(&other, NULL, hammer, NULL) == 0);
    hammer(NULL);
    pthread_join(other, NULL);
    EXPECT(saw_busy);
    pthread_barrier_destroy(&both);
    OK(dormouse_plan_destroy(plan));
    forests();
    return done("exclusive");
}
