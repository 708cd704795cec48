/* The whole malloc family, every member of which may be of another allocator: blocks of libc's functions
 * included. Built with other allocators, linked dynamically and statically. Not linked to the library. */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 200
#define THREADS 3

static int failures;

static void check(int condition, const char *what, size_t bytes)
{
    if (!condition) {
        fprintf(stderr, "failed: %s of %zu bytes\n", what, bytes);
        __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    }
}

/* Writes a block, grows it, shrinks it and frees it. */
static void use(void *pointer, const char *what, size_t bytes)
{
    unsigned char *volatile block = (unsigned char *)pointer;
    check(block != NULL, what, bytes);
    if (block == NULL) {
        return;
    }
    check(malloc_usable_size(block) >= bytes, what, bytes);
    memset(block, 5, bytes);
    block = (unsigned char *)reallocarray(block, bytes, 3);
    check(block != NULL && malloc_usable_size(block) >= 3 * bytes, what, bytes);
    check(block[0] == 5 && block[bytes - 1] == 5, what, bytes);
    block = (unsigned char *)realloc(block, (bytes + 1) / 2);
    check(block != NULL && block[0] == 5, what, bytes);
    free(block);
}

static void *work(void *unused)
{
    static const size_t sizes[] = {1, 24, 4000, 70000, 300000, 5000000};
    (void)unused;
    for (int round = 0; round < ROUNDS; round++) {
        size_t bytes = sizes[round % (int)(sizeof sizes / sizeof sizes[0])];
        void *place = NULL;
        char text[16] = "copied by libc";
        use(malloc(bytes), "malloc", bytes);
        use(calloc(bytes, 1), "calloc", bytes);
        use(realloc(NULL, bytes), "realloc", bytes);
        use(memalign(64, bytes), "memalign", bytes);
        use(aligned_alloc(64, bytes), "aligned_alloc", bytes);
        use(posix_memalign(&place, 4096, bytes) == 0 ? place : NULL, "posix_memalign", bytes);
        use(valloc(bytes), "valloc", bytes);
        use(strdup(text), "strdup", sizeof "copied by libc");
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    char *line = NULL;
    FILE *file = fopen("/proc/self/status", "r");
    size_t capacity = 0;
    while (file != NULL && getline(&line, &capacity, file) > 0) {
    }
    check(line != NULL && malloc_usable_size(line) >= capacity, "getline", capacity);
    free(line);
    fclose(file);
    for (int t = 0; t < THREADS; t++) {
        check(pthread_create(&threads[t], NULL, work, NULL) == 0, "pthread_create", 0);
    }
    for (int t = 0; t < THREADS; t++) {
        pthread_join(threads[t], NULL);
    }
    if (failures == 0) {
        printf("family: all checks passed\n");
    }
    return failures != 0;
}
