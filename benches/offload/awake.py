"""Processors that never halt while something is timed, and how much of them others had.

A processor of a virtual machine that has nothing to do is its host's. To have it back when a thread
is to run again takes 0.1 ms as a rule and 7 to 18 ms at times, which no thread of the machine sees
but as lateness of its own. A GPU's host that trains has no processor asleep in every millisecond.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# It runs where nothing else wants to. A process of its own, which shares no memory that would have to
# be told of changed mappings. It yields all the time: a thread that has just woken and had more than
# its share waits until the scheduler chooses again, which for one that only spins is at a tick, 4 ms
# later.
SPIN = """
import os
os.sched_setaffinity(0, {%d})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while os.getppid() == %d:
    for _ in range(1_000_000):
        os.sched_yield()
"""


@dataclass(frozen=True)
class Awake:
    """The processes that keep processors awake."""

    spinners: list[int]

    def of_others_s(self, process: int) -> float:
        """Processor time that neither `process` nor the spinners had, since some time on: that of
        other processes, and what a virtual machine's host took. The processors never idle, so it is
        what is missing."""
        ours_s = sum(processor_s(one) for one in (*self.spinners, process))
        return len(self.spinners) * time.monotonic() - ours_s


def processor_s(process: int) -> float:
    """What all threads of a process have had. Without what was stolen, where the kernel knows it."""
    return time.clock_gettime(~process << 3 | 2)  # Linux's clock_getcpuclockid


@contextmanager
def kept_awake() -> Iterator[Awake]:
    """Has a process of no priority spin on each processor we may run on."""
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
        yield Awake([spinner.pid for spinner in spinners])
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
            spinner.stdout.close()
