/* Requests the planner's lists as JSON and reads the answer (stage_list.h). */
#include "stage_list.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Just enough JSON for text that the library wrote ---- */

static const char *blanks(const char *at)
{
    return at + strspn(at, " \n");
}

/* Returns what comes after a value, blanks skipped. The answers have no escapes in strings. */
static const char *after(const char *at)
{
    int depth = 0;
    do {
        depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        if (*at == '"') {
            at += 1 + strcspn(at + 1, "\"") + 1;
        } else if (strchr("{[]},: \n", *at) != NULL) {
            at++;
        } else {
            at += strcspn(at, ",]} \n"); /* a number or a word */
        }
    } while (depth > 0);
    return blanks(at);
}

/* Returns the first element of an array or member of an object, or the one after `at`; NULL at the end. */
static const char *first(const char *at)
{
    at = blanks(at + 1);
    return *at == ']' || *at == '}' ? NULL : at;
}

static const char *next(const char *at)
{
    at = after(at);
    return *at == ',' ? blanks(at + 1) : NULL;
}

/* Returns the value of a member. The library's answers have every member that docs/queries names. */
static const char *member(const char *object, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = first(object); at != NULL;) {
        int is_it = strncmp(at + 1, name, length) == 0 && at[1 + length] == '"';
        at = blanks(after(at) + 1); /* past the name and the colon */
        if (is_it) {
            return at;
        }
        at = next(at);
    }
    fprintf(stderr, "no member \"%s\" in the planner's answer\n", name);
    abort();
}

/* Returns the index of a string in `words`, which end with NULL. */
static int word(const char *at, const char *const *words)
{
    for (int index = 0; words[index] != NULL; index++) {
        if (strncmp(at + 1, words[index], strlen(words[index])) == 0) {
            return index;
        }
    }
    fprintf(stderr, "unknown word in the planner's answer: %.32s\n", at);
    abort();
}

/* ---- The list ---- */

static dormouse_status_t read_list(const char *stage, stage_list *list)
{
    static const char *const ops[] = {"prefix_forward", "microbatch_forward", "microbatch_backward", "prefix_backward",
                                      NULL};
    static const char *const steps[] = {"compute", "send", "receive", NULL};
    list->op_count = list->step_count = 0;
    for (const char *at = first(member(stage, "ops")); at != NULL; at = next(at)) {
        if (list->op_count == STAGE_OPS_MAX) {
            return DORMOUSE_ERR_LIMIT;
        }
        stage_op *op = &list->ops[list->op_count++];
        const char *sends = member(at, "sends");
        op->kind = (stage_op_kind)word(member(at, "kind"), ops);
        op->index = (uint32_t)strtoul(member(at, "index"), NULL, 10);
        op->send_bytes = *sends == '{' ? strtoull(member(sends, "bytes"), NULL, 10) : 0;
    }
    for (const char *at = first(member(stage, "steps")); at != NULL; at = next(at)) {
        if (list->step_count == STAGE_STEPS_MAX) {
            return DORMOUSE_ERR_LIMIT;
        }
        stage_step *step = &list->steps[list->step_count++];
        step->kind = (stage_step_kind)word(member(at, "kind"), steps);
        step->op = (uint32_t)strtoul(member(at, "op"), NULL, 10);
    }
    return DORMOUSE_OK;
}

dormouse_status_t stage_list_plan(uint32_t stages, uint32_t stage, uint64_t row_bytes, uint64_t prefix_rows,
                                  const uint64_t *microbatch_rows, uint32_t microbatches, stage_list *list_out)
{
    static char request[4096], answer[1 << 16];
    uint64_t bytes = 0;
    FILE *text = fmemopen(request, sizeof request, "w");
    if (text == NULL) {
        return DORMOUSE_ERR_OUT_OF_MEMORY;
    }
    fprintf(text, "{\"version\": 1, \"query\": \"pipeline\", \"pipeline\": {\"stages\": %" PRIu32, stages);
    fprintf(text, ", \"virtual_stages\": 1, \"chunks\": 1, \"row_bytes\": {\"activation\": %" PRIu64, row_bytes);
    fprintf(text, "}, \"groups\": [{\"prefix_rows\": %" PRIu64, prefix_rows);
    /* Costs in rows: a backward takes about twice as long as a forward. */
    fprintf(text, ", \"forward\": {\"linear_ns\": %" PRIu64 "}", prefix_rows);
    fprintf(text, ", \"backward\": {\"linear_ns\": %" PRIu64 "}, \"microbatches\": [", 2 * prefix_rows);
    for (uint32_t m = 0; m < microbatches; m++) {
        uint64_t rows = microbatch_rows[m];
        fprintf(text, "%s{\"rows\": %" PRIu64 ", \"forward_ns\": %" PRIu64, m > 0 ? "," : "", rows, rows);
        fprintf(text, ", \"backward_ns\": %" PRIu64 "}", 2 * rows);
    }
    fputs("]}]}}", text);
    if (fclose(text) != 0) {
        return DORMOUSE_ERR_LIMIT;
    }
    dormouse_status_t status = dormouse_schedule_query(request, answer, sizeof answer, &bytes);
    if (status != DORMOUSE_OK) {
        return status;
    }
    const char *at = first(member(member(answer, "answer"), "stages"));
    for (uint32_t s = 0; s < stage; s++) {
        at = next(at);
    }
    return read_list(at, list_out);
}
