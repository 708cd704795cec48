/* Accesses sleeping memory. A system call with its address fails with EFAULT. A load and a store wake it; with
 * DORMOUSE_OFFLOAD_STRAY=stop the load ends the process with SIGSEGV and one message on standard error. */
#include "check.h"

#define BYTES ((size_t)1 << 20)

static unsigned char *asleep(dormouse_runtime_t *runtime, dormouse_tag_t *tag, unsigned seed)
{
    void *block = NULL;
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
    fill((unsigned char *)block, BYTES, seed);
    OK(dormouse_tag_add(tag, block, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL));
    EXPECT(state_of(runtime, block) == DORMOUSE_STATE_NVME);
    return (unsigned char *)block;
}

int main(int argc, char **argv)
{
    dormouse_runtime_t *runtime = runtime_in(argc > 1 ? argv[1] : NULL, 16);
    dormouse_tag_t *tag = NULL;
    dormouse_stats_t stats;
    unsigned char *first, *second;
    int sink[2];

    OK(dormouse_tag_create(runtime, "optimizer", 0, &tag));
    first = asleep(runtime, tag, 1);
    second = asleep(runtime, tag, 2);
    EXPECT(pipe(sink) == 0);
    EXPECT(write(sink[1], first, 16) == -1 && errno == EFAULT);
    if (done("before the touch") != 0) {
        return 1;
    }
    fflush(stdout);
    EXPECT(is_filled(first, BYTES, 1)); /* the end, with `stop` */
    ((volatile unsigned char *)second)[12345] = 2 + (unsigned char)(12345 * 7 + (12345 >> 12));
    EXPECT(is_filled(second, BYTES, 2));
    EXPECT(state_of(runtime, first) == DORMOUSE_STATE_AWAKE);
    DORMOUSE_INIT(&stats);
    OK(dormouse_runtime_get_stats(runtime, 0, &stats));
    EXPECT(stats.stray_wakes == 2);

    /* A second runtime serves stray accesses as the first did. */
    OK(dormouse_tag_destroy(tag));
    OK(dormouse_runtime_destroy(runtime));
    runtime = runtime_in(argc > 1 ? argv[1] : NULL, 16);
    OK(dormouse_tag_create(runtime, "optimizer", 0, &tag));
    EXPECT(is_filled(asleep(runtime, tag, 3), BYTES, 3));
    OK(dormouse_tag_destroy(tag));
    OK(dormouse_runtime_destroy(runtime));
    return done("touch");
}
