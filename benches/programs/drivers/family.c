/* Every function of malloc's family, at its edges. Prints what it found; exits with 1 on a defect. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failed;
#define CHECK(what) \
    do { if (!(what)) { printf("line %d: %s\n", __LINE__, #what); failed = 1; } } while (0)

static int aligned(void *block, size_t to) { return block && (uintptr_t)block % to == 0; }

static int all(const unsigned char *bytes, size_t count, unsigned char value) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != value) return 0;
    return 1;
}

static void sizes(void) {
    for (size_t size = 0; size <= (64u << 20); size = size * 2 + (size % 3 == 0)) {
        unsigned char *block = malloc(size);
        CHECK(aligned(block, 16) && malloc_usable_size(block) >= size);
        memset(block, 0x5a, size);
        block = realloc(block, size * 2 + 1);
        CHECK(block && all(block, size, 0x5a));
        block = realloc(block, size / 2 + 1);
        CHECK(block && all(block, size / 2, 0x5a));
        free(block);
        block = calloc(1, size);
        CHECK(block && all(block, size, 0));
        free(block);
    }
}

static void alignments(void) {
    for (size_t to = sizeof(void *); to <= (4u << 20); to *= 2) {
        void *block = NULL;
        CHECK(posix_memalign(&block, to, 100) == 0 && aligned(block, to));
        free(block);
        CHECK(aligned(block = aligned_alloc(to, to * 2), to));
        free(block);
        CHECK(aligned(block = memalign(to, 33), to));
        block = realloc(block, 5000);
        CHECK(block != NULL);
        free(block);
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *block = valloc(10);
    CHECK(aligned(block, page));
    free(block);
    block = pvalloc(10);
    CHECK(aligned(block, page) && malloc_usable_size(block) >= page);
    free(block);
    CHECK(posix_memalign(&block, 3, 8) == EINVAL);
}

static void refusals(void) {
    volatile size_t huge = PTRDIFF_MAX, half = SIZE_MAX / 2 + 2;
    errno = 0;
    CHECK(malloc(huge) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(calloc(half, 2) == NULL && errno == ENOMEM);
    errno = 0;
    CHECK(reallocarray(NULL, half, 2) == NULL && errno == ENOMEM);
    char *kept = strdup("kept");
    CHECK(kept && realloc(kept, huge) == NULL && strcmp(kept, "kept") == 0);
    free(kept);
    free(NULL);
    CHECK(malloc_usable_size(NULL) == 0);
    void *zero = realloc(NULL, 0);
    CHECK(zero != NULL);
    CHECK(realloc(zero, 0) == NULL);
    errno = 77;
    free(malloc(100));
    CHECK(errno == 77);
}

static void *pass(void *given) {
    free(given);
    void *made = malloc(4096);
    if (made) memset(made, 7, 4096);
    return made;
}

static void threads(void) {
    for (int i = 0; i < 200; i++) {
        pthread_t thread;
        void *made = NULL;
        CHECK(pthread_create(&thread, NULL, pass, malloc(300)) == 0);
        CHECK(pthread_join(thread, &made) == 0 && made && all(made, 4096, 7));
        free(made);
    }
}

static void children(void) {
    unsigned char *held = malloc(1 << 20);
    CHECK(held != NULL);
    memset(held, 9, 1 << 20);
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            int good = malloc_usable_size(held) >= 1 << 20;
            held = realloc(held, 3 << 20);
            good = good && held && all(held, 1 << 20, 9);
            free(held);
            free(malloc(77));
            _exit(!good);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(all(held, 1 << 20, 9));
    free(held);
}

static void *early;
__attribute__((constructor)) static void before(void) { early = malloc(1234); }
static void late(void) { free(early); free(malloc(99)); }

int main(void) {
    CHECK(early && atexit(late) == 0);
    CHECK(mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1);
    sizes();
    alignments();
    refusals();
    threads();
    children();
    (void)mallinfo2();
    (void)malloc_trim(0);
    puts(failed ? "defects" : "clean");
    return failed;
}
