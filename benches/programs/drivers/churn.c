/* churn KIND: a bounded workload of small blocks; prints a checksum of what the blocks held.
 *
 * exchange: threads replace random blocks in slots that pass to the next thread each round.
 * producer: one half of the threads allocates, the other half frees.
 * local: every thread writes its own small block over and over.
 * mixed: one thread, sizes that follow a power law, in runs that are freed in reverse. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, SLOTS = 2000, ROUNDS = 60, STEPS = 60000 };
static unsigned char *slots[THREADS][SLOTS];
static pthread_barrier_t barrier;

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static unsigned char *make(size_t size, unsigned char mark) {
    unsigned char *block = malloc(size);
    if (!block) abort();
    block[0] = mark, block[size - 1] = mark;
    return block;
}

static uint64_t drop(unsigned char **slot) {
    uint64_t mark = *slot ? **slot : 0;
    free(*slot);
    *slot = NULL;
    return mark;
}

static void *exchange(void *argument) {
    uintptr_t me = (uintptr_t)argument, sum = 0;
    uint64_t state = me + 1;
    for (int round = 0; round < ROUNDS; round++) {
        unsigned char **mine = slots[(me + round) % THREADS];
        for (int step = 0; step < STEPS; step++) {
            unsigned char **slot = &mine[next(&state) % SLOTS];
            sum += drop(slot);
            *slot = make(8 + next(&state) % 1000, (unsigned char)step);
        }
        pthread_barrier_wait(&barrier);
    }
    return (void *)sum;
}

static void *producer(void *argument) {
    uintptr_t me = (uintptr_t)argument, sum = 0;
    for (int round = 0; round < ROUNDS * 40; round++) {
        unsigned char **shared = slots[me / 2];
        if (me % 2 == 0)
            for (int i = 0; i < SLOTS; i++) shared[i] = make(16 + i % 500, (unsigned char)i);
        pthread_barrier_wait(&barrier);
        if (me % 2 == 1)
            for (int i = 0; i < SLOTS; i++) sum += drop(&shared[i]);
        pthread_barrier_wait(&barrier);
    }
    return (void *)sum;
}

static void *local(void *argument) {
    uintptr_t me = (uintptr_t)argument, sum = 0;
    for (int round = 0; round < STEPS; round++) {
        volatile unsigned char *block = make(8, (unsigned char)me);
        for (int i = 0; i < 5000; i++) block[0]++;
        sum += block[0];
        free((void *)block);
    }
    return (void *)sum;
}

static void *mixed(void *argument) {
    uintptr_t me = (uintptr_t)argument, sum = 0;
    uint64_t state = me + 99;
    for (int round = 0; me == 0 && round < ROUNDS * 40; round++) {
        for (int i = 0; i < SLOTS; i++) {
            size_t size = 8u << next(&state) % 8;
            slots[0][i] = make(size + next(&state) % size, (unsigned char)i);
        }
        for (int i = SLOTS; i-- > 0;) sum += drop(&slots[0][i]);
    }
    return (void *)sum;
}

int main(int argc, char **argv) {
    static const struct { const char *name; void *(*work)(void *); } kinds[] = {
        {"exchange", exchange}, {"producer", producer}, {"local", local}, {"mixed", mixed}};
    for (size_t k = 0; argc == 2 && k < sizeof kinds / sizeof *kinds; k++) {
        if (strcmp(argv[1], kinds[k].name) != 0) continue;
        pthread_t threads[THREADS];
        uintptr_t sum = 0;
        pthread_barrier_init(&barrier, NULL, THREADS);
        for (uintptr_t i = 0; i < THREADS; i++)
            if (pthread_create(&threads[i], NULL, kinds[k].work, (void *)i) != 0) return 1;
        for (int i = 0; i < THREADS; i++) {
            void *one;
            pthread_join(threads[i], &one);
            sum += (uintptr_t)one;
        }
        printf("%s %lu\n", argv[1], (unsigned long)sum);
        return 0;
    }
    fprintf(stderr, "churn: usage: churn exchange|producer|local|mixed\n");
    return 2;
}
