/* One of two pipeline stages, in a process of its own. */
#ifndef STAGE_H
#define STAGE_H

#include <stdint.h>

enum { STAGES = 2 };

/*
 * Runs the step of stage `number` and compares its gradients with the dense run's. `to_peer`: a socket of the
 * other stage. `directory`: of the file that memory sleeps in. `failing`: the stage that fails in phase B, or
 * another number. Ends the process with a message and a code of check.h if anything is wrong.
 */
void stage_run(uint32_t number, int to_peer, const char *directory, uint32_t failing);

#endif
