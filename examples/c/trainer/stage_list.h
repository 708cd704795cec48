/* The planner's list of a pipeline stage (docs/queries/pipeline.md), as C structs. */
#ifndef STAGE_LIST_H
#define STAGE_LIST_H

#include <dormouse.h>

enum { STAGE_OPS_MAX = 64, STAGE_STEPS_MAX = 3 * STAGE_OPS_MAX };

typedef enum stage_op_kind { PREFIX_FORWARD, MICROBATCH_FORWARD, MICROBATCH_BACKWARD, PREFIX_BACKWARD } stage_op_kind;

typedef struct stage_op {
    stage_op_kind kind;
    uint32_t index;      /* of the microbatch */
    uint64_t send_bytes; /* that it sends after it; 0: nothing */
} stage_op;

typedef enum stage_step_kind { STEP_COMPUTE, STEP_SEND, STEP_RECEIVE } stage_step_kind;

typedef struct stage_step {
    stage_step_kind kind;
    uint32_t op;
} stage_step;

typedef struct stage_list {
    stage_op ops[STAGE_OPS_MAX];
    stage_step steps[STAGE_STEPS_MAX];
    uint32_t op_count, step_count;
} stage_list;

/*
 * Asks the planner for the lists of `stages` stages and reads that of `stage`. A row of hidden states
 * has `row_bytes` bytes. Returns the status of dormouse_schedule_query, or DORMOUSE_ERR_LIMIT if
 * the list or the request is too long for the structs.
 */
dormouse_status_t stage_list_plan(uint32_t stages, uint32_t stage, uint64_t row_bytes, uint64_t prefix_rows,
                                  const uint64_t *microbatch_rows, uint32_t microbatches, stage_list *list_out);

#endif
