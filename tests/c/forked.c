/* Forks with the library loaded. In the child every call returns DORMOUSE_ERR_FORKED, frees of the
 * parent's blocks are no-ops and new requests work. The parent is unaffected. Runs with and without the
 * preload library. */
#include "check.h"

#include <malloc.h>

#define BYTES ((size_t)1 << 20)
#define FORKS 100
#define CHILD_SECONDS_MAX 30u

static int is_over;

static void *hammer(void *unused)
{
    (void)unused;
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        void *volatile block = malloc(BYTES); /* volatile: as below */
        free(block);
    }
    return NULL;
}

/* Forks while other threads are inside malloc. Their locks stay locked in the child, so its requests and
 * frees must not take a lock of the library. */
static void fork_under_load(void)
{
    pthread_t threads[2];
    for (int t = 0; t < 2; t++) {
        EXPECT(pthread_create(&threads[t], NULL, hammer, NULL) == 0);
    }
    for (int f = 0; f < FORKS; f++) {
        void *volatile block = malloc(BYTES); /* volatile: or the compiler removes the pair */
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            alarm(CHILD_SECONDS_MAX); /* ends a child that waits for a lock, which is a failure */
            free(block);
            block = malloc(BYTES);
            _exit(block == NULL);
        }
        EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status));
        free(block);
        if (failures != 0) {
            break; /* one failure is enough */
        }
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    for (int t = 0; t < 2; t++) {
        pthread_join(threads[t], NULL);
    }
}

int main(int argc, char **argv)
{
    dormouse_runtime_t *runtime = runtime_in(argc > 1 ? argv[1] : NULL, 16);
    unsigned char *block = (unsigned char *)malloc(BYTES);
    unsigned char *kept = (unsigned char *)malloc(BYTES);
    void *ours = NULL;
    int status = 0;
    pid_t child;

    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &ours));
    fill(block, BYTES, 3);
    fill(kept, BYTES, 4);
    fill((unsigned char *)ours, BYTES, 5);
    child = fork();
    if (child == 0) {
        dormouse_runtime_t *other = NULL;
        dormouse_info_t info;
        unsigned char *fresh;
        DORMOUSE_INIT(&info);
        RETURNS(dormouse_runtime_get_info(runtime, &info), DORMOUSE_ERR_FORKED, "forked");
        RETURNS(dormouse_runtime_create(NULL, &other), DORMOUSE_ERR_FORKED, "parent");
        RETURNS(dormouse_mem_free(runtime, ours, NULL), DORMOUSE_ERR_FORKED, "parent");
        EXPECT(is_filled(block, BYTES, 3)); /* memory is inherited as after any fork */
        fresh = (unsigned char *)malloc(BYTES);
        fill(fresh, BYTES, 9);
        EXPECT(is_filled(fresh, BYTES, 9));
        block = (unsigned char *)realloc(block, 2 * BYTES);
        EXPECT(block != NULL && is_filled(block, BYTES, 3));
        free(block);
        free(fresh);
        free(kept);
        _exit(failures == 0 ? 0 : 1);
    }
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT(is_filled(block, BYTES, 3) && is_filled(kept, BYTES, 4));
    free(block);
    free(kept);
    OK(dormouse_mem_free(runtime, ours, NULL));
    OK(dormouse_runtime_destroy(runtime));
    fork_under_load();
    return done("forked");
}
