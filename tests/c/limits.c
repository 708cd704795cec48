/* Memory limits: requests return a block that can be used, or NULL; never a signal. Not linked to the library.
 *
 * limits KIND WHEN FROM TO STEP: for each limit in MiB above what a process uses, a child sets it and asks
 * for blocks until it gets none. KIND: as, data, maps. WHEN: fresh (no heap yet), used (after the first
 * large block; address space in MiB above the use before it), exec (before the start of the program). */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define BLOCKS_MAX 20000
#define REFUSALS_MAX 50
#define CHILD_SECONDS_MAX 60u

static void *blocks[BLOCKS_MAX];

/* Bytes of the process that count against `kind`. */
static size_t used_bytes(int kind)
{
    char line[256];
    size_t kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        sscanf(line, kind == RLIMIT_AS ? "VmSize: %zu" : "VmData: %zu", &kib);
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib * 1024;
}

static void set_limit(int kind, size_t bytes)
{
    struct rlimit limit = {bytes, bytes};
    if (setrlimit(kind, &limit) != 0) {
        _exit(3);
    }
}

/* Maps single pages until the system allows no more, all but `left`. */
static void exhaust_maps(size_t left)
{
    char *pages = (char *)mmap(NULL, 1ul << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t count = 0;
    if (pages == MAP_FAILED) {
        _exit(3);
    }
    while (count < 100000 && mprotect(pages + 8192 * count, 4096, PROT_READ) == 0) {
        count++;
    }
    for (size_t i = 0; i < left / 2 && i < count; i++) {
        mprotect(pages + 8192 * (count - 1 - i), 4096, PROT_NONE);
    }
}

/* Asks for blocks of many sizes; frees and resizes some. */
static void use_all(void)
{
    uint64_t random = 88172645463325252u;
    size_t count = 0, refusals = 0;
    while (count < BLOCKS_MAX && refusals < REFUSALS_MAX) {
        size_t bytes;
        unsigned char *block;
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        bytes = random % 8 == 0 ? 1 + random % 5000 : 4096 + random % (random % 7 == 0 ? 4 * MIB : 30000);
        block = (unsigned char *)(random % 5 == 0 ? calloc(1, bytes) : malloc(bytes));
        if (block == NULL) {
            refusals++;
            if (errno != ENOMEM) {
                _exit(4);
            }
        } else {
            block[0] = 1;
            block[bytes - 1] = 2;
            blocks[count++] = block;
        }
        if (count > 0 && random % 3 == 0) {
            size_t at = (random >> 20) % count;
            void *moved = random % 2 ? NULL : realloc(blocks[at], 1 + random % 100000);
            if (moved != NULL) {
                blocks[at] = moved;
            } else {
                free(blocks[at]);
                blocks[at] = blocks[--count];
            }
        }
    }
    while (count > 0) {
        free(blocks[--count]);
    }
}

int main(int argc, char **argv)
{
    int kind, failures = 0, runs = 0;
    if (argc == 1) { /* after exec */
        use_all();
        return 0;
    }
    if (argc != 6) {
        return 2;
    }
    kind = strcmp(argv[1], "as") == 0 ? RLIMIT_AS : RLIMIT_DATA;
    for (long limit = atol(argv[3]); limit <= atol(argv[4]); limit += atol(argv[5])) {
        int status = 0;
        pid_t child = fork();
        runs++;
        if (child == 0) {
            /* A forked child cannot use the parent's heap: the program starts anew. */
            char text[32];
            snprintf(text, sizeof text, "%ld", limit);
            execl("/proc/self/exe", argv[0], argv[1], argv[2], text, "-1", "run", (char *)NULL);
            _exit(3);
        }
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "%s %s %ld MiB: status %#x\n", argv[1], argv[2], limit, (unsigned)status);
            failures++;
        }
    }
    if (runs == 0) { /* the program anew */
        long limit = atol(argv[3]);
        size_t bytes = used_bytes(kind);
        alarm(CHILD_SECONDS_MAX);
        if (strcmp(argv[2], "used") == 0) {
            void *volatile first = malloc(MIB);
            free(first);
        }
        if (strcmp(argv[1], "maps") == 0) {
            exhaust_maps((size_t)limit);
            use_all();
            return 0;
        }
        if (strcmp(argv[2], "exec") == 0) {
            bytes = 0;
        } else if (kind != RLIMIT_AS) {
            bytes = used_bytes(kind);
        }
        set_limit(kind, bytes + (size_t)limit * MIB);
        if (strcmp(argv[2], "exec") == 0) {
            execl("/proc/self/exe", argv[0], (char *)NULL);
            _exit(3);
        }
        use_all();
        return 0;
    }
    if (failures == 0) {
        printf("limits: all checks passed\n");
    }
    return failures != 0;
}
