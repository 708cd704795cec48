/* One thread cannot be started, the one of the number in the second argument. What needed it starts with the next runtime. */
#include "check.h"

#include <dlfcn.h>

#define MIB ((uint64_t)1 << 20)
#define BLOCKS 100

static int refused = -1;
static int asked;

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                   void *argument)
{
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    if (__atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED) == refused) {
        return EAGAIN;
    }
    return next(thread, attributes, body, argument);
}

int main(int argc, char **argv)
{
    dormouse_runtime_t *runtime = NULL;
    void *block = NULL;

    EXPECT(argc > 2);
    refused = atoi(argv[2]);
    dormouse_status_t status = dormouse_runtime_create(NULL, &runtime);
    EXPECT(status == DORMOUSE_OK || status == DORMOUSE_ERR_LIMIT);
    if (status == DORMOUSE_OK) {
        OK(dormouse_runtime_destroy(runtime));
    }
    refused = -1;
    OK(dormouse_runtime_create(NULL, &runtime));
    for (int at = 0; at < BLOCKS; at++) {
        OK(dormouse_mem_alloc(runtime, MIB, 0, NULL, &block));
        OK(dormouse_mem_free(runtime, block, NULL));
    }
    OK(dormouse_runtime_destroy(runtime));
    return done("no_thread");
}
