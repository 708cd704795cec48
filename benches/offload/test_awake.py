"""Processes that keep processors from halting."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from awake import kept_awake, processor_s

# On a machine full of other work a process of no priority waits long for its turn.
PATIENCE_S = 300


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def until(is_so: Callable[[], bool]) -> bool:
    """Whether it comes true."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def in_the_kernel_ticks(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[12])


def test_one_of_no_priority_on_each_processor_and_none_afterwards() -> None:
    with kept_awake() as awake:
        places = [os.sched_getaffinity(process) for process in awake.spinners]
        assert places == [{processor} for processor in sorted(os.sched_getaffinity(0))]
        assert {os.sched_getscheduler(process) for process in awake.spinners} == {os.SCHED_IDLE}
    assert not any(is_there(process) for process in awake.spinners)


def test_they_ask_the_scheduler_all_the_time_whether_somebody_else_is_to_run() -> None:
    with kept_awake() as awake:
        assert all(until(lambda one=one: in_the_kernel_ticks(one) > 3) for one in awake.spinners)


def test_what_a_process_had_is_not_of_others() -> None:
    with kept_awake() as awake, subprocess.Popen(["sleep", str(PATIENCE_S)]) as idle:
        before = [awake.of_others_s(process) for process in (os.getpid(), idle.pid)]
        spun_s = processor_s(os.getpid())
        while processor_s(os.getpid()) < spun_s + 1:
            pass
        after = [awake.of_others_s(process) for process in (os.getpid(), idle.pid)]
        idle.kill()
    beside_us, beside_idle = (late - early for early, late in zip(before, after, strict=True))
    assert beside_idle - beside_us == pytest.approx(1, abs=0.05)
