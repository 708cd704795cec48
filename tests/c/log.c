/* Log events: read from the queue, under memory pressure inside malloc, and in a forked child. */
#include "check.h"

#define DECLINED_BYTES 12345

static char text[1 << 16];

/* Prints all queued events. */
static int read_all(void)
{
    int count = 0;
    for (;;) {
        uint64_t bytes = 0;
        OK(dormouse_log_read(text, sizeof text, &bytes));
        EXPECT(bytes == strlen(text) + 1);
        if (bytes == 1) {
            return count;
        }
        for (const char *at = text; *at != 0; at++) {
            count += *at == '\n';
        }
        printf("%s", text);
    }
}

static void *churn(void *unused)
{
    (void)unused;
    for (int n = 0; n < 2000; n++) {
        size_t bytes = (size_t)4096 + (size_t)(n % 61) * 8191;
        char *block = malloc(bytes);
        EXPECT(block != NULL);
        memset(block, n, bytes);
        free(block);
    }
    return NULL;
}

int main(void)
{
    static char data[DECLINED_BYTES * 5];
    dormouse_options_t options;
    dormouse_runtime_t *runtime = NULL;
    uint64_t id = 0;
    uint64_t bytes = 0;
    pthread_t threads[4];

    /* The queue is empty before a runtime exists. A small buffer is refused. */
    OK(dormouse_log_read(text, sizeof text, &bytes));
    EXPECT(bytes == 1);
    RETURNS(dormouse_log_read(text, 100, &bytes), DORMOUSE_ERR_ARGUMENT, "4097");
    RETURNS(dormouse_log_read(NULL, 8192, &bytes), DORMOUSE_ERR_NULL, "buffer");
    RETURNS(dormouse_log_read(text, 8192, NULL), DORMOUSE_ERR_NULL, "count_out");

    DORMOUSE_INIT(&options);
    options.alloc_budget_bytes = (uint64_t)64 << 20;
    OK(dormouse_runtime_create(&options, &runtime));
    OK(dormouse_runtime_set_budget(runtime, DORMOUSE_TIER_HOST, 0));
    EXPECT(read_all() == 2); /* the banner and the budget, emitted after the first read */

    RETURNS(dormouse_stash_put(runtime, data, DECLINED_BYTES, 77, NULL, &id), DORMOUSE_DECLINED, "");
    EXPECT(read_all() >= 1);

    for (int at = 0; at < 4; at++) {
        EXPECT(pthread_create(&threads[at], NULL, churn, NULL) == 0);
    }
    for (int n = 0; n < 8; n++) {
        pid_t child = fork();
        if (child == 0) {
            /* Calls are refused, and malloc works: no event, no lock. */
            dormouse_status_t status = dormouse_stash_put(runtime, data, 54321, 1, NULL, &id);
            (void)churn(NULL);
            _exit(status == DORMOUSE_ERR_FORKED && failures == 0 ? 0 : 1);
        }
        int ended = -1;
        EXPECT(waitpid(child, &ended, 0) == child && ended == 0);
    }
    for (int at = 0; at < 4; at++) {
        EXPECT(pthread_join(threads[at], NULL) == 0);
    }
    (void)read_all();
    OK(dormouse_runtime_destroy(runtime));
    return done("log");
}
