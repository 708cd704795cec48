/* Forks at times when the library is least ready for it: while another thread makes the heap, and with a
 * fork handler of the program's that runs before the library's. Also children that run no fork handler.
 * Not linked to the library. The argument is the number of forks for each. */
#include "check.h"

#include <malloc.h>
#include <signal.h>
#include <sys/syscall.h>

#define BYTES ((size_t)1 << 20)
#define FORKS_AT_ONCE 10
#define CHILD_SECONDS_MAX 30u

static void *volatile parents;

/* Allocates, resizes and frees, as a child may. */
static void use_memory(void)
{
    unsigned char *volatile block = (unsigned char *)malloc(BYTES);
    EXPECT(block != NULL);
    memset(block, 1, BYTES);
    block = (unsigned char *)realloc(block, 2 * BYTES);
    EXPECT(block != NULL && block[BYTES - 1] == 1);
    free(block);
    free(calloc(2, BYTES));
    EXPECT(malloc_usable_size(parents) == 0 || malloc_usable_size(parents) >= BYTES);
}

static void child_handler(void)
{
    alarm(CHILD_SECONDS_MAX); /* ends a child that waits for a lock, which is a failure */
    use_memory();
}

static void register_first(void)
{
    pthread_atfork(NULL, NULL, child_handler);
}

/* Before the constructors of all libraries. */
__attribute__((section(".preinit_array"), used)) static void (*const first)(void) = register_first;

static int is_over;

/* Makes the heap, and holds its lock as often as it can. */
static void *hammer(void *unused)
{
    (void)unused;
    parents = malloc(BYTES);
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        void *volatile block = malloc(BYTES);
        free(block);
    }
    return NULL;
}

static pid_t child_of(int kind)
{
    if (kind == 1) {
        return _Fork();
    }
    return kind == 2 ? (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) : fork();
}

static void fork_one(int kind)
{
    int status = 0;
    pid_t child = child_of(kind);
    if (child == 0) {
        alarm(CHILD_SECONDS_MAX);
        use_memory();
        free(parents);
        _exit(failures != 0);
    }
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
    pthread_t thread;
    int kind, forks = argc > 1 ? atoi(argv[1]) : FORKS_AT_ONCE;

    EXPECT(pthread_create(&thread, NULL, hammer, NULL) == 0);
    for (int f = 0; f < forks && failures == 0; f++) {
        fork_one(0);
    }
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    /* The process has one thread now: without handlers libc's malloc works in the children too. */
    for (kind = 1; kind <= 2; kind++) {
        fork_one(kind);
    }
    use_memory();
    free(parents);
    return done("fork_early");
}
