/* malloc under the preload library in a process that may open no file any more, as programs that sandbox themselves
 * before their first large request. `plain`: the process starts without a variable of the library, and one that the
 * program sets is not read by the heap. Otherwise the heap serves requests of a page. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)

static void expect(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

/* From here on the kernel ends the process if it opens a file. */
static void open_no_file(void)
{
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
    expect(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
    expect(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "the filter");
}

int main(int count, char **words)
{
    int plain = count > 1 && strcmp(words[1], "plain") == 0;
    if (plain) {
        expect(setenv("DORMOUSE_HEAP_MIN_BYTES", "1TiB", 1) == 0, "a variable");
    }
    open_no_file();
    errno = EDOM;
    char *block = malloc(MIB);
    expect(block != NULL && errno == EDOM, "a block, and errno as it was");
    memset(block, 1, MIB);
    /* The heap's blocks have whole pages; libc's have a header. */
    expect(malloc_usable_size(block) == MIB, "a block of the heap");
    char *small = malloc(2 * PAGE);
    expect(small != NULL && (malloc_usable_size(small) == 2 * PAGE) == !plain, "the smallest request as at the start");
    free(small);
    free(block);
    block = calloc(2, MIB);
    expect(block != NULL && block[0] == 0 && block[2 * MIB - 1] == 0, "zeroes");
    free(block);
    puts("all checks passed");
    return 0;
}
