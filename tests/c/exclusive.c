/* Two threads inside one exclusive handle: the second gets DORMOUSE_ERR_BUSY, and neither sees
 * the other's half-done work. */
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
        dormouse_status_t status = dormouse_plan_to_json(plan, NULL, 0, &needed);
        if (status == DORMOUSE_ERR_BUSY) {
            EXPECT(strstr(dormouse_last_error(), "another thread") != NULL);
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

int main(void)
{
    static uint64_t offsets[RESPONSES + 1];
    dormouse_model_t model;
    dormouse_spec_t spec;
    pthread_t other;

    for (unsigned r = 0; r < RESPONSES; r++) {
        offsets[r + 1] = offsets[r] + 3;
    }
    DORMOUSE_INIT(&model);
    model.layers = 2;
    model.heads = 2;
    model.kv_heads = 2;
    model.head_dim = 4;
    model.dtype_bytes = 4;
    model.layer_linear_weights = 1000;
    model.head_weights = 100;
    DORMOUSE_INIT(&spec);
    spec.prompt_length = 16;
    spec.response_offsets = offsets;
    spec.response_count = RESPONSES;
    spec.vocab = 10;
    spec.wave_tokens = 8;
    spec.model = &model;
    OK(dormouse_plan_create(&spec, &plan));
    EXPECT(pthread_barrier_init(&both, NULL, 2) == 0);
    EXPECT(pthread_create(&other, NULL, hammer, NULL) == 0);
    hammer(NULL);
    pthread_join(other, NULL);
    EXPECT(saw_busy);
    OK(dormouse_plan_destroy(plan));
    return done("exclusive");
}
