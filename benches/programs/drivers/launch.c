/* launch REPORT COMMAND...: runs the command and all it leaves behind; writes what the tree used.
 *
 * Peak memory passes through exec, so a program started by Python would inherit Python's peak.
 * This launcher is small, and as a subreaper it also counts orphans of the program. */
#include <errno.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "launch: usage: launch REPORT COMMAND...\n");
        return 2;
    }
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
        perror("launch: prctl");
        return 2;
    }
    pid_t child = fork();
    if (child < 0) {
        perror("launch: fork");
        return 2;
    }
    if (child == 0) {
        execvp(argv[2], argv + 2);
        perror(argv[2]);
        _exit(127);
    }
    int status = 0, one;
    pid_t ended;
    while ((ended = wait(&one)) > 0 || errno == EINTR)
        if (ended == child) status = one;
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    FILE *report = fopen(argv[1], "w");
    if (!report) {
        perror(argv[1]);
        return 2;
    }
    int code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    fprintf(report, "%d %ld.%06ld %ld.%06ld %ld\n", code, (long)used.ru_utime.tv_sec,
            (long)used.ru_utime.tv_usec, (long)used.ru_stime.tv_sec, (long)used.ru_stime.tv_usec,
            used.ru_maxrss);
    return fclose(report) != 0;
}
