/* malloc under the preload library: the default budget never causes a refusal, blocks that are replaced by longer
 * ones leave no cache behind, a block that realloc moves is not resident twice, freed memory goes back, and
 * malloc_trim releases what is left. */
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define GIB ((size_t)1 << 30)
#define MIB ((size_t)1 << 20)
#define BLOCKS 4

/* Resident memory now, in bytes. */
static size_t resident_bytes(void)
{
    unsigned long total = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%lu %lu", &total, &resident) != 2) {
        abort();
    }
    fclose(file);
    return (size_t)resident * 4096;
}

/* The most that was ever resident, in bytes. */
static size_t peak_bytes(void)
{
    struct rusage used;
    if (getrusage(RUSAGE_SELF, &used) != 0) {
        abort();
    }
    return (size_t)used.ru_maxrss * 1024;
}

static void expect(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

int main(void)
{
    char *blocks[BLOCKS], *old = NULL;
    char *grown = (char *)malloc(64 * MIB);
    expect(grown != NULL, "64 MiB");
    memset(grown, 1, 64 * MIB);
    grown = (char *)realloc(grown, 128 * MIB);
    expect(grown != NULL && grown[0] == 1 && grown[64 * MIB - 1] == 1, "a longer block with the same bytes");
    expect(peak_bytes() < 64 * MIB + 32 * MIB, "a block that moves is not resident twice");
    free(grown);
    for (size_t at = 0; at < BLOCKS; at++) {
        blocks[at] = (char *)malloc(10 * GIB);
        expect(blocks[at] != NULL, "10 GiB, untouched");
        blocks[at][0] = blocks[at][10 * GIB - 1] = 1;
    }
    for (size_t at = 0; at < BLOCKS; at++) {
        free(blocks[at]);
    }
    for (size_t at = 0; at < BLOCKS; at++) {
        blocks[at] = (char *)calloc(10, GIB);
        expect(blocks[at] != NULL && blocks[at][0] == 0 && blocks[at][10 * GIB - 1] == 0, "10 GiB of zeroes");
    }
    for (size_t at = 0; at < BLOCKS; at++) {
        free(blocks[at]);
    }
    errno = 0;
    expect(malloc(PTRDIFF_MAX) == NULL && errno == ENOMEM, "PTRDIFF_MAX is refused");
    for (size_t bytes = 33 * MIB; bytes < 64 * MIB; bytes += MIB / 4) {
        char *fresh = (char *)malloc(bytes);
        expect(fresh != NULL, "a slightly longer block");
        memset(fresh, 1, bytes);
        free(old);
        old = fresh;
    }
    /* Two blocks were live at a time: they, a quarter more or 64 MiB, and as much of parked pages. */
    expect(resident_bytes() < 2 * 64 * MIB + 64 * MIB + 64 * MIB + 32 * MIB, "the cache follows what is live");
    free(old);
    old = (char *)malloc(256 * MIB);
    expect(old != NULL, "256 MiB");
    memset(old, 1, 256 * MIB);
    free(old);
    expect(resident_bytes() < 64 * MIB + 32 * MIB, "most of it goes back at once");
    expect(malloc_trim(0) == 1, "free memory is there to release");
    expect(resident_bytes() < 32 * MIB, "free memory is released");
    old = (char *)calloc(256, MIB);
    expect(old != NULL && old[0] == 0 && old[256 * MIB - 1] == 0, "and comes back as zeroes");
    free(old);
    puts("all checks passed");
    return 0;
}
