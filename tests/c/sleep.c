/* Tags and stashes: data wakes unchanged at the same addresses, from the file and from host memory, and can
 * be read there without waking. A free of a sleeping block discards it. A tier that is full or has no
 * write budget left declines and keeps the data awake. */
#include "check.h"

#define BYTES ((size_t)3 << 20)

static dormouse_runtime_t *runtime;

static void there_and_back(int32_t tier, int32_t state)
{
    dormouse_tag_t *tag = NULL;
    void *block = NULL, *other = NULL;
    static unsigned char copy[BYTES];
    OK(dormouse_tag_create(runtime, "cache", 0, &tag));
    OK(dormouse_tag_enter(tag));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block)); /* added by its allocation */
    OK(dormouse_tag_leave(tag));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &other)); /* added explicitly */
    OK(dormouse_tag_add(tag, other, BYTES));
    fill((unsigned char *)block, BYTES, 1);
    fill((unsigned char *)other, BYTES, 2);
    for (int round = 0; round < 3; round++) {
        OK(dormouse_tag_sleep(tag, tier, NULL));
        OK(dormouse_mem_read(runtime, other, BYTES, copy, NULL));
        EXPECT(is_filled(copy, BYTES, 2));
        EXPECT(state_of(runtime, block) == state && state_of(runtime, other) == state);
        OK(dormouse_tag_wake(tag, NULL));
        EXPECT(state_of(runtime, block) == DORMOUSE_STATE_AWAKE);
        EXPECT(is_filled((unsigned char *)block, BYTES, 1));
        EXPECT(is_filled((unsigned char *)other, BYTES, 2));
    }
    OK(dormouse_tag_sleep(tag, tier, NULL));
    OK(dormouse_mem_free(runtime, other, NULL)); /* asleep: its data is discarded */
    OK(dormouse_tag_destroy(tag));               /* wakes the rest */
    EXPECT(is_filled((unsigned char *)block, BYTES, 1));
    OK(dormouse_mem_free(runtime, block, NULL));
}

static void without_backup(void)
{
    dormouse_tag_t *tag = NULL;
    void *block = NULL;
    static const unsigned char zeros[4096];
    OK(dormouse_tag_create(runtime, "scratch", DORMOUSE_TAG_WITHOUT_BACKUP, &tag));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
    fill((unsigned char *)block, BYTES, 1);
    OK(dormouse_tag_add(tag, block, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL));
    EXPECT(state_of(runtime, block) == DORMOUSE_STATE_EMPTY);
    OK(dormouse_tag_wake(tag, NULL));
    for (size_t at = 0; at < BYTES; at += sizeof zeros) {
        EXPECT(memcmp((unsigned char *)block + at, zeros, sizeof zeros) == 0);
    }
    OK(dormouse_tag_destroy(tag));
    OK(dormouse_mem_free(runtime, block, NULL));
}

static void full(void)
{
    dormouse_tag_t *tag = NULL;
    void *blocks[8];
    int asleep = 0;
    OK(dormouse_tag_create(runtime, "too much", 0, &tag));
    for (unsigned b = 0; b < 8; b++) {
        OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &blocks[b]));
        fill((unsigned char *)blocks[b], BYTES, b);
        OK(dormouse_tag_add(tag, blocks[b], BYTES));
    }
    RETURNS(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL), DORMOUSE_PARTIAL, "stay awake");
    for (unsigned b = 0; b < 8; b++) {
        if (state_of(runtime, blocks[b]) == DORMOUSE_STATE_AWAKE) {
            EXPECT(is_filled((unsigned char *)blocks[b], BYTES, b));
        } else {
            asleep++;
        }
    }
    EXPECT(asleep > 0 && asleep < 8);
    OK(dormouse_tag_wake(tag, NULL));
    for (unsigned b = 0; b < 8; b++) {
        EXPECT(is_filled((unsigned char *)blocks[b], BYTES, b));
        OK(dormouse_mem_free(runtime, blocks[b], NULL));
    }
    OK(dormouse_tag_destroy(tag));
}

static void stashes(void)
{
    unsigned char *source = (unsigned char *)malloc(BYTES);
    unsigned char *back = (unsigned char *)calloc(1, BYTES);
    uint64_t id = 0, same = 0;
    fill(source, BYTES, 7);
    OK(dormouse_stash_put(runtime, source, BYTES, 42, NULL, &id));
    OK(dormouse_stash_put(runtime, source, BYTES, 42, NULL, &same));
    EXPECT(id != 0 && id == same);
    RETURNS(dormouse_stash_put(runtime, source, BYTES / 2, 42, NULL, &same), DORMOUSE_ERR_ARGUMENT, "");
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_BUSY, "stash id");
    fill(source, BYTES, 8);
    OK(dormouse_stash_get(runtime, id, back, NULL));
    EXPECT(is_filled(back, BYTES, 7));
    OK(dormouse_stash_drop(runtime, id));
    OK(dormouse_stash_get(runtime, id, back, NULL)); /* one put is left */
    OK(dormouse_stash_drop(runtime, id));
    RETURNS(dormouse_stash_get(runtime, id, back, NULL), DORMOUSE_ERR_STALE, "");
    RETURNS(dormouse_stash_drop(runtime, id), DORMOUSE_ERR_STALE, "");
    free(source);
    free(back);
}

static void figures(const char *dir)
{
    dormouse_stats_t stats;
    char path[4096];
    uint64_t freed = 0;
    DORMOUSE_INIT(&stats);
    OK(dormouse_runtime_get_stats(runtime, 0, &stats));
    EXPECT(stats.copies[DORMOUSE_COPY_NVME_WRITE].bytes >= BYTES);
    EXPECT(stats.copies[DORMOUSE_COPY_NVME_READ].bytes >= BYTES);
    EXPECT(stats.tiers[DORMOUSE_TIER_NVME].current_bytes == 0);
    EXPECT(stats.tiers[DORMOUSE_TIER_NVME].peak_bytes > 0);
    EXPECT(stats.asleep.current_bytes == 0 && stats.asleep.peak_bytes > 0);
    EXPECT(stats.declined > 0);
    EXPECT(stats.allocated.peak_bytes > stats.allocated.current_bytes);
    EXPECT(stats.allocated_interval_peak_bytes == stats.allocated.peak_bytes);
    OK(dormouse_runtime_get_stats(runtime, DORMOUSE_STATS_BEGIN_INTERVAL, NULL));
    OK(dormouse_runtime_get_stats(runtime, 0, &stats));
    EXPECT(stats.allocated_interval_peak_bytes < stats.allocated.peak_bytes);
    OK(dormouse_runtime_get_stats(runtime, DORMOUSE_STATS_RESET_PEAKS, &stats));
    EXPECT(stats.asleep.peak_bytes > 0);
    OK(dormouse_runtime_get_stats(runtime, DORMOUSE_STATS_RESET_PEAKS, NULL));
    OK(dormouse_runtime_trim(runtime, &freed));
    OK(dormouse_runtime_get_stats(runtime, 0, &stats));
    EXPECT(stats.asleep.peak_bytes == 0 && stats.cached.current_bytes == 0);
    snprintf(path, sizeof path, "%s/sleep.html", dir);
    OK(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_HTML, path));
    snprintf(path, sizeof path, "%s/sleep.pftrace", dir);
    OK(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_PFTRACE, path));
    snprintf(path, sizeof path, "%s/params.conf", dir);
    OK(dormouse_runtime_dump(NULL, DORMOUSE_FORMAT_CONFIG, path));
}

/* A write budget of 4 MiB a day: enough for one block. */
static void limited(const char *dir)
{
    dormouse_tag_t *tag = NULL;
    dormouse_stats_t stats;
    void *blocks[2];
    setenv("DORMOUSE_NVME_WRITE_BUDGET_BYTES", "4M", 1);
    runtime = runtime_in(dir, 16);
    unsetenv("DORMOUSE_NVME_WRITE_BUDGET_BYTES");
    OK(dormouse_tag_create(runtime, "worn", 0, &tag));
    for (unsigned b = 0; b < 2; b++) {
        OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &blocks[b]));
        fill((unsigned char *)blocks[b], BYTES, b);
        OK(dormouse_tag_add(tag, blocks[b], BYTES));
    }
    RETURNS(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL), DORMOUSE_PARTIAL, "4194304 bytes a day");
    EXPECT(state_of(runtime, blocks[0]) == DORMOUSE_STATE_NVME);
    EXPECT(state_of(runtime, blocks[1]) == DORMOUSE_STATE_AWAKE);
    /* The write budget is spent: the next sleep is declined. */
    OK(dormouse_tag_wake(tag, NULL));
    RETURNS(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL), DORMOUSE_DECLINED, "stay awake");
    EXPECT(state_of(runtime, blocks[0]) == DORMOUSE_STATE_AWAKE);
    DORMOUSE_INIT(&stats);
    OK(dormouse_runtime_get_stats(runtime, 0, &stats));
    EXPECT(stats.nvme_written_bytes == BYTES);
    EXPECT(stats.nvme_write_budget_bytes == (uint64_t)4 << 20);
    EXPECT(stats.nvme_write_left_bytes >= (uint64_t)1 << 20 && stats.nvme_write_left_bytes < BYTES);
    OK(dormouse_tag_destroy(tag));
    for (unsigned b = 0; b < 2; b++) {
        EXPECT(is_filled((unsigned char *)blocks[b], BYTES, b));
        OK(dormouse_mem_free(runtime, blocks[b], NULL));
    }
    OK(dormouse_runtime_destroy(runtime));
}

/* A runtime without a file: the tier is closed, with a reason. */
static void closed(void)
{
    dormouse_tag_t *tag = NULL;
    void *block = NULL;
    dormouse_info_t info;
    OK(dormouse_runtime_create(NULL, &runtime));
    DORMOUSE_INIT(&info);
    OK(dormouse_runtime_get_info(runtime, &info));
    EXPECT((info.tier_flags & DORMOUSE_TIER_FLAG_NVME) == 0 && (info.modes & DORMOUSE_MODE_LINKED) != 0);
    OK(dormouse_tag_create(runtime, "kept", 0, &tag));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
    fill((unsigned char *)block, BYTES, 1);
    OK(dormouse_tag_add(tag, block, BYTES));
    RETURNS(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL), DORMOUSE_ERR_TIER, "DORMOUSE_NVME_DIR");
    RETURNS(dormouse_runtime_set_budget(runtime, DORMOUSE_TIER_NVME, 1 << 20), DORMOUSE_ERR_TIER,
          "DORMOUSE_NVME_DIR");
    OK(dormouse_runtime_set_budget(runtime, DORMOUSE_TIER_HOST, 0));
    RETURNS(dormouse_tag_sleep(tag, DORMOUSE_TIER_HOST, NULL), DORMOUSE_ERR_TIER, "Host");
    EXPECT(state_of(runtime, block) == DORMOUSE_STATE_AWAKE && is_filled((unsigned char *)block, BYTES, 1));
    OK(dormouse_tag_destroy(tag));
    OK(dormouse_mem_free(runtime, block, NULL));
    OK(dormouse_runtime_destroy(runtime));
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "/var/tmp";
    runtime = runtime_in(dir, 16);
    there_and_back(DORMOUSE_TIER_NVME, DORMOUSE_STATE_NVME);
    there_and_back(DORMOUSE_TIER_HOST, DORMOUSE_STATE_HOST);
    without_backup();
    full();
    stashes();
    figures(dir);
    OK(dormouse_runtime_destroy(runtime));
    limited(dir);
    closed();
    return done("sleep");
}
