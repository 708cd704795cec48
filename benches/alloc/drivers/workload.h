/* The workloads, the same code for every contender: a driver is this file and the functions of
 * `Contender` below. What a contender is asked for is decided before the clock or the count
 * starts, so that both see its calls and nothing else.
 *
 *   driver hot BYTES WARMUP PAIRS                 one size, allocated and freed at once
 *   driver churn LIVE MIN MAX SEED WARMUP STEPS   LIVE blocks; each step replaces a random one
 *   driver scaling BYTES PAIRS ROUNDS             one thread, two threads, and a loop that only spins
 *   driver rotate STREAMS BYTES ROUNDS            one buffer at a time, each on the next stream
 *   driver replay FILE                            a trace, as traces.py wrote it
 *   driver replay_busy FILE                       the same, with work on the stream of each block
 *
 * Each prints one JSON object. Exit status 3: the contender ran out of memory. */
#ifndef DORMOUSE_BENCH_WORKLOAD_H
#define DORMOUSE_BENCH_WORKLOAD_H

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <valgrind/callgrind.h>

#include <cmath>
#include <vector>

/* What a driver defines. `stream` is a small number, 0 the default stream. */
struct Contender {
    static void start(unsigned streams);
    static void start_thread();
    static void *allocate(size_t bytes, unsigned stream); /* NULL: out of memory */
    static void release(void *block, size_t bytes, unsigned stream);
    static void use(unsigned stream);        /* work that outlasts the call */
    static void launch(unsigned stream);     /* work of no length of its own */
    static void enter_scope(unsigned scope); /* 0: none */
    static void end_scopes();                /* those entered so far are not entered again */
    static void mark();                      /* counts of calls start again */
    static void report();                    /* its JSON members, each with a comma before */
};

enum { EXIT_USAGE = 2, EXIT_OUT_OF_MEMORY = 3, STREAMS_MAX = 256, THREADS_MAX = 2 };

/* Pairs that a thread makes before it is timed, so that it has what it will have. */
enum { THREAD_WARMUP_PAIRS = 2000 };

/* Turns that the spin loop is timed by: some milliseconds. */
enum { SPIN_TURNS = 4000000 };

[[noreturn]] static void out_of_memory(size_t bytes)
{
    fprintf(stderr, "out of memory: %zu bytes\n", bytes);
    /* Contenders have threads and statics that need no goodbye. */
    fflush(nullptr);
    _Exit(EXIT_OUT_OF_MEMORY);
}

static void *must_allocate(size_t bytes, unsigned stream)
{
    void *block = Contender::allocate(bytes, stream);
    if (block == nullptr) {
        out_of_memory(bytes);
    }
    return block;
}

/* SplitMix64: the same sequence everywhere, from one number. */
struct Random {
    uint64_t state;

    uint64_t next()
    {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    double unit() { return (double)(next() >> 11) * 0x1p-53; }
    size_t log_uniform(size_t min, size_t max)
    {
        return (size_t)((double)min * exp2(unit() * log2((double)max / (double)min)));
    }
};

static uint64_t now_ns()
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* What is between the two is measured: under callgrind instructions of all threads are counted
 * there and nowhere else; elsewhere only the clock and the driver's counts see it. */
static uint64_t begin_measured()
{
    Contender::mark();
    CALLGRIND_START_INSTRUMENTATION;
    return now_ns();
}

static uint64_t end_measured(uint64_t begin)
{
    uint64_t ns = now_ns() - begin;
    CALLGRIND_STOP_INSTRUMENTATION;
    return ns;
}

/* Requested bytes that are live, and the most there were. */
struct Live {
    size_t bytes, peak_bytes;

    void add(size_t more)
    {
        bytes += more;
        peak_bytes = bytes > peak_bytes ? bytes : peak_bytes;
    }
};

static void report(uint64_t pairs, uint64_t ns, uint64_t warmup_ns, size_t peak_live_bytes)
{
    printf("{\"pairs\": %lu, \"ns\": %lu, \"warmup_ns\": %lu, \"peak_live_bytes\": %zu", pairs, ns,
           warmup_ns, peak_live_bytes);
    Contender::report();
    printf("}\n");
}

static void hot_pairs(size_t bytes, uint64_t pairs)
{
    for (uint64_t i = 0; i < pairs; i++) {
        Contender::release(must_allocate(bytes, 0), bytes, 0);
    }
}

static void hot(size_t bytes, uint64_t warmup, uint64_t pairs)
{
    Contender::start(1);
    hot_pairs(bytes, warmup);
    uint64_t begin = begin_measured();
    hot_pairs(bytes, pairs);
    report(pairs, end_measured(begin), 0, bytes);
}

struct Step {
    uint32_t slot;
    size_t bytes;
};

struct Slot {
    void *block;
    size_t bytes;
};

static void churn_steps(const Step *steps, uint64_t count, Slot *slots)
{
    for (uint64_t i = 0; i < count; i++) {
        Slot *slot = &slots[steps[i].slot];
        Contender::release(slot->block, slot->bytes, 0);
        slot->bytes = steps[i].bytes;
        slot->block = must_allocate(slot->bytes, 0);
    }
}

static void churn(uint32_t live, size_t min, size_t max, uint64_t seed, uint64_t warmup,
                  uint64_t count)
{
    Random random = {live + (seed << 32)};
    std::vector<Slot> slots(live);
    std::vector<Step> steps(warmup + count);
    Live requested = {};
    for (Slot &slot : slots) {
        slot.bytes = random.log_uniform(min, max);
        requested.add(slot.bytes);
    }
    /* Sizes are known beforehand, so the most that are live at once is too. */
    std::vector<Slot> model = slots;
    for (Step &step : steps) {
        step.slot = (uint32_t)(random.next() % live);
        step.bytes = random.log_uniform(min, max);
        requested.bytes -= model[step.slot].bytes;
        model[step.slot].bytes = step.bytes;
        requested.add(step.bytes);
    }

    Contender::start(1);
    uint64_t warmup_begin = now_ns();
    for (Slot &slot : slots) {
        slot.block = must_allocate(slot.bytes, 0);
    }
    churn_steps(steps.data(), warmup, slots.data());
    uint64_t warmup_ns = now_ns() - warmup_begin;
    uint64_t begin = begin_measured();
    churn_steps(steps.data() + warmup, count, slots.data());
    report(count, end_measured(begin), warmup_ns, requested.peak_bytes);
}

/* One thread of a round: it warms up, waits for the others, and works. */
struct Runner {
    pthread_t thread;
    unsigned place; /* of its processor */
    pthread_barrier_t *barrier;
    size_t bytes; /* 0: spin instead */
    uint64_t pairs;
    uint64_t begin_ns, end_ns;
};

static uint64_t spin(uint64_t turns)
{
    uint64_t value = turns;
    for (uint64_t i = 0; i < turns; i++) {
        value = value * 6364136223846793005u + 1442695040888963407u;
        __asm__ volatile("" : "+r"(value));
    }
    return value;
}

/* Puts the calling thread on the processor of that place among those the process may use: work of
 * half a millisecond is over before two threads on one processor are moved apart. */
static void stay_on(unsigned place)
{
    cpu_set_t allowed, own;
    CPU_ZERO(&own);
    if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) {
        return;
    }
    for (unsigned cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && place-- == 0) {
            CPU_SET(cpu, &own);
            pthread_setaffinity_np(pthread_self(), sizeof own, &own);
            return;
        }
    }
}

static void *run_thread(void *argument)
{
    Runner *runner = (Runner *)argument;
    stay_on(runner->place);
    Contender::start_thread();
    if (runner->bytes != 0) {
        hot_pairs(runner->bytes, THREAD_WARMUP_PAIRS);
    }
    pthread_barrier_wait(runner->barrier);
    runner->begin_ns = now_ns();
    if (runner->bytes != 0) {
        hot_pairs(runner->bytes, runner->pairs);
    } else {
        spin(runner->pairs);
    }
    runner->end_ns = now_ns();
    return nullptr;
}

/* Nanoseconds from the first of `threads` threads that began to the last that ended. The threads
 * read the clock themselves: a waiting thread may be woken much later. */
static uint64_t time_threads(unsigned threads, size_t bytes, uint64_t pairs)
{
    pthread_barrier_t barrier;
    Runner runners[THREADS_MAX] = {};
    pthread_barrier_init(&barrier, nullptr, threads);
    for (unsigned i = 0; i < threads; i++) {
        runners[i].place = i;
        runners[i].barrier = &barrier;
        runners[i].bytes = bytes;
        runners[i].pairs = pairs;
        pthread_create(&runners[i].thread, nullptr, run_thread, &runners[i]);
    }
    uint64_t begin_ns = UINT64_MAX, end_ns = 0;
    for (unsigned i = 0; i < threads; i++) {
        pthread_join(runners[i].thread, nullptr);
        begin_ns = runners[i].begin_ns < begin_ns ? runners[i].begin_ns : begin_ns;
        end_ns = runners[i].end_ns > end_ns ? runners[i].end_ns : end_ns;
    }
    pthread_barrier_destroy(&barrier);
    return end_ns - begin_ns;
}

static void scaling(size_t bytes, uint64_t pairs, unsigned rounds)
{
    Contender::start(1);
    /* As long as the pairs of one thread last: a spin loop that lasts otherwise scales otherwise. */
    uint64_t pairs_ns = time_threads(1, bytes, pairs);
    uint64_t turns = SPIN_TURNS * pairs_ns / (time_threads(1, 0, SPIN_TURNS) + 1) + 1;
    printf("{\"rounds\": [");
    for (unsigned round = 0; round < rounds; round++) {
        uint64_t one = time_threads(1, bytes, pairs), spin_one = time_threads(1, 0, turns);
        uint64_t two = time_threads(2, bytes, pairs), spin_two = time_threads(2, 0, turns);
        printf("%s[%lu, %lu, %lu, %lu]", round == 0 ? "" : ", ", one, two, spin_one, spin_two);
    }
    printf("]}\n");
}

static void rotate(unsigned streams, size_t bytes, unsigned rounds)
{
    Contender::start(streams + 1);
    uint64_t begin = begin_measured();
    for (unsigned i = 0; i < streams * rounds; i++) {
        unsigned stream = 1 + i % streams;
        void *block = must_allocate(bytes, stream);
        Contender::use(stream);
        Contender::release(block, bytes, stream);
    }
    report((uint64_t)streams * rounds, end_measured(begin), 0, bytes);
}

/* One event of a trace, as traces.py packs it. */
enum EventKind : uint32_t { EVENT_ALLOCATE, EVENT_FREE, EVENT_END_SCOPES };
struct Event {
    uint32_t kind, slot;
    uint64_t bytes;
    uint32_t stream, scope;
};
static_assert(sizeof(Event) == 24, "traces.py writes these");

static std::vector<Event> read_events(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == nullptr) {
        perror(path);
        exit(EXIT_USAGE);
    }
    std::vector<Event> events;
    Event event;
    while (fread(&event, sizeof event, 1, file) == 1) {
        events.push_back(event);
    }
    fclose(file);
    return events;
}

static void replay(const char *path, bool is_busy)
{
    std::vector<Event> events = read_events(path);
    uint32_t slots_count = 0, streams = 0;
    for (const Event &event : events) {
        slots_count = event.slot >= slots_count ? event.slot + 1 : slots_count;
        streams = event.stream >= streams ? event.stream + 1 : streams;
    }
    if (streams > STREAMS_MAX) {
        fprintf(stderr, "%s: %u streams, at most %d are accepted\n", path, streams, STREAMS_MAX);
        exit(EXIT_USAGE);
    }
    std::vector<Slot> slots(slots_count);
    Live live = {};
    uint64_t pairs = 0;
    uint32_t scope = 0;
    Contender::start(streams);
    uint64_t begin = begin_measured();
    for (const Event &event : events) {
        Slot *slot = &slots[event.slot];
        if (event.kind == EVENT_END_SCOPES) {
            Contender::enter_scope(scope = 0);
            Contender::end_scopes();
            continue;
        }
        if (event.kind == EVENT_FREE) {
            Contender::release(slot->block, slot->bytes, event.stream);
            live.bytes -= slot->bytes;
            pairs++;
            continue;
        }
        if (event.scope != scope) {
            Contender::enter_scope(scope = event.scope);
        }
        *slot = {must_allocate(event.bytes, event.stream), event.bytes};
        live.add(event.bytes);
        if (is_busy) {
            Contender::launch(event.stream);
        }
    }
    report(pairs, end_measured(begin), 0, live.peak_bytes);
}

static uint64_t number(const char *text)
{
    char *end = nullptr;
    uint64_t value = strtoull(text, &end, 10);
    if (*text == '\0' || *end != '\0') {
        fprintf(stderr, "%s is not a number\n", text);
        exit(EXIT_USAGE);
    }
    return value;
}

int main(int count, char **words)
{
    auto is = [&](const char *mode, int arguments) {
        return count == arguments + 2 && strcmp(words[1], mode) == 0;
    };
    auto at = [&](int index) { return number(words[index + 2]); };
    if (is("hot", 3)) {
        hot(at(0), at(1), at(2));
    } else if (is("churn", 6)) {
        churn((uint32_t)at(0), at(1), at(2), at(3), at(4), at(5));
    } else if (is("scaling", 3)) {
        scaling(at(0), at(1), (unsigned)at(2));
    } else if (is("rotate", 3)) {
        rotate((unsigned)at(0), at(1), (unsigned)at(2));
    } else if (is("replay", 1)) {
        replay(words[2], false);
    } else if (is("replay_busy", 1)) {
        replay(words[2], true);
    } else {
        fprintf(stderr, "%s: the head of workload.h says how\n", words[0]);
        return EXIT_USAGE;
    }
    fflush(nullptr);
    /* Contenders have threads and statics that need no goodbye. */
    _Exit(0);
}

#endif
