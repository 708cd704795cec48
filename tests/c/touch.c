/* Accesses sleeping memory: a system call with its address fails with EFAULT; a load ends the process
 * with SIGSEGV and one message on standard error. */
#include "check.h"

#define BYTES ((size_t)1 << 20)

int main(int argc, char **argv)
{
    dormouse_runtime_t *runtime = runtime_in(argc > 1 ? argv[1] : NULL, 16);
    dormouse_tag_t *tag = NULL;
    void *block = NULL;
    int sink[2];

    OK(dormouse_tag_create(runtime, "optimizer", 0, &tag));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
    fill((unsigned char *)block, BYTES, 1);
    OK(dormouse_tag_add(tag, block, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL));
    EXPECT(state_of(runtime, block) == DORMOUSE_STATE_NVME);
    EXPECT(pipe(sink) == 0);
    EXPECT(write(sink[1], block, 16) == -1 && errno == EFAULT);
    if (done("before the touch") != 0) {
        return 1;
    }
    fflush(stdout);
    return ((volatile unsigned char *)block)[12345]; /* never returns */
}
