/* A limit of address space that is set while the heap exists: the program keeps the room that it has with libc's
 * malloc. Not linked to the library, and every case holds without it, too.
 *
 * later_limit CASE RESERVED: RESERVED is 1 if the heap reserves more than RESERVED_MIN, 0 without the library. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define RESERVED_MIN (32 * GIB)
/* What the program may map beyond its use before the heap. */
#define ROOM GIB
#define SMALL_BLOCKS 1000
#define LARGE_BLOCKS 64
#define THREADS 4
#define HELD_BLOCKS 16
#define LIMITS 40
#define CHILDREN 20
#define SECONDS_MAX 120u

static size_t before_bytes;
static int is_reserved;
static unsigned char *kept;
static int is_over;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "later_limit.c:%d: failed: %s (errno %d, %zu MiB mapped)\n", __LINE__,  \
                    #condition, errno, mapped_bytes() / MIB);                                      \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* Bytes that count against the limit. Allocates nothing. */
static size_t mapped_bytes(void)
{
    char text[128] = "";
    int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, text, sizeof text - 1) <= 0) {
        _exit(3);
    }
    close(file);
    return strtoul(text, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE);
}

static void fill(unsigned char *block, size_t bytes, size_t seed)
{
    for (size_t at = 0; at < bytes; at += 1024) {
        block[at] = (unsigned char)(seed + at / 1024);
    }
}

static int is_filled(const unsigned char *block, size_t bytes, size_t seed)
{
    for (size_t at = 0; at < bytes; at += 1024) {
        if (block[at] != (unsigned char)(seed + at / 1024)) {
            return 0;
        }
    }
    return 1;
}

#define KEPT_BYTES (4 * MIB)

static void expect_reservation(void)
{
    EXPECT(!is_reserved || mapped_bytes() > RESERVED_MIN);
}

static void make_heap(void)
{
    before_bytes = mapped_bytes();
    kept = (unsigned char *)malloc(KEPT_BYTES);
    EXPECT(kept != NULL);
    fill(kept, KEPT_BYTES, 1);
    expect_reservation();
}

static void limit_to(size_t bytes)
{
    struct rlimit limit;
    EXPECT(getrlimit(RLIMIT_AS, &limit) == 0);
    limit.rlim_cur = bytes;
    EXPECT(setrlimit(RLIMIT_AS, &limit) == 0);
    EXPECT(mapped_bytes() <= bytes);
}

static void *use_in_thread(void *unused)
{
    void *small = malloc(100), *large = malloc(MIB);
    EXPECT(small != NULL && large != NULL);
    free(small);
    free(large);
    return unused;
}

/* Uses most of the room in every way. */
static void use_room(void)
{
    void *small[SMALL_BLOCKS];
    unsigned char *large[LARGE_BLOCKS], *huge, *map;
    pthread_t thread;
    int status = 0;
    pid_t child;
    for (size_t at = 0; at < SMALL_BLOCKS; at++) {
        small[at] = malloc(1000);
        EXPECT(small[at] != NULL);
    }
    for (size_t at = 0; at < LARGE_BLOCKS; at++) {
        large[at] = (unsigned char *)malloc(MIB / 4);
        EXPECT(large[at] != NULL);
        fill(large[at], MIB / 4, at);
    }
    huge = (unsigned char *)calloc(1, ROOM / 2);
    EXPECT(huge != NULL && huge[0] == 0 && huge[ROOM / 2 - 1] == 0);
    huge[ROOM / 2 - 1] = 1;
    map = (unsigned char *)mmap(NULL, ROOM / 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(map != MAP_FAILED);
    map[ROOM / 8 - 1] = 1;
    EXPECT(pthread_create(&thread, NULL, use_in_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        unsigned char *block = (unsigned char *)malloc(ROOM / 16);
        EXPECT(block != NULL);
        block[ROOM / 16 - 1] = 1;
        _exit(is_filled(kept, KEPT_BYTES, 1) ? 0 : 4);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    EXPECT(munmap(map, ROOM / 8) == 0);
    for (size_t at = 0; at < LARGE_BLOCKS; at++) {
        EXPECT(is_filled(large[at], MIB / 4, at));
        large[at] = (unsigned char *)realloc(large[at], MIB / 2);
        EXPECT(large[at] != NULL);
        free(large[at]);
    }
    for (size_t at = 0; at < SMALL_BLOCKS; at++) {
        free(small[at]);
    }
    free(huge);
    EXPECT(is_filled(kept, KEPT_BYTES, 1));
}

/* Uses most of the room, and no more than all of it. */
static void use_room_only(void)
{
    void *block;
    size_t bytes;
    errno = 0;
    EXPECT(malloc(ROOM + 1) == NULL && errno == ENOMEM);
    errno = 0;
    EXPECT(calloc(2, ROOM) == NULL && errno == ENOMEM);
    /* A block of libc's, whose addresses may have been the heap's, goes back to libc. */
    block = malloc(ROOM / 4);
    EXPECT(block != NULL);
    bytes = mapped_bytes();
    free(block);
    EXPECT(mapped_bytes() + ROOM / 4 <= bytes);
    use_room();
}

/* By each of the four calls, as NAME. */
static void by_call(const char *name)
{
    struct rlimit limit = {before_bytes + ROOM, RLIM_INFINITY}, old = {0, 0};
    struct rlimit64 limit64 = {before_bytes + ROOM, RLIM64_INFINITY}, old64 = {0, 0};
    if (strcmp(name, "setrlimit") == 0) {
        EXPECT(setrlimit(RLIMIT_AS, &limit) == 0);
    } else if (strcmp(name, "setrlimit64") == 0) {
        EXPECT(setrlimit64(RLIMIT_AS, &limit64) == 0);
    } else if (strcmp(name, "prlimit") == 0) {
        EXPECT(prlimit(getpid(), RLIMIT_AS, &limit, &old) == 0 && old.rlim_cur == RLIM_INFINITY);
    } else {
        EXPECT(prlimit64(0, RLIMIT_AS, &limit64, &old64) == 0 && old64.rlim_cur == RLIM64_INFINITY);
    }
    EXPECT(mapped_bytes() <= before_bytes + ROOM);
    use_room_only();
}

/* The second limit finds what was freed since the first. */
static void twice(void)
{
    void *blocks[10];
    for (size_t at = 0; at < 10; at++) {
        blocks[at] = malloc(100 * MIB);
        EXPECT(blocks[at] != NULL);
    }
    limit_to(before_bytes + 2 * ROOM);
    for (size_t at = 0; at < 10; at++) {
        free(blocks[at]);
    }
    limit_to(before_bytes + ROOM);
    use_room_only();
}

/* The hard limit, which cannot be raised again. */
static void hard(void)
{
    struct rlimit limit = {before_bytes + ROOM, before_bytes + ROOM}, higher = limit;
    EXPECT(setrlimit(RLIMIT_AS, &limit) == 0);
    EXPECT(mapped_bytes() <= before_bytes + ROOM);
    use_room_only();
    EXPECT(geteuid() != 0 || setresuid(65534, 65534, 65534) == 0);
    higher.rlim_max += ROOM;
    errno = 0;
    EXPECT(setrlimit(RLIMIT_AS, &higher) == -1 && errno == EPERM);
    use_room_only();
}

/* Allocates, checks and frees blocks of all sizes, and maps memory, until the end. */
static void *work(void *number)
{
    unsigned char *held[HELD_BLOCKS] = {NULL};
    size_t bytes[HELD_BLOCKS] = {0};
    uint64_t random = 88172645463325252u + (uintptr_t)number;
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        size_t at, longer;
        unsigned char *map;
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        at = random % HELD_BLOCKS;
        if (held[at] != NULL) {
            EXPECT(is_filled(held[at], bytes[at], at));
            longer = bytes[at] + 5000;
            if (random & 1024) {
                EXPECT((held[at] = (unsigned char *)realloc(held[at], longer)) != NULL);
                EXPECT(is_filled(held[at], bytes[at], at) && malloc_usable_size(held[at]) >= longer);
            }
            free(held[at]);
        }
        bytes[at] = 1 + (random >> 20) % (random & 2048 ? 100000 : 3 * MIB);
        held[at] = (unsigned char *)malloc(bytes[at]);
        EXPECT(held[at] != NULL);
        fill(held[at], bytes[at], at);
        map = (unsigned char *)mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        EXPECT(map != MAP_FAILED);
        fill(map, MIB, at);
        EXPECT(is_filled(map, MIB, at) && munmap(map, MIB) == 0);
    }
    for (size_t at = 0; at < HELD_BLOCKS; at++) {
        EXPECT(held[at] == NULL || is_filled(held[at], bytes[at], at));
        free(held[at]);
    }
    return NULL;
}

static void start(pthread_t *threads)
{
    for (size_t at = 0; at < THREADS; at++) {
        EXPECT(pthread_create(&threads[at], NULL, work, (void *)at) == 0);
    }
}

static void end(const pthread_t *threads)
{
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    for (size_t at = 0; at < THREADS; at++) {
        EXPECT(pthread_join(threads[at], NULL) == 0);
    }
}

/* Limits fall while threads allocate. */
static void threads(void)
{
    pthread_t threads[THREADS];
    start(threads);
    for (size_t at = 0; at < LIMITS; at++) {
        /* Blocks at the end of what is left, so that some of it leaves at each limit. */
        void *block = malloc(64 * MIB);
        EXPECT(block != NULL);
        usleep(5000);
        free(block);
        limit_to(before_bytes + 3 * ROOM - at * ROOM / LIMITS);
    }
    end(threads);
    use_room();
}

static void in_child(void (*body)(void))
{
    int status = 0;
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        body();
        _exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    /* The parent's limit is not changed, and its reservation stays. */
    expect_reservation();
}

static void use_as_child(void)
{
    limit_to(before_bytes + ROOM);
    use_room_only();
    kept = (unsigned char *)realloc(kept, 2 * KEPT_BYTES);
    EXPECT(kept != NULL && is_filled(kept, KEPT_BYTES, 1));
}

static void child(void)
{
    in_child(use_as_child);
    in_child(use_as_child);
    EXPECT(is_filled(kept, KEPT_BYTES, 1));
}

static void map_as_child(void)
{
    unsigned char *map, *block;
    limit_to(before_bytes + 3 * ROOM);
    map = (unsigned char *)mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    block = (unsigned char *)malloc(ROOM / 2);
    EXPECT(map != MAP_FAILED && block != NULL);
    map[ROOM - 1] = block[ROOM / 2 - 1] = 1;
    free(block);
    EXPECT(is_filled(kept, KEPT_BYTES, 1));
}

/* Children that are forked while threads of the parent are inside the allocator. */
static void busy(void)
{
    pthread_t threads[THREADS];
    start(threads);
    for (size_t at = 0; at < CHILDREN; at++) {
        in_child(map_as_child);
    }
    end(threads);
}

/* A child that uses the parent's memory limits itself, not the parent. */
static void borrowed(void)
{
    struct rlimit limit = {before_bytes + ROOM, RLIM_INFINITY};
    int status = 0;
    pid_t child = vfork();
    if (child == 0) {
        _exit(setrlimit(RLIMIT_AS, &limit) == 0 ? 0 : 4);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    expect_reservation();
    use_room();
}

/* One wrong call, which fails as the system call does and gives nothing back. */
static void expect_same(pid_t pid, int resource, const struct rlimit *limit)
{
    long wanted, seen;
    int wanted_errno, seen_errno;
    errno = 0;
    wanted = syscall(SYS_prlimit64, pid, resource, limit, NULL);
    wanted_errno = errno;
    errno = 0;
    seen = prlimit(pid, (__rlimit_resource_t)resource, limit, NULL);
    seen_errno = errno;
    EXPECT(seen == wanted && seen_errno == wanted_errno);
    if (pid == 0) {
        errno = 0;
        seen = setrlimit((__rlimit_resource_t)resource, limit);
        seen_errno = errno;
        EXPECT(seen == wanted && seen_errno == wanted_errno);
    }
    expect_reservation();
}

/* Calls that are refused, or that limit no address space of this process. */
static void wrong(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct rlimit low = {before_bytes + ROOM, RLIM_INFINITY}, inverted = {ROOM, ROOM - 1}, files;
    const struct rlimit endless = {RLIM_INFINITY, RLIM_INFINITY};
    char *pages = (char *)mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pid_t other;
    int status = 0;
    EXPECT(pages != MAP_FAILED && mprotect(pages + page, page, PROT_NONE) == 0);
    expect_same(0, RLIMIT_AS, &inverted);
    expect_same(0, RLIMIT_AS, (const struct rlimit *)8);
    expect_same(0, RLIMIT_AS, (const struct rlimit *)(void *)(pages + page - sizeof(rlim_t)));
    expect_same(0, RLIMIT_AS, NULL);
    expect_same(0, 99, &low);
    expect_same(0, -1, &low);
    expect_same(0x3fffffff, RLIMIT_AS, &low);
    expect_same(-1, RLIMIT_AS, &low);
    expect_same(0, RLIMIT_AS, &endless);
    EXPECT(getrlimit(RLIMIT_NOFILE, &files) == 0);
    expect_same(0, RLIMIT_NOFILE, &files);
    other = fork();
    EXPECT(other >= 0);
    if (other == 0) {
        pause();
        _exit(0);
    }
    expect_same(other, RLIMIT_AS, &low);
    EXPECT(kill(other, SIGKILL) == 0 && waitpid(other, &status, 0) == other);
    use_room();
}

static const struct {
    const char *name;
    void (*run)(void);
} CASES[] = {
    {"twice", twice}, {"hard", hard}, {"threads", threads},   {"child", child},
    {"busy", busy},   {"borrowed", borrowed}, {"wrong", wrong},
};

int main(int argc, char **argv)
{
    if (argc != 3) {
        return 2;
    }
    is_reserved = strcmp(argv[2], "1") == 0;
    alarm(SECONDS_MAX);
    make_heap();
    if (strstr(argv[1], "rlimit") != NULL) {
        by_call(argv[1]);
        puts("all checks passed");
        return 0;
    }
    for (size_t at = 0; at < sizeof CASES / sizeof *CASES; at++) {
        if (strcmp(argv[1], CASES[at].name) == 0) {
            CASES[at].run();
            puts("all checks passed");
            return 0;
        }
    }
    return 2;
}
