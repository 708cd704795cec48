/* Under the preload library: large blocks of malloc are the library's, sleep at their addresses, and work
 * with free, realloc and the budget. */
#include "check.h"

#define BYTES ((size_t)2 << 20)

static int is_zero(const unsigned char *bytes, size_t count)
{
    for (size_t at = 0; at < count; at++) {
        if (bytes[at] != 0) {
            return 0;
        }
    }
    return 1;
}

int main(int argc, char **argv)
{
    dormouse_runtime_t *runtime = runtime_in(argc > 1 ? argv[1] : NULL, 16);
    unsigned char *block = (unsigned char *)malloc(BYTES);
    unsigned char *small = (unsigned char *)malloc(1000);
    dormouse_mem_info_t info;
    dormouse_tag_t *tag = NULL;
    unsigned char *grows;
    void *volatile nothing = NULL; /* compilers turn realloc of a constant null into malloc */
    void *none;

    DORMOUSE_INIT(&info);
    OK(dormouse_mem_query(runtime, block + 100, &info));
    EXPECT(info.base == block && info.bytes == BYTES && (uintptr_t)block % 4096 == 0);
    RETURNS(dormouse_mem_query(runtime, small, &info), DORMOUSE_ERR_NOT_OURS, "");
    free(small);
    grows = (unsigned char *)realloc(nothing, BYTES); /* a block that begins with realloc is libc's */
    fill(grows, BYTES, 2);
    RETURNS(dormouse_mem_query(runtime, grows, &info), DORMOUSE_ERR_NOT_OURS, "");
    grows = (unsigned char *)realloc(grows, 2 * BYTES);
    EXPECT(grows != NULL && is_filled(grows, BYTES, 2));
    free(grows);

    fill(block, BYTES, 1);
    OK(dormouse_tag_create(runtime, "heap", 0, &tag));
    OK(dormouse_tag_add(tag, block, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL));
    EXPECT(state_of(runtime, block) == DORMOUSE_STATE_NVME);
    block = (unsigned char *)realloc(block, 2 * BYTES); /* wakes it, then moves it to libc's heap */
    EXPECT(block != NULL && is_filled(block, BYTES, 1));
    RETURNS(dormouse_mem_query(runtime, block, &info), DORMOUSE_ERR_NOT_OURS, "");
    free(block);
    for (int round = 0; round < 3; round++) { /* reused memory is zeroed, also what is never touched */
        block = (unsigned char *)malloc(BYTES);
        fill(block, BYTES, 3);
        free(block);
        block = (unsigned char *)calloc(1, BYTES);
        EXPECT(block != NULL && block[0] == 0 && block[BYTES - 1] == 0 && is_zero(block, BYTES));
        free(block);
    }
    block = (unsigned char *)malloc(BYTES);
    fill(block, BYTES, 1);
    OK(dormouse_tag_add(tag, block, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL));
    free(block); /* asleep: its data is discarded */
    OK(dormouse_tag_destroy(tag));

    OK(dormouse_runtime_set_budget(runtime, DORMOUSE_TIER_DEVICE, 8 << 20));
    errno = 0;
    none = malloc((size_t)64 << 20);
    EXPECT(none == NULL && errno == ENOMEM);
    EXPECT(strstr(dormouse_get_last_error(), "67108864") != NULL || dormouse_get_last_error()[0] != '\0');
    block = (unsigned char *)malloc(BYTES); /* a request within the budget works */
    EXPECT(block != NULL);
    free(block);
    OK(dormouse_runtime_destroy(runtime));

    block = (unsigned char *)malloc(BYTES); /* the heap outlives the runtime */
    fill(block, BYTES, 5);
    EXPECT(is_filled(block, BYTES, 5));
    free(block);
    return done("heap");
}
