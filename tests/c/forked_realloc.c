/* A forked child resizes a block of the parent's: all of it is copied, or none. Not linked to the library.
 * Without argument, a block longer than one system call copies; with one, a short block where the system
 * refuses that call. */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define MIB ((size_t)1 << 20)
#define STEP (MIB / 2)

/* Makes process_vm_readv fail with EPERM in this process. */
static void refuse_call(void)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof rules[0], rules};
    EXPECT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    EXPECT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int main(int argc, char **argv)
{
    size_t bytes = argc > 1 ? 3 * MIB + 12345 : 2050 * MIB + 12345;
    unsigned char *block = (unsigned char *)malloc(bytes);
    int status = 0;
    pid_t child;

    (void)argv;
    EXPECT(block != NULL);
    for (size_t at = 0; at < bytes; at += STEP) {
        block[at] = (unsigned char)(1 + at / STEP % 255);
    }
    block[bytes - 1] = 77;
    child = fork();
    if (child == 0) {
        if (argc > 1) {
            refuse_call();
        }
        EXPECT(malloc_usable_size(block) >= bytes);
        block = (unsigned char *)realloc(block, bytes + MIB);
        EXPECT(block != NULL);
        for (size_t at = 0; block != NULL && at < bytes; at += STEP) {
            if (block[at] != 1 + at / STEP % 255) {
                EXPECT(at == bytes); /* one failure is enough */
                break;
            }
        }
        EXPECT(block != NULL && block[bytes - 1] == 77);
        _exit(failures != 0);
    }
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    free(block);
    return done("forked_realloc");
}
