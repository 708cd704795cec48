/* Forks leave the heap's free memory behind, also in a signal handler that interrupted the heap. Not linked to the
 * library. */
#include "check.h"

#include <signal.h>
#include <string.h>
#include <sys/time.h>

#define MIB ((size_t)1 << 20)
#define FREED_BYTES (16 * MIB)
#define FREED_COUNT 3
#define LIVE_BYTES (3 * MIB)
#define FORKS 200
#define INTERVAL_US 300

static volatile sig_atomic_t forks, failed_forks;

static long resident_kib(void)
{
    char line[256];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");

    EXPECT(status != NULL);
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "RssAnon: %ld kB", &kib) == 1)
            break;
    if (status != NULL)
        fclose(status);
    return kib;
}

static int ended_well(pid_t child)
{
    int status = -1;

    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

/* The child has the live block and not the free ones. */
static void a_child_has_what_is_live(void)
{
    unsigned char *freed[FREED_COUNT], *live = malloc(LIVE_BYTES);
    pid_t child;

    EXPECT(live != NULL);
    memset(live, 7, LIVE_BYTES);
    for (int i = 0; i < FREED_COUNT; i++) {
        freed[i] = malloc(FREED_BYTES);
        EXPECT(freed[i] != NULL);
        memset(freed[i], i, FREED_BYTES);
    }
    for (int i = 0; i < FREED_COUNT; i++)
        free(freed[i]);
    /* Without free memory to leave behind this shows nothing. */
    EXPECT(resident_kib() * 1024 > (long)(FREED_COUNT * FREED_BYTES));
    child = fork();
    if (child == 0) {
        int good = resident_kib() * 1024 < (long)FREED_BYTES;
        for (size_t at = 0; at < LIVE_BYTES; at++)
            good = good && live[at] == 7;
        _exit(!good);
    }
    EXPECT(ended_well(child));
    for (size_t at = 0; at < LIVE_BYTES; at++)
        EXPECT(live[at] == 7);
    free(live);
}

static void interrupt_soon(void)
{
    struct itimerval once = {{0, 0}, {0, INTERVAL_US}};

    EXPECT(setitimer(ITIMER_REAL, &once, NULL) == 0);
}

static void fork_in_handler(int number)
{
    pid_t child = fork();

    (void)number;
    if (child == 0)
        _exit(0);
    failed_forks += !ended_well(child);
    if (++forks < FORKS)
        interrupt_soon();
}

/* The handler interrupts malloc and free at any instruction. */
static void a_handler_forks_inside_the_heap(void)
{
    struct sigaction action = {.sa_handler = fork_in_handler, .sa_flags = SA_RESTART};

    EXPECT(sigaction(SIGALRM, &action, NULL) == 0);
    interrupt_soon();
    while (forks < FORKS) {
        unsigned char *block = malloc(4 * MIB + (size_t)forks % 7 * MIB), *other = malloc(2 * MIB);
        EXPECT(block != NULL && other != NULL);
        block[MIB] = other[MIB] = 1;
        free(block);
        free(other);
    }
    EXPECT(failed_forks == 0);
}

int main(void)
{
    a_child_has_what_is_live();
    a_handler_forks_inside_the_heap();
    return done("fork_cached");
}
