/* One rollout group: its tokens and weights, its plan, the rows of its passes, and its dense run. */
#ifndef GROUP_H
#define GROUP_H

#include "model.h"

static const double DISTANCE_MAX = 1e-12;
enum { PROMPT_TOKENS = 64, RESPONSES = 6, MICROBATCH_ROWS = 32 };

/* A pass, forward and then backward, and what its layers save in between. */
typedef struct pass {
    rows rows;
    saved saved[LAYERS];
} pass;

/* Plans the group: the prompt once, the responses in microbatches. The caller destroys the plan. */
dormouse_plan_t *group_plan(void);

/* The rows of a microbatch of the plan, with their labels and weights. */
rows microbatch_rows(const dormouse_op_t *op);

/* The first `count` rows of a sequence, without labels. */
rows sequence_rows(uint32_t sequence, size_t count);

void rows_destroy(rows *it);

/* Takes memory from the runtime for what a layer saves: a block of SAVED_OWN, one of K, one of V. */
void saved_take(dormouse_runtime_t *runtime, saved *it, size_t row_count);

/* Frees one of these blocks, or all. */
void saved_give(dormouse_runtime_t *runtime, saved *it, int which);
void saved_give_all(dormouse_runtime_t *runtime, saved *it);

/* The dense run: all layers for every response with its whole prompt. Adds to `gradient`, returns the loss. */
double dense_run(dormouse_runtime_t *runtime, const model_weights *weights, model_weights *gradient);

/*
 * Returns the relative distance |a - b| / |b| of a gradient of `bytes` bytes from the dense run's. Ends the stage
 * if it is above DISTANCE_MAX.
 */
double compare(const char *name, const void *a, const void *b, size_t bytes);

#endif
