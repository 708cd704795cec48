/* Errors of a stage: a message with its number, and an exit code that says what failed. */
#ifndef CHECK_H
#define CHECK_H

#include <dormouse.h>

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* The program ends with the highest code of its stages: the cause, not what followed from it. */
enum { EXIT_PEER = 1, EXIT_USAGE, EXIT_LIBRARY, EXIT_WRONG, EXIT_ASKED };

extern uint32_t stage; /* the number of this process' stage */

/* Ends the stage. Its socket closes, so that the other stage ends too. */
__attribute__((format(printf, 2, 3), noreturn)) static inline void fail(int code, const char *format, ...)
{
    va_list arguments;
    fprintf(stderr, "stage %u: ", stage);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(code);
}

static inline void check(dormouse_status_t status, const char *what)
{
    if (status != DORMOUSE_OK) {
        fail(EXIT_LIBRARY, "%s: %s: %s", what, dormouse_get_status_string(status), dormouse_get_last_error());
    }
}

static inline void require(int is_true, const char *what)
{
    if (!is_true) {
        fail(EXIT_WRONG, "wrong: %s", what);
    }
}

#endif
