/* Live figures: the file holds the statistics of the runtime, a forked child writes none, and the file
 * goes with the runtime. Arguments: a folder, and the path of the page. */
#include "check.h"

#include <signal.h>
#include <sys/stat.h>

#define BYTES ((size_t)3 << 20)
#define PAGE_WORDS 512
#define SEQUENCE 8
#define FIRST 9
#define FIRST_SETTING 371
#define SETTINGS 6
#define WAIT_MS_MAX 20000

static const char *path;
static uint64_t words[PAGE_WORDS];

static void read_page(void)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    EXPECT(file >= 0 && pread(file, words, sizeof words, 0) == (ssize_t)sizeof words);
    (void)close(file);
}

/* Waits for an update that began after this call: the second one from here. */
static void wait_for_update(void)
{
    read_page();
    uint64_t wanted = words[SEQUENCE] / 2 + 2;
    for (int ms = 0; words[SEQUENCE] / 2 < wanted && ms < WAIT_MS_MAX; ms += 10) {
        usleep(10000);
        read_page();
    }
    EXPECT(words[SEQUENCE] / 2 >= wanted);
}

static void same_as_statistics(dormouse_runtime_t *runtime)
{
    dormouse_stats_t stats;
    dormouse_info_t info;
    DORMOUSE_INIT(&stats);
    DORMOUSE_INIT(&info);
    wait_for_update();
    OK(dormouse_runtime_get_stats(runtime, 0, &stats));
    OK(dormouse_runtime_get_info(runtime, &info));
    const uint64_t budgets[] = {info.alloc_budget_bytes, info.host_budget_bytes, info.nvme_file_bytes};
    const uint64_t *at = &words[FIRST + 1];
    for (int tier = 0; tier < DORMOUSE_TIER_COUNT; tier++) {
        EXPECT(at[tier] == stats.tiers[tier].current_bytes);
        EXPECT(at[3 + tier] == stats.tiers[tier].peak_bytes);
        EXPECT(at[6 + tier] == budgets[tier]);
    }
    for (int direction = 0; direction < DORMOUSE_COPY_COUNT; direction++) {
        EXPECT(at[9 + direction] == stats.copies[direction].bytes);
    }
    EXPECT(at[15] == info.nvme_write_bytes_per_s && at[16] == info.nvme_read_bytes_per_s);
    EXPECT(at[17] == stats.asleep.current_bytes && at[18] == stats.cached.current_bytes);
    EXPECT(at[19] == stats.stall_ns && at[20] == stats.alloc_failures);
}

/* The settings that the runtime may choose are the parameters' values, and say who chose them. */
static void same_as_parameters(void)
{
    static const char *const names[SETTINGS] = {
        "DORMOUSE_HOST_BUDGET_BYTES",  "DORMOUSE_NVME_FILE_BYTES",        "DORMOUSE_NVME_QUEUE_DEPTH",
        "DORMOUSE_OFFLOAD_IO_THREADS", "DORMOUSE_OFFLOAD_INFLIGHT_BYTES", "DORMOUSE_OFFLOAD_WINDOW_LAYERS",
    };
    const uint64_t *values = &words[FIRST_SETTING];
    dormouse_param_t param;
    int found = 0, is_automatic = 0;
    DORMOUSE_INIT(&param);
    for (uint32_t index = 0; dormouse_param_get(index, &param) == DORMOUSE_OK; index++) {
        for (int at = 0; at < SETTINGS; at++) {
            if (strcmp(param.name, names[at]) == 0) {
                EXPECT(values[at] != 0 && values[at] == strtoull(param.value, NULL, 10));
                EXPECT((values[SETTINGS] >> at & 1) == (param.provenance == DORMOUSE_FROM_AUTOMATIC));
                is_automatic += param.provenance == DORMOUSE_FROM_AUTOMATIC;
                found++;
            }
        }
    }
    /* The size of the file is set. */
    EXPECT(found == SETTINGS && is_automatic == SETTINGS - 1);
}

/* The parent is stopped, so that an update would be the child's. */
static int child_of(pid_t parent, dormouse_runtime_t *runtime)
{
    dormouse_stats_t stats;
    DORMOUSE_INIT(&stats);
    alarm(30);
    EXPECT(kill(parent, SIGSTOP) == 0);
    usleep(20000);
    read_page();
    uint64_t before = words[SEQUENCE];
    RETURNS(dormouse_runtime_get_stats(runtime, 0, &stats), DORMOUSE_ERR_FORKED, "");
    RETURNS(dormouse_runtime_destroy(runtime), DORMOUSE_ERR_FORKED, "");
    free(malloc(BYTES));
    usleep(300000);
    read_page();
    EXPECT(words[SEQUENCE] == before);
    EXPECT(kill(parent, SIGCONT) == 0);
    return failures != 0;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        return 2;
    }
    path = argv[2];
    dormouse_runtime_t *runtime = runtime_in(argv[1], 16);
    dormouse_tag_t *tag = NULL;
    void *block = NULL;
    struct stat about;
    int ended = -1;

    EXPECT(stat(path, &about) == 0 && S_ISREG(about.st_mode) && about.st_size == 4096);
    EXPECT((about.st_mode & 0777) == 0600);
    same_as_statistics(runtime);
    same_as_parameters();
    EXPECT(memcmp(words, "dormouse", 8) == 0 && words[2] == (uint64_t)getpid());

    OK(dormouse_tag_create(runtime, "cache", 0, &tag));
    OK(dormouse_mem_alloc(runtime, BYTES, 0, NULL, &block));
    memset(block, 1, BYTES);
    OK(dormouse_tag_add(tag, block, BYTES));
    OK(dormouse_tag_sleep(tag, DORMOUSE_TIER_NVME, NULL));
    same_as_statistics(runtime);
    EXPECT(words[FIRST + 3] >= BYTES && words[FIRST + 18] >= BYTES); /* in the file, asleep */
    OK(dormouse_tag_wake(tag, NULL));
    OK(dormouse_runtime_set_budget(runtime, DORMOUSE_TIER_HOST, (uint64_t)5 << 20));
    same_as_statistics(runtime);
    EXPECT(words[FIRST + 8] == (uint64_t)5 << 20 && words[FIRST + 18] == 0);

    pid_t parent = getpid();
    pid_t child = fork();
    if (child == 0) {
        _exit(child_of(parent, runtime));
    }
    EXPECT(waitpid(child, &ended, 0) == child && ended == 0);
    wait_for_update(); /* the parent goes on */

    OK(dormouse_tag_destroy(tag));
    OK(dormouse_mem_free(runtime, block, NULL));
    OK(dormouse_runtime_destroy(runtime));
    EXPECT(stat(path, &about) != 0 && errno == ENOENT);
    return done("live");
}
