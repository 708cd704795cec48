/* A small causal transformer, forward and backward (model.h). */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void *zeros(size_t count, size_t bytes)
{
    void *memory = calloc(count, bytes);
    if (memory == NULL) {
        fprintf(stderr, "no memory for %zu elements\n", count);
        abort();
    }
    return memory;
}

size_t saved_elems(int which, size_t row_count)
{
    return row_count * (which == SAVED_LSE ? HEADS : which == SAVED_WIDE ? WIDE : HIDDEN);
}

void weights_fill(model_weights *weights)
{
    double *all = (double *)weights;
    uint64_t state = 1;
    for (size_t i = 0; i < sizeof *weights / sizeof *all; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        double uniform = (double)(state >> 11) / (double)(UINT64_C(1) << 52) - 1;
        int is_matrix = i >= offsetof(model_weights, layers) / sizeof *all;
        all[i] = is_matrix ? uniform * sqrt(3.0 / HIDDEN) : uniform;
    }
}

/* out += x w */
static void multiply(size_t count, size_t inputs, size_t outputs, const double *x, const double *w, double *out)
{
    for (size_t r = 0; r < count; r++) {
        for (size_t i = 0; i < inputs; i++) {
            for (size_t o = 0; o < outputs; o++) {
                out[r * outputs + o] += x[r * inputs + i] * w[i * outputs + o];
            }
        }
    }
}

/* dx += d w^T, dw += x^T d */
static void multiply_backward(size_t count, size_t inputs, size_t outputs, const double *x, const double *w,
                              const double *d, double *dx, double *dw)
{
    for (size_t r = 0; r < count; r++) {
        for (size_t i = 0; i < inputs; i++) {
            for (size_t o = 0; o < outputs; o++) {
                dx[r * inputs + i] += d[r * outputs + o] * w[i * outputs + o];
                dw[i * outputs + o] += d[r * outputs + o] * x[r * inputs + i];
            }
        }
    }
}

static double dot(const double *a, const double *b)
{
    double sum = 0;
    for (size_t i = 0; i < HEAD_DIM; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* The keys [begin, end) of row r: all of the prefix, or its own sequence up to itself. */
static size_t begin_of(const rows *it, const prefix_keys *prefix, size_t r)
{
    return prefix != NULL ? 0 : it->each[r].first;
}

static size_t end_of(const prefix_keys *prefix, size_t r)
{
    return prefix != NULL ? prefix->rows : r + 1;
}

/* Attention over one set of keys, and the log-sum-exp of each row's scores. */
static void attend(const rows *it, const prefix_keys *prefix, const double *q, const double *k, const double *v,
                   double *out, double *lse)
{
    for (size_t at = 0; at < it->count * HEADS; at++) {
        size_t r = at / HEADS, head = at % HEADS * HEAD_DIM, end = end_of(prefix, r);
        const double *query = q + r * HIDDEN + head;
        double most = -INFINITY, sum = 0;
        for (size_t j = begin_of(it, prefix, r); j < end; j++) {
            most = fmax(most, dot(query, k + j * HIDDEN + head) / sqrt(HEAD_DIM));
        }
        for (size_t j = begin_of(it, prefix, r); j < end; j++) {
            double weight = exp(dot(query, k + j * HIDDEN + head) / sqrt(HEAD_DIM) - most);
            sum += weight;
            for (size_t i = 0; i < HEAD_DIM; i++) {
                out[r * HIDDEN + head + i] += weight * v[j * HIDDEN + head + i];
            }
        }
        for (size_t i = 0; i < HEAD_DIM; i++) {
            out[r * HIDDEN + head + i] /= sum;
        }
        lse[at] = most + log(sum);
    }
}

/*
 * The backward over one set of keys. With `out` and `lse` of all keys of a row, exp(score - lse) is
 * a key's weight in the whole attention, so the gradients of each set are exact and sums of both are
 * those of one attention over prefix and suffix.
 */
static void attend_backward(const rows *it, const prefix_keys *prefix, const double *q, const double *k,
                            const double *v, const double *out, const double *lse, const double *d_out, double *dq,
                            double *dk, double *dv)
{
    for (size_t at = 0; at < it->count * HEADS; at++) {
        size_t r = at / HEADS, head = at % HEADS * HEAD_DIM, row = r * HIDDEN + head;
        double mean = dot(d_out + row, out + row);
        for (size_t j = begin_of(it, prefix, r); j < end_of(prefix, r); j++) {
            size_t key = j * HIDDEN + head;
            double weight = exp(dot(q + row, k + key) / sqrt(HEAD_DIM) - lse[at]);
            double d_score = weight * (dot(d_out + row, v + key) - mean) / sqrt(HEAD_DIM);
            for (size_t i = 0; i < HEAD_DIM; i++) {
                dq[row + i] += d_score * k[key + i];
                dk[key + i] += d_score * q[row + i];
                dv[key + i] += weight * d_out[row + i];
            }
        }
    }
}

/*
 * Attention of a microbatch, without a copy of the prefix for each suffix (docs/method.md §3): all
 * rows over the prefix, without a mask; each suffix over itself, causally; then both are merged by
 * their log-sum-exps, which gives the softmax over all keys exactly.
 */
static dormouse_status_t attend_both(const rows *it, const prefix_keys *prefix, double *const *t)
{
    size_t elems = it->count * HIDDEN, heads = it->count * HEADS;
    double *parts = zeros(2 * (elems + heads), sizeof *parts);
    double *of_prefix = parts, *of_own = parts + elems;
    double *prefix_lse = of_own + elems, *own_lse = prefix_lse + heads;
    attend(it, prefix, t[SAVED_QUERY], prefix->key, prefix->value, of_prefix, prefix_lse);
    attend(it, NULL, t[SAVED_QUERY], t[SAVED_KEY], t[SAVED_VALUE], of_own, own_lse);
    dormouse_merge_args_t args;
    DORMOUSE_INIT(&args);
    args.out1 = of_prefix;
    args.lse1 = prefix_lse;
    args.out2 = of_own;
    args.lse2 = own_lse;
    args.out = t[SAVED_OUT];
    args.lse = t[SAVED_LSE];
    args.rows = heads;
    args.head_dim = HEAD_DIM;
    args.dtype = DORMOUSE_DTYPE_F64;
    dormouse_status_t status = dormouse_kernel_merge_lse(&args, NULL);
    free(parts);
    return status;
}

void embed_forward(const model_weights *weights, rows *it)
{
    for (size_t at = 0; at < it->count * HIDDEN; at++) {
        size_t r = at / HIDDEN, i = at % HIDDEN;
        const row *each = &it->each[r];
        it->hidden[at] = weights->token[each->token * HIDDEN + i] + weights->position[each->position * HIDDEN + i];
    }
}

void embed_backward(model_weights *gradient, const rows *it)
{
    for (size_t at = 0; at < it->count * HIDDEN; at++) {
        size_t r = at / HIDDEN, i = at % HIDDEN;
        gradient->token[it->each[r].token * HIDDEN + i] += it->hidden[at];
        gradient->position[it->each[r].position * HIDDEN + i] += it->hidden[at];
    }
}

dormouse_status_t layer_forward(const layer_weights *weights, rows *it, const prefix_keys *prefix, saved *to)
{
    size_t n = it->count;
    double *const *t = to->tensors, *x = it->hidden;
    for (int which = 0; which < SAVED_COUNT; which++) {
        memset(t[which], 0, saved_elems(which, n) * sizeof(double));
    }
    memcpy(t[SAVED_INPUT], x, n * HIDDEN * sizeof *x);
    multiply(n, HIDDEN, HIDDEN, x, weights->query, t[SAVED_QUERY]);
    multiply(n, HIDDEN, HIDDEN, x, weights->key, t[SAVED_KEY]);
    multiply(n, HIDDEN, HIDDEN, x, weights->value, t[SAVED_VALUE]);
    if (prefix == NULL) {
        attend(it, NULL, t[SAVED_QUERY], t[SAVED_KEY], t[SAVED_VALUE], t[SAVED_OUT], t[SAVED_LSE]);
    } else {
        dormouse_status_t status = attend_both(it, prefix, t);
        if (status != DORMOUSE_OK) {
            return status;
        }
    }
    multiply(n, HIDDEN, HIDDEN, t[SAVED_OUT], weights->output, x);
    memcpy(t[SAVED_MIDDLE], x, n * HIDDEN * sizeof *x);
    multiply(n, HIDDEN, WIDE, x, weights->up, t[SAVED_WIDE]);
    for (size_t at = 0; at < n * WIDE; at++) {
        t[SAVED_WIDE][at] = tanh(t[SAVED_WIDE][at]);
    }
    multiply(n, WIDE, HIDDEN, t[SAVED_WIDE], weights->down, x);
    return DORMOUSE_OK;
}

void layer_backward(const layer_weights *weights, layer_weights *gradient, rows *it, const prefix_keys *prefix,
                    double *const seeds[2], const saved *from)
{
    size_t n = it->count, elems = n * HIDDEN;
    double *const *t = from->tensors, *d = it->hidden;
    double *d_wide = zeros(n * WIDE, sizeof *d_wide), *d_up = zeros(elems, sizeof *d_up);
    multiply_backward(n, WIDE, HIDDEN, t[SAVED_WIDE], weights->down, d, d_wide, gradient->down);
    for (size_t at = 0; at < n * WIDE; at++) {
        d_wide[at] *= 1 - t[SAVED_WIDE][at] * t[SAVED_WIDE][at];
    }
    multiply_backward(n, HIDDEN, WIDE, t[SAVED_MIDDLE], weights->up, d_wide, d, gradient->up);

    double *d_out = zeros(4 * elems, sizeof *d_out), *dq = d_out + elems, *dk = dq + elems, *dv = dk + elems;
    multiply_backward(n, HIDDEN, HIDDEN, t[SAVED_OUT], weights->output, d, d_out, gradient->output);
    if (seeds != NULL) {
        memcpy(dk, seeds[0], elems * sizeof *dk);
        memcpy(dv, seeds[1], elems * sizeof *dv);
    }
    attend_backward(it, NULL, t[SAVED_QUERY], t[SAVED_KEY], t[SAVED_VALUE], t[SAVED_OUT], t[SAVED_LSE], d_out, dq, dk,
                    dv);
    if (prefix != NULL) {
        attend_backward(it, prefix, t[SAVED_QUERY], prefix->key, prefix->value, t[SAVED_OUT], t[SAVED_LSE], d_out, dq,
                        prefix->key_gradient, prefix->value_gradient);
    }
    multiply_backward(n, HIDDEN, HIDDEN, t[SAVED_INPUT], weights->query, dq, d, gradient->query);
    multiply_backward(n, HIDDEN, HIDDEN, t[SAVED_INPUT], weights->key, dk, d, gradient->key);
    multiply_backward(n, HIDDEN, HIDDEN, t[SAVED_INPUT], weights->value, dv, d, gradient->value);
    free(d_wide);
    free(d_up);
    free(d_out);
}

double head_loss(const model_weights *weights, model_weights *gradient, rows *it)
{
    double *logits = zeros(it->count * VOCAB, sizeof *logits), *d = zeros(it->count * HIDDEN, sizeof *d), loss = 0;
    multiply(it->count, HIDDEN, VOCAB, it->hidden, weights->head, logits);
    for (size_t r = 0; r < it->count; r++) {
        double *row = logits + r * VOCAB, sum = 0;
        for (size_t o = 0; o < VOCAB; o++) {
            sum += exp(row[o]);
        }
        loss += it->each[r].weight * (log(sum) - row[it->each[r].label]);
        for (size_t o = 0; o < VOCAB; o++) {
            row[o] = it->each[r].weight * (exp(row[o]) / sum - ((int)o == it->each[r].label));
        }
    }
    multiply_backward(it->count, HIDDEN, VOCAB, it->hidden, weights->head, logits, d, gradient->head);
    memcpy(it->hidden, d, it->count * HIDDEN * sizeof *d);
    free(logits);
    free(d);
    return loss;
}
