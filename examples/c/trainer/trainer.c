/*
 * A trainer without Python: the gradients of one rollout group, on two pipeline stages in two
 * processes, through dormouse.h alone. Each stage runs half of the layers of a small model (model.h):
 *
 *   A  the prompt forward, once. What its layers save falls asleep in a file; K and V stay.
 *   B  the responses in microbatches, forward and backward. They read K and V of the prompt and add
 *      to the gradients gK and gV.
 *   C  the prompt backward, once, from gK and gV; what its layers saved wakes just in time.
 *
 * The planner lists what each stage runs, sends and receives (stage_list.h). At the end each stage
 * compares its gradients with those of a dense run, in which every response has the whole prompt.
 *
 *   cd examples/c/trainer
 *   cc -std=gnu99 -O2 -I../../../ffi/include trainer.c stage.c stage_list.c group.c model.c \
 *       -L../../../target/release -ldormouse -lm -o ../../../target/trainer
 *   cd ../../..
 *   LD_LIBRARY_PATH=target/release target/trainer /var/tmp
 *
 * `target/trainer DIRECTORY STAGE` lets a stage (0 or 1) fail in phase B, which ends the other one too.
 */
#define _GNU_SOURCE
#include "check.h"
#include "stage.h"

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/*
 * Starts the stages and waits for both; returns the highest exit code. Each is a new program: a process
 * that was forked after libdormouse was loaded cannot call it.
 */
static int start_stages(char *program, char *directory, const char *failing)
{
    int ends[STAGES], code = 0;
    pid_t children[STAGES];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
        perror("socketpair");
        return EXIT_PEER;
    }
    for (int s = 0; s < STAGES; s++) {
        char number[16], end[16], *child[] = {program, directory, (char *)failing, number, end, NULL};
        posix_spawn_file_actions_t actions;
        snprintf(number, sizeof number, "%d", s);
        snprintf(end, sizeof end, "%d", ends[s]);
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addclose(&actions, ends[1 - s]);
        int error = posix_spawnp(&children[s], program, &actions, NULL, child, environ);
        posix_spawn_file_actions_destroy(&actions);
        if (error != 0) {
            fprintf(stderr, "%s: %s\n", program, strerror(error));
            children[s] = 0;
            code = EXIT_PEER;
        }
    }
    close(ends[0]);
    close(ends[1]);
    for (int s = 0; s < STAGES; s++) {
        int status;
        if (children[s] > 0 && waitpid(children[s], &status, 0) == children[s]) {
            int own_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            code = own_code > code ? own_code : code;
        }
    }
    return code;
}

int main(int argc, char **argv)
{
    if (argc == 5) { /* a stage, as start_stages calls it */
        stage_run((uint32_t)atoi(argv[3]), atoi(argv[4]), argv[1], (uint32_t)atoi(argv[2]));
        return 0;
    }
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: %s DIRECTORY [FAILING_STAGE]\n", argv[0]);
        return EXIT_USAGE;
    }
    int code = start_stages(argv[0], argv[1], argc == 3 ? argv[2] : "-1");
    if (code == 0) {
        printf("both stages agree with the dense run\n");
    }
    return code;
}
