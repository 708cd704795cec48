"""Peaks of a pipeline stage while it carries out its lists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from dormouse.megatron import stage
from dormouse.megatron.held import ROOM_DIVISOR
from dormouse.runtime import Runtime

DEVICE = "device"


@contextlib.contextmanager
def read_peaks(runtime: Runtime, *, within_plan: bool = False) -> Iterator[list[dict]]:
    """Context that yields one record of each list carried out in it: its planned peak as the
    planner has it, ``measured`` bytes beyond those ``held`` before, and how long it ``waited_ns``
    for copies.

    ``within_plan``: a planned list has as little memory as it is accepted in, not the budget.
    """
    found: list[dict] = []
    own = stage.carry_out

    def carry_out(of_stage: dict, *arguments) -> None:
        planned_bytes = of_stage["peak"]["bytes"]
        runtime.reset_peaks()
        before = runtime.stats()
        held_bytes = before["allocated"]["current_bytes"]
        with contextlib.ExitStack() as stack:
            if within_plan and planned_bytes:
                budget_bytes = runtime.info()["alloc_budget_bytes"]
                stack.callback(runtime.set_budget, DEVICE, budget_bytes)
                least_bytes = -(-planned_bytes * ROOM_DIVISOR // (ROOM_DIVISOR - 1))
                runtime.set_budget(DEVICE, held_bytes + least_bytes)
            own(of_stage, *arguments)
        after = runtime.stats()
        record = {
            "measured": after["allocated"]["peak_bytes"] - held_bytes,
            "held": held_bytes,
            "waited_ns": after["stall_ns"] - before["stall_ns"],
        }
        found.append(of_stage["peak"] | record)

    with mock.patch.object(stage, "carry_out", carry_out):
        yield found
