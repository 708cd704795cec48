/* One pipeline stage: its memory, its ops, its messages, and the comparison with the dense run (stage.h). */
#include "stage.h"

#include "check.h"
#include "group.h"
#include "stage_list.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <sys/socket.h>
#include <sys/time.h>

enum { STAGE_LAYERS = LAYERS / STAGES };
enum { PEER_WAIT_SECONDS = 60 };
/* Of a socket's buffers; the system takes its least instead. A send of a pass then waits for its receiver. */
enum { SOCKET_BUFFER_BYTES = 1 };

uint32_t stage;
static int peer; /* socket of the other stage */
static dormouse_runtime_t *runtime;
static dormouse_plan_t *plan;
static dormouse_prefix_t *node;
static model_weights weights, gradient, dense_gradient;
static pass prefix, microbatches[RESPONSES];
static double *accumulators[STAGE_LAYERS][2]; /* gK and gV; the prefix owns them */
static double loss;
static uint64_t sent_bytes;

/* ---- Messages between the stages ---- */

/* Sends or receives hidden states, or their gradient. A stage that ends closes its socket. */
static void transfer(const rows *it, int is_send)
{
    size_t bytes = it->count * HIDDEN * sizeof *it->hidden;
    for (size_t done = 0; done < bytes;) {
        char *at = (char *)it->hidden + done;
        ssize_t count = is_send ? send(peer, at, bytes - done, MSG_NOSIGNAL) : recv(peer, at, bytes - done, 0);
        if (count == 0 || (count < 0 && (errno == EPIPE || errno == ECONNRESET))) {
            fail(EXIT_PEER, "the other stage ended: %zu of %zu bytes %s", done, bytes, is_send ? "sent" : "received");
        }
        if (count < 0 && errno == EAGAIN) {
            fail(EXIT_PEER, "the other stage is silent for %d s", PEER_WAIT_SECONDS);
        }
        if (count < 0 && errno != EINTR) {
            fail(EXIT_PEER, "the other stage cannot be reached: %s", strerror(errno));
        }
        done += count > 0 ? (size_t)count : 0;
    }
    sent_bytes += is_send ? bytes : 0;
}

/* ---- The ops of a stage ---- */

static layer_weights *own(model_weights *it, uint32_t l)
{
    return &it->layers[stage * STAGE_LAYERS + l];
}

static void complete(const dormouse_op_t *op)
{
    check(dormouse_plan_complete_op(plan, op->id), "dormouse_plan_complete_op");
}

static dormouse_op_t next_op(void)
{
    dormouse_op_t op;
    DORMOUSE_INIT(&op);
    check(dormouse_plan_get_op(plan, &op), "dormouse_plan_get_op");
    return op;
}

/* Begins the plan's next op. The prefix follows its plan: it starts to wake in the last microbatch. */
static dormouse_op_t begin(int32_t kind)
{
    dormouse_op_t op = next_op();
    require(op.kind == kind, "the stage's list and the plan have the same order");
    return op;
}

static void prefix_forward(void)
{
    dormouse_op_t op = begin(DORMOUSE_OP_PREFIX_FORWARD);
    check(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_A, NULL), "phase A");
    for (uint32_t l = 0; l < STAGE_LAYERS; l++) {
        saved *it = &prefix.saved[l];
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_BEGIN, l, NULL), "forward begins");
        saved_take(runtime, it, prefix.rows.count); /* between the marks: this memory belongs to the layer */
        check(layer_forward(own(&weights, l), &prefix.rows, NULL, it), "layer_forward");
        for (uint32_t slot = 0; slot < 2; slot++) {
            size_t elems = saved_elems(SAVED_KEY, prefix.rows.count);
            void *sum;
            check(dormouse_prefix_add_boundary(node, l, slot, it->tensors[SAVED_KEY + slot], elems * sizeof(double),
                                               elems, DORMOUSE_DTYPE_F64, NULL, &sum), "add_boundary");
            accumulators[l][slot] = sum;
        }
        const void *dormant[] = {it->tensors[SAVED_OWN]};
        check(dormouse_prefix_add_dormant(node, l, dormant, 1), "add_dormant");
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_FORWARD_END, l, NULL), "forward ends");
    }
    check(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_B, NULL), "phase B");
    complete(&op);
}

static prefix_keys keys_of(uint32_t l, double *key_gradient, double *value_gradient)
{
    double *const *t = prefix.saved[l].tensors;
    return (prefix_keys){prefix.rows.count, t[SAVED_KEY], t[SAVED_VALUE], key_gradient, value_gradient};
}

static void microbatch_forward(pass *it)
{
    for (uint32_t l = 0; l < STAGE_LAYERS; l++) {
        prefix_keys keys = keys_of(l, NULL, NULL);
        saved_take(runtime, &it->saved[l], it->rows.count);
        check(layer_forward(own(&weights, l), &it->rows, &keys, &it->saved[l]), "layer_forward");
    }
    if (stage == STAGES - 1) {
        loss += head_loss(&weights, &gradient, &it->rows);
    }
}

static void microbatch_backward(pass *it)
{
    dormouse_op_t op = begin(DORMOUSE_OP_MICROBATCH);
    size_t elems = prefix.rows.count * HIDDEN;
    for (uint32_t l = STAGE_LAYERS; l-- > 0;) {
        double *parts[2] = {zeros(elems, sizeof(double)), zeros(elems, sizeof(double))};
        prefix_keys keys = keys_of(l, parts[0], parts[1]);
        layer_backward(own(&weights, l), own(&gradient, l), &it->rows, &keys, NULL, &it->saved[l]);
        saved_give_all(runtime, &it->saved[l]);
        for (uint32_t slot = 0; slot < 2; slot++) {
            check(dormouse_prefix_accumulate(node, l, slot, parts[slot], elems, DORMOUSE_DTYPE_F64, NULL), "gK, gV");
            free(parts[slot]);
        }
    }
    complete(&op);
}

static void prefix_backward(void)
{
    dormouse_op_t op = begin(DORMOUSE_OP_PREFIX_BACKWARD);
    check(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_C, NULL), "phase C");
    if (stage == STAGES - 1) { /* no loss reads the prompt's last hidden states: it begins with gK and gV */
        memset(prefix.rows.hidden, 0, prefix.rows.count * HIDDEN * sizeof(double));
    }
    for (uint32_t l = STAGE_LAYERS; l-- > 0;) {
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_BEGIN, l, NULL), "backward begins");
        layer_backward(own(&weights, l), own(&gradient, l), &prefix.rows, NULL, accumulators[l], &prefix.saved[l]);
        saved_give(runtime, &prefix.saved[l], SAVED_OWN);
        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_END, l, NULL), "backward ends");
    }
    complete(&op);
}

static void run_op(const stage_op *op, pass *it, uint32_t failing)
{
    int is_forward = op->kind == PREFIX_FORWARD || op->kind == MICROBATCH_FORWARD;
    if (is_forward && stage == 0) {
        embed_forward(&weights, &it->rows);
    }
    switch (op->kind) {
    case PREFIX_FORWARD: prefix_forward(); break;
    case MICROBATCH_FORWARD:
        /* Not in a backward: the later stage may be done by then. */
        if (stage == failing && op->index == 1) {
            fail(EXIT_ASKED, "fails as asked");
        }
        microbatch_forward(it);
        break;
    case MICROBATCH_BACKWARD: microbatch_backward(it); break;
    case PREFIX_BACKWARD: prefix_backward(); break;
    }
    if (!is_forward && stage == 0) {
        embed_backward(&gradient, &it->rows);
    }
}

/*
 * Carries out a list, one step after another. The lists of all stages have one order of transfers, so they never
 * wait for each other in a circle, even if every send waits until it is received.
 */
static void carry_out(const stage_list *list, uint32_t failing)
{
    for (const stage_step *step = list->steps; step < list->steps + list->step_count; step++) {
        const stage_op *op = &list->ops[step->op];
        int is_prefix = op->kind == PREFIX_FORWARD || op->kind == PREFIX_BACKWARD;
        pass *it = is_prefix ? &prefix : &microbatches[op->index];
        if (step->kind == STEP_COMPUTE) {
            run_op(op, it, failing);
        } else {
            transfer(&it->rows, step->kind == STEP_SEND);
        }
    }
}

/* ---- The step ---- */

/* Reads the plan's ops: the shapes of all passes. Returns the number of microbatches. */
static uint32_t read_plan(void)
{
    uint32_t count = 0;
    dormouse_op_t op;
    plan = group_plan();
    for (op = next_op(); op.kind != DORMOUSE_OP_DONE; op = next_op()) {
        if (op.kind == DORMOUSE_OP_PREFIX_FORWARD) {
            prefix.rows = sequence_rows(0, op.token_end);
        } else if (op.kind == DORMOUSE_OP_MICROBATCH) {
            microbatches[count++].rows = microbatch_rows(&op);
        }
        complete(&op);
    }
    check(dormouse_plan_destroy(plan), "dormouse_plan_destroy");
    return count;
}

/* Compares the gradients of this stage with the dense run's. Returns the largest distance. */
static double compare_all(void)
{
    double most = 0;
    for (uint32_t l = 0; l < STAGE_LAYERS; l++) {
        most = fmax(most, compare("a layer", own(&gradient, l), own(&dense_gradient, l), sizeof(layer_weights)));
    }
    if (stage == 0) {
        most = fmax(most, compare("token", gradient.token, dense_gradient.token, sizeof gradient.token));
        most = fmax(most, compare("position", gradient.position, dense_gradient.position, sizeof gradient.position));
    }
    if (stage == STAGES - 1) {
        most = fmax(most, compare("head", gradient.head, dense_gradient.head, sizeof gradient.head));
    }
    return most;
}

static void check_memory(void)
{
    dormouse_prefix_report_t it;
    DORMOUSE_INIT(&it);
    check(dormouse_prefix_get_report(node, &it, NULL, 0, NULL), "dormouse_prefix_get_report");
    printf("stage %u: %" PRIu64 " KiB saved by phase A, %" PRIu64 " KiB asleep in phase B\n", stage,
           it.dormant_bytes >> 10, it.asleep_at_b_bytes >> 10);
    require(it.accepted_count == STAGE_LAYERS, "all saved tensors but K and V can sleep");
    require(it.stray_wakes == 0, "none is used before the mark that wakes it");
    require(it.asleep_at_b_bytes == it.dormant_bytes, "they all sleep in phase B");
    require(it.left_asleep_bytes == 0, "none stays asleep");
}

void stage_run(uint32_t number, int to_peer, const char *directory, uint32_t failing)
{
    stage = number;
    peer = to_peer;
    uint64_t rows_of[RESPONSES], planned_bytes = 0;
    struct timeval wait = {.tv_sec = PEER_WAIT_SECONDS};
    int buffer_bytes = SOCKET_BUFFER_BYTES;
    stage_list list;
    dormouse_options_t options;
    DORMOUSE_INIT(&options);
    options.nvme_dir = directory;
    options.nvme_file_bytes = UINT64_C(16) << 20;
    check(dormouse_runtime_create(&options, &runtime), "dormouse_runtime_create");
    setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
    setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
    setsockopt(peer, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
    setsockopt(peer, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);

    uint32_t count = read_plan();
    for (uint32_t m = 0; m < count; m++) {
        rows_of[m] = microbatches[m].rows.count;
    }
    uint64_t row_bytes = HIDDEN * sizeof(double);
    check(stage_list_plan(STAGES, stage, row_bytes, prefix.rows.count, rows_of, count, &list), "stage_list_plan");
    for (uint32_t i = 0; i < list.op_count; i++) {
        planned_bytes += list.ops[i].send_bytes;
    }

    weights_fill(&weights);
    plan = group_plan();
    check(dormouse_prefix_create(runtime, plan, 0, STAGE_LAYERS, &node), "dormouse_prefix_create");
    carry_out(&list, failing);
    check_memory();
    check(dormouse_prefix_destroy(node), "dormouse_prefix_destroy");
    check(dormouse_plan_destroy(plan), "dormouse_plan_destroy");
    for (uint32_t l = 0; l < STAGE_LAYERS; l++) {
        saved_give(runtime, &prefix.saved[l], SAVED_KEY);
        saved_give(runtime, &prefix.saved[l], SAVED_VALUE);
    }
    rows_destroy(&prefix.rows);
    for (uint32_t m = 0; m < count; m++) {
        rows_destroy(&microbatches[m].rows);
    }

    double dense_loss = dense_run(runtime, &weights, &dense_gradient), most = compare_all();
    check(dormouse_runtime_destroy(runtime), "dormouse_runtime_destroy");
    require(sent_bytes == planned_bytes, "bytes sent are those planned");
    require(stage < STAGES - 1 || fabs(loss - dense_loss) <= DISTANCE_MAX * fabs(dense_loss), "the losses are equal");
    printf("stage %u: sent %" PRIu64 " bytes as planned; gradients within %.1e of the dense run's\n", stage, sent_bytes,
           most);
}
