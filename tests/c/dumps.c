/* Dumps without code: the caller sets DORMOUSE_DUMP and looks at the files. The second argument says what happens. */
#include "check.h"

#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#define MIB ((uint64_t)1 << 20)
#define PATH_BYTES 4097

static const char *directory;
static volatile sig_atomic_t own_signals;

static void own_handler(int number)
{
    (void)number;
    own_signals++;
}

/* Counts the files whose names contain `piece`. */
static int files(const char *piece)
{
    int count = 0;
    DIR *open = opendir(directory);
    EXPECT(open != NULL);
    for (struct dirent *at; open != NULL && (at = readdir(open)) != NULL;) {
        count += strstr(at->d_name, piece) != NULL;
    }
    if (open != NULL) {
        closedir(open);
    }
    return count;
}

/* Waits up to 20 s for `count` files. */
static void wait_for(const char *piece, int count)
{
    for (int turn = 0; turn < 2000 && files(piece) < count; turn++) {
        usleep(10000);
    }
    EXPECT(files(piece) == count);
}

static void touch_file(const char *name)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_CREAT | O_WRONLY, 0644);
    EXPECT(fd >= 0 && close(fd) == 0);
}

/* Runs out in a layer's window, inside a tag. */
static void exhaust(dormouse_runtime_t *runtime, int times)
{
    dormouse_tag_t *tag = NULL;
    dormouse_prefix_t *prefix = NULL;
    void *held = NULL;
    void *more = NULL;
    OK(dormouse_tag_create(runtime, "optimizer", 0, &tag));
    OK(dormouse_tag_enter(tag));
    OK(dormouse_mem_alloc(runtime, 40 * MIB, 0, NULL, &held));
    OK(dormouse_prefix_create(runtime, NULL, 7, 3, &prefix));
    OK(dormouse_prefix_enter_phase(prefix, DORMOUSE_PHASE_A, NULL));
    OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_BEGIN, 0, NULL));
    for (int at = 0; at < times; at++) {
        RETURNS(dormouse_mem_alloc(runtime, 100 * MIB, 0, NULL, &more), DORMOUSE_ERR_OUT_OF_MEMORY,
                "requested");
        printf("%s\n----\n", dormouse_get_last_error());
    }
    OK(dormouse_prefix_mark_edge(prefix, DORMOUSE_EDGE_FORWARD_END, 0, NULL));
    OK(dormouse_tag_leave(tag));
    OK(dormouse_prefix_destroy(prefix));
    OK(dormouse_mem_free(runtime, held, NULL));
    OK(dormouse_tag_destroy(tag));
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void *send_signals(void *unused)
{
    (void)unused;
    for (double end = now_s() + 2; now_s() < end;) {
        EXPECT(kill(getpid(), SIGUSR1) == 0);
        usleep(100);
    }
    return NULL;
}

static void storm(void)
{
    pthread_t threads[4];
    double began_s = now_s();
    for (int at = 0; at < 4; at++) {
        EXPECT(pthread_create(&threads[at], NULL, send_signals, NULL) == 0);
    }
    for (int at = 0; at < 4; at++) {
        EXPECT(pthread_join(threads[at], NULL) == 0);
    }
    usleep(1500000); /* the last signals are served a second after a dump */
    int dumps = files("-signal-");
    /* The first at once, then at most one a second. */
    EXPECT(dumps >= 2 && dumps <= 1 + (int)(now_s() - began_s));
}

/* The child ends by the signal, and its exit writes nothing. */
static void fork_twice(void)
{
    int ended = 0;
    pid_t child = fork();
    if (child == 0) {
        exit(0);
    }
    EXPECT(waitpid(child, &ended, 0) == child && WIFEXITED(ended));
    child = fork();
    if (child == 0) {
        raise(SIGUSR1);
        _exit(0);
    }
    EXPECT(waitpid(child, &ended, 0) == child && WIFSIGNALED(ended) && WTERMSIG(ended) == SIGUSR1);
    usleep(200000);
    EXPECT(files(".html") == 0);
}

static void calls(dormouse_runtime_t *runtime)
{
    static char path[PATH_BYTES];
    uint64_t bytes = 0;
    struct stat about;
    OK(dormouse_runtime_write_dump(runtime, path, sizeof path, &bytes));
    EXPECT(bytes == strlen(path) + 1 && stat(path, &about) == 0 && about.st_size > 1000);
    EXPECT(strstr(path, "-0-call-host.html") != NULL && path[0] == '/');
    OK(dormouse_runtime_write_dump(runtime, path, sizeof path, &bytes));
    char *number = strstr(path, "-1-call-host.html");
    EXPECT(number != NULL);
    if (number != NULL) {
        /* Of another process with the same host, rank and id. */
        number[1] = '2';
        touch_file(strrchr(path, '/') + 1);
        OK(dormouse_runtime_write_dump(runtime, path, sizeof path, &bytes));
        EXPECT(strstr(path, "-3-call-host.html") != NULL && unlink(path) == 0);
        number[1] = '2';
        EXPECT(stat(path, &about) == 0 && about.st_size == 0 && unlink(path) == 0);
    }
    RETURNS(dormouse_runtime_write_dump(runtime, path, sizeof path - 1, &bytes),
            DORMOUSE_ERR_ARGUMENT, "at least 4097");
    RETURNS(dormouse_runtime_write_dump(runtime, NULL, sizeof path, &bytes), DORMOUSE_ERR_NULL,
            "buffer");
    RETURNS(dormouse_runtime_write_dump(runtime, path, sizeof path, NULL), DORMOUSE_ERR_NULL,
            "count_out");
    RETURNS(dormouse_runtime_write_dump(NULL, path, sizeof path, &bytes), DORMOUSE_ERR_NULL,
            "runtime");
}

/* Files may have 4 KiB: a page does not fit. */
static void limited(dormouse_runtime_t *runtime)
{
    static char path[PATH_BYTES];
    uint64_t bytes = 0;
    struct rlimit limit = {4096, 4096};
    EXPECT(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    RETURNS(dormouse_runtime_write_dump(runtime, path, sizeof path, &bytes), DORMOUSE_ERR_IO,
            "File too large");
    exhaust(runtime, 2);
    EXPECT(raise(SIGUSR1) == 0);
    usleep(300000);
    EXPECT(files("dormouse") == 0);
}

/* The process may have little more address space than it uses. */
static void poor(dormouse_runtime_t *runtime)
{
    static char path[PATH_BYTES];
    static char line[256];
    uint64_t bytes = 0;
    uint64_t used_kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    EXPECT(status != NULL);
    while (status != NULL && fgets(line, sizeof line, status) != NULL) {
        sscanf(line, "VmSize: %" SCNu64, &used_kib);
    }
    if (status != NULL) {
        fclose(status);
    }
    EXPECT(used_kib > 0);
    struct rlimit limit = {(used_kib << 10) + 2 * MIB, RLIM_INFINITY};
    EXPECT(setrlimit(RLIMIT_AS, &limit) == 0);
    snprintf(path, sizeof path, "%s/by-hand", directory);
    RETURNS(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_HTML, path),
            DORMOUSE_ERR_OUT_OF_MEMORY, "bytes of memory to write it");
    RETURNS(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_PFTRACE, path),
            DORMOUSE_ERR_OUT_OF_MEMORY, "bytes of memory to write it");
    RETURNS(dormouse_runtime_write_dump(runtime, path, sizeof path, &bytes),
            DORMOUSE_ERR_OUT_OF_MEMORY, "bytes of memory to write it");
    EXPECT(files("dormouse") == 0 && files("by-hand") == 0);
    limit.rlim_cur = RLIM_INFINITY;
    EXPECT(setrlimit(RLIMIT_AS, &limit) == 0);
    snprintf(path, sizeof path, "%s/by-hand", directory);
    OK(dormouse_runtime_dump(runtime, DORMOUSE_FORMAT_HTML, path));
    EXPECT(files("by-hand") == 1 && unlink(path) == 0);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        return 2;
    }
    directory = argv[1];
    const char *mode = argv[2];
    dormouse_options_t options;
    dormouse_runtime_t *runtime = NULL;
    DORMOUSE_INIT(&options);
    if (strcmp(mode, "malloc") != 0) {
        options.alloc_budget_bytes = 64 * MIB;
    }
    if (strcmp(mode, "handled") == 0) {
        signal(SIGUSR1, own_handler);
    }
    if (strcmp(mode, "ignored") == 0) {
        signal(SIGUSR1, SIG_IGN);
    }
    OK(dormouse_runtime_create(&options, &runtime));
    if (strcmp(mode, "oom") == 0) {
        exhaust(runtime, 10);
    } else if (strcmp(mode, "malloc") == 0) {
        for (int at = 0; at < 5; at++) {
            void *block = malloc(1024 * MIB);
            EXPECT(block == NULL && errno == ENOMEM);
            usleep(150000);
        }
        EXPECT(strstr(dormouse_get_last_error(), "xdg-open /") != NULL);
    } else if (strcmp(mode, "signal") == 0) {
        EXPECT(kill(getpid(), SIGUSR1) == 0);
        wait_for("-signal-host.html", 1);
        usleep(1100000);
        errno = 77;
        EXPECT(raise(SIGUSR1) == 0 && errno == 77);
        wait_for("-signal-host.html", 2);
    } else if (strcmp(mode, "handled") == 0 || strcmp(mode, "ignored") == 0) {
        EXPECT(raise(SIGUSR1) == 0);
        usleep(300000);
        EXPECT(own_signals == (strcmp(mode, "handled") == 0) && files(".html") == 0);
    } else if (strcmp(mode, "replaced") == 0) {
        signal(SIGUSR1, own_handler);
        EXPECT(raise(SIGUSR1) == 0 && own_signals == 1);
        usleep(300000);
        EXPECT(files(".html") == 0);
    } else if (strcmp(mode, "storm") == 0) {
        storm();
    } else if (strcmp(mode, "trigger") == 0) {
        touch_file("dump-rank5");
        wait_for("-trigger-host.html", 1);
        EXPECT(files("dump-rank5") == 0);
        touch_file("dump-rank5");
        wait_for("-trigger-host.html", 2);
    } else if (strcmp(mode, "fork") == 0) {
        fork_twice();
    } else if (strcmp(mode, "calls") == 0) {
        calls(runtime);
    } else if (strcmp(mode, "none") == 0) {
        static char path[PATH_BYTES];
        uint64_t bytes = 0;
        RETURNS(dormouse_runtime_write_dump(runtime, path, sizeof path, &bytes),
                DORMOUSE_ERR_CONFIG, "DORMOUSE_DUMP_DIR was not set");
        exhaust(runtime, 1);
    } else if (strcmp(mode, "limited") == 0) {
        limited(runtime);
    } else if (strcmp(mode, "poor") == 0) {
        poor(runtime);
    } else if (strcmp(mode, "killed") == 0) {
        static char path[PATH_BYTES];
        uint64_t bytes = 0;
        for (;;) {
            OK(dormouse_runtime_write_dump(runtime, path, sizeof path, &bytes));
        }
    } else if (strcmp(mode, "_exit") == 0) {
        _exit(done("dumps"));
    } else if (strcmp(mode, "exit") == 0) {
        exit(done("dumps") == 0 ? 3 : 1);
    }
    OK(dormouse_runtime_destroy(runtime));
    return done("dumps");
}
