/*
 * A small causal transformer in FP64, forward and backward in plain loops:
 *
 *   x = token[t] + position[p]
 *   x = x + attention(x Wq, x Wk, x Wv) Wo,   x = x + tanh(x Wup) Wdown     in each layer
 *   logits = x Whead,   loss = sum of weight * cross entropy
 *
 * Matrices are row-major, [inputs][outputs]. Gradients have the struct of their weights and are
 * added to.
 */
#ifndef MODEL_H
#define MODEL_H

#include <dormouse.h>

#include <stddef.h>

enum { LAYERS = 4, HIDDEN = 32, HEADS = 2, HEAD_DIM = HIDDEN / HEADS, WIDE = 64, VOCAB = 40, POSITIONS = 96 };

typedef struct layer_weights {
    double query[HIDDEN * HIDDEN], key[HIDDEN * HIDDEN], value[HIDDEN * HIDDEN];
    double output[HIDDEN * HIDDEN], up[HIDDEN * WIDE], down[WIDE * HIDDEN];
} layer_weights;

typedef struct model_weights {
    double token[VOCAB * HIDDEN], position[POSITIONS * HIDDEN];
    layer_weights layers[LAYERS];
    double head[HIDDEN * VOCAB];
} model_weights;

typedef struct row {
    int token, label;
    double weight;   /* in the loss; 0: not scored */
    size_t position; /* in its sequence, as in the dense run */
    size_t first;    /* it attends to the rows from this one to itself */
} row;

/* The rows of one pass: a prefix, a microbatch of packed suffixes, or a whole sequence. */
typedef struct rows {
    size_t count;
    row *each;
    double *hidden; /* forward: hidden states; backward: their gradient */
} rows;

/* What a layer saves for its backward. All but K and V are read by nothing else. */
enum { SAVED_INPUT, SAVED_QUERY, SAVED_OUT, SAVED_LSE, SAVED_MIDDLE, SAVED_WIDE, SAVED_KEY, SAVED_VALUE, SAVED_COUNT };
enum { SAVED_OWN = SAVED_INPUT }; /* the first of those before SAVED_KEY, which lie in one block */

typedef struct saved {
    double *tensors[SAVED_COUNT];
} saved;

/* K and V of a prefix, which every row of a microbatch attends to, and their gradients. */
typedef struct prefix_keys {
    size_t rows;
    const double *key, *value;
    double *key_gradient, *value_gradient; /* backward only */
} prefix_keys;

/* Allocates zeroed memory, to be freed. Ends the process if memory is exhausted. */
void *zeros(size_t count, size_t bytes);

/* Number of elements of a saved tensor. */
size_t saved_elems(int which, size_t row_count);

/* Fills weights with fixed pseudo-random values. */
void weights_fill(model_weights *weights);

void embed_forward(const model_weights *weights, rows *it);
void embed_backward(model_weights *gradient, const rows *it);

/* `prefix`: NULL if rows attend to their own sequence only. Returns the status of the merge. */
dormouse_status_t layer_forward(const layer_weights *weights, rows *it, const prefix_keys *prefix, saved *to);

/* `seeds`: gradients of K and V by other passes, or NULL. */
void layer_backward(const layer_weights *weights, layer_weights *gradient, rows *it, const prefix_keys *prefix,
                    double *const seeds[2], const saved *from);

/* Forward and backward of the head: hidden states become their gradient. Returns the loss. */
double head_loss(const model_weights *weights, model_weights *gradient, rows *it);

#endif
