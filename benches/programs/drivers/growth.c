/* growth realloc|longer|sparse|usable|forks COUNT: one figure of the heap; prints it.
 *
 * realloc: seconds in realloc while it grows one block to COUNT MiB in steps of 16 MiB.
 * longer: peak resident bytes over live ones, a block replaced by slightly longer ones to COUNT MiB.
 * sparse: seconds per calloc of 64 MiB that is touched at one byte, COUNT times.
 * usable: seconds per malloc_usable_size, COUNT thousand times.
 * forks: how many of COUNT children that allocate, forked beside racing threads, hang or fail. */
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const size_t MIB = 1 << 20;
/* A heap that copies at each step ends within seconds too. */
enum { STEP_MIB = 16 };
/* A child that needs longer has hung. */
enum { CHILD_SECONDS_MAX = 20, RACERS = 3 };

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void *had(void *block) {
    if (!block) {
        fprintf(stderr, "growth: out of memory\n");
        exit(3);
    }
    return block;
}

static double grow(long count) {
    char *block = NULL;
    double took = 0;
    for (long i = 0; i < count; i += STEP_MIB) {
        double start = now();
        block = had(realloc(block, (size_t)(i + STEP_MIB) * MIB));
        took += now() - start;
        memset(block + (size_t)i * MIB, 1, STEP_MIB * MIB);
    }
    free(block);
    return took;
}

static double longer(long count) {
    size_t size = 0;
    char *block = NULL;
    for (size = 48 * MIB; size <= (size_t)count * MIB; size += STEP_MIB * MIB) {
        char *next = had(malloc(size));
        memset(next, 1, size);
        free(block);
        block = next;
    }
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    free(block);
    /* Two blocks are live while one replaces the other. */
    return (double)used.ru_maxrss * 1024 / (2.0 * (double)count * (double)MIB);
}

static double sparse(long count) {
    double start = now();
    for (long i = 0; i < count; i++) {
        volatile char *block = had(calloc(1, 64 * MIB));
        block[i * 4096 % (64 * MIB)] = 1;
        free((void *)block);
    }
    return (now() - start) / (double)count;
}

static double usable(long count) {
    void *block = had(malloc(1000));
    volatile size_t sum = 0;
    double start = now();
    for (long i = 0; i < count * 1000; i++) sum += malloc_usable_size(block);
    double took = (now() - start) / ((double)count * 1000);
    free(block);
    return took;
}

static atomic_int stop;

static void *race(void *unused) {
    (void)unused;
    for (size_t i = 0; !stop; i++) free(malloc(16 + i * 37 % 100000));
    return NULL;
}

static double forks(long count) {
    pthread_t racers[RACERS];
    long lost = 0;
    for (int i = 0; i < RACERS; i++)
        if (pthread_create(&racers[i], NULL, race, NULL) != 0) exit(3);
    for (long i = 0; i < count; i++) {
        pid_t child = fork();
        if (child == 0) {
            signal(SIGALRM, SIG_DFL);
            alarm(CHILD_SECONDS_MAX);
            char *block = malloc(100000);
            block = block ? realloc(block, 300000) : NULL;
            free(block);
            _exit(block == NULL);
        }
        int status = -1;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) lost++;
    }
    stop = 1;
    for (int i = 0; i < RACERS; i++) pthread_join(racers[i], NULL);
    return (double)lost;
}

int main(int argc, char **argv) {
    static const struct { const char *name; double (*measure)(long); } kinds[] = {
        {"realloc", grow}, {"longer", longer}, {"sparse", sparse}, {"usable", usable}, {"forks", forks}};
    long count = argc == 3 ? atol(argv[2]) : 0;
    for (size_t k = 0; count > 0 && k < sizeof kinds / sizeof *kinds; k++)
        if (strcmp(argv[1], kinds[k].name) == 0) {
            printf("%.9g\n", kinds[k].measure(count));
            return 0;
        }
    fprintf(stderr, "growth: usage: growth realloc|longer|sparse|usable|forks COUNT\n");
    return 2;
}
