"""Processors that never halt while something is timed.

A processor of a virtual machine that has nothing to do is its host's. To have it back when a thread
is to run again takes 0.1 ms as a rule and 7 to 18 ms at times, which no thread of the machine sees
but as lateness of its own. A GPU's host that trains has no processor asleep in every millisecond.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It runs where nothing else wants to: any thread that does takes the processor at once. A process
# of its own, which shares no memory that would have to be told of changed mappings.
SPIN = """
import os
os.sched_setaffinity(0, {%d})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while os.getppid() == %d:
    for _ in range(10_000_000):
        pass
"""


@contextmanager
def kept_awake() -> Iterator[list[int]]:
    """Has a process of no priority spin on each processor we may run on; gives their ids."""
    spinners = [
        subprocess.Popen(
            [sys.executable, "-c", SPIN % (processor, os.getpid())], stdout=subprocess.PIPE
        )
        for processor in sorted(os.sched_getaffinity(0))
    ]
    try:
        for spinner in spinners:
            if not spinner.stdout.readline():
                raise OSError("a processor could not be kept awake: see the error above")
        yield [spinner.pid for spinner in spinners]
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
            spinner.stdout.close()
