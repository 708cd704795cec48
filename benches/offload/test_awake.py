"""Processes that keep processors from halting."""

from __future__ import annotations

import os

from awake import kept_awake


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_of_no_priority_on_each_processor_and_none_afterwards() -> None:
    with kept_awake() as spinners:
        places = [os.sched_getaffinity(process) for process in spinners]
        assert places == [{processor} for processor in sorted(os.sched_getaffinity(0))]
        assert {os.sched_getscheduler(process) for process in spinners} == {os.SCHED_IDLE}
    assert not any(is_there(process) for process in spinners)
