"""What a stage holds while it carries out its list: measured in a call, planned in the next.

Figures are bytes per row of each kind of op, the largest of a call. They are those of memory that
the runtime allocates: elsewhere they are 0, and nothing is planned.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

import torch

from .. import queries
from ..errors import ArgumentError
from ..runtime import Runtime
from .part import Part

_log = logging.getLogger(__name__)

# Part of the room that no list is planned for: its rows are others than those that were measured.
ROOM_DIVISOR = 32
ROOM_BYTES_MAX = 1 << 62


@dataclass
class StageBytes:
    """As the planner's query has them: docs/queries/pipeline.md."""

    boundary: int = 0
    prefix_saved: int = 0
    prefix_asleep: int = 0
    prefix_working: int = 0
    microbatch_saved: int = 0
    microbatch_working: int = 0
    fixed: int = 0

    def raise_to(self, **found: float) -> None:
        """Takes larger figures over."""
        for name, value in found.items():
            setattr(self, name, max(getattr(self, name), math.ceil(value)))


class _Sample(NamedTuple):
    awake_bytes: int
    tracked_bytes: int
    """Asleep or awake: what falls asleep meanwhile does not change it."""
    peak_bytes: int
    """Awake, since the op began."""
    gradient_bytes: int


@dataclass(frozen=True)
class _Forward:
    """Of a prefix, until its backward."""

    saved_bytes: int
    peak_bytes: int
    """Of the op, beyond what was held before."""


@dataclass
class Held:
    """Figures of one stage. ``bytes`` are those of the last call that ended."""

    runtime: Runtime
    bytes: StageBytes | None = None
    _found: StageBytes = field(default_factory=StageBytes)
    _forwards: dict[tuple[int, int, int], _Forward] = field(default_factory=dict)

    def begin(self, parts: Sequence[Part], ops: Sequence[dict]) -> None:
        """Begins a list of ``ops``."""
        gradients = sum(part.gradient_bytes_max for part in parts)
        # One waits to be sent while the next op runs.
        message = max((op["sends"]["bytes"] for op in ops if op["sends"]), default=0)
        self._found, self._forwards = StageBytes(fixed=gradients + message), {}

    def end(self) -> None:
        """Ends a list: the next one is planned with its figures."""
        self.bytes = self._found if self._found.microbatch_saved > 0 else None

    @property
    def room_bytes(self) -> int:
        """What the budget leaves for a list. What is still falling asleep beyond it, allocations
        wait for."""
        used = self.runtime.stats()["allocated"]["current_bytes"]
        left = max(0, self.runtime.info()["alloc_budget_bytes"] - used)
        return left - left // ROOM_DIVISOR

    def measured(self, part: Part, op: dict, received: torch.Tensor | None, run: Callable):
        """Returns ``run(op, received)``, and measures it."""
        before = self._sample(part)
        self.runtime.begin_interval()
        sent = run(op, received)
        after = self._sample(part)
        # With experts on several ranks, the most of any: theirs have rows of all.
        rows = op["rows"]["end"] - op["rows"]["begin"]
        # It was made before the op, and is the op's.
        received_bytes = 0 if received is None else received.nbytes
        # Gradients of parameters are what a stage holds besides rows.
        grown_bytes = after.gradient_bytes - before.gradient_bytes
        saved_bytes = after.tracked_bytes - before.tracked_bytes - grown_bytes + received_bytes
        peak_bytes = after.peak_bytes - (before.awake_bytes + grown_bytes - received_bytes)
        if op["kind"] == "prefix_forward":
            self._forwards[_chunk_of(op)] = _Forward(saved_bytes, peak_bytes)
        elif op["kind"] == "prefix_backward":
            self._prefix_ended(part, op, rows, peak_bytes)
        else:
            if op["kind"] == "microbatch_forward":
                self._found.raise_to(microbatch_saved=saved_bytes / rows)
                peak_bytes -= saved_bytes
            self._found.raise_to(microbatch_working=peak_bytes / rows)
        return sent

    def _prefix_ended(self, part: Part, op: dict, rows: int, peak_bytes: int) -> None:
        forward = self._forwards.pop(_chunk_of(op))
        report = part.prefix_report(op)
        asleep_bytes = report["asleep_bytes_peak"]
        boundary_bytes = report["boundary_bytes"] * (1 + part.accumulator_ratio)
        awake_bytes = forward.saved_bytes - asleep_bytes
        # Each op has all of the prefix awake.
        working_bytes = max(forward.peak_bytes - awake_bytes, peak_bytes) - asleep_bytes
        self._found.raise_to(
            boundary=boundary_bytes / rows,
            prefix_saved=max(0, awake_bytes - boundary_bytes) / rows,
            prefix_asleep=asleep_bytes / rows,
            prefix_working=max(0, working_bytes) / rows,
        )

    def _sample(self, part: Part) -> _Sample:
        stats = self.runtime.stats()
        awake, asleep = stats["allocated"], stats["asleep"]
        return _Sample(
            awake["current_bytes"],
            awake["current_bytes"] + asleep["current_bytes"],
            stats["allocated_interval_peak_bytes"],
            part.gradient_bytes,
        )


def _chunk_of(op: dict) -> tuple[int, int, int]:
    """Returns the chunk of a prompt that an op of a list runs."""
    return op["part"], op["group"], op["index"]


class Gathered(NamedTuple):
    """Figures of all stages, the same on each rank of a model."""

    stage_bytes: list[dict]
    """Empty if a rank has none."""
    room_bytes: list[int]


def gathered(
    held: Held, stage: int, stages: int, largest: Callable[[list[int]], list[int]]
) -> Gathered:
    """Returns the figures of all stages. ``largest``: returns the largest of each of these numbers
    on any rank that decides with this one; collective of these."""
    names = [each.name for each in fields(StageBytes)]
    own = [0] * len(names)
    if held.bytes is not None:
        own = [getattr(held.bytes, name) for name in names]
    # Of the smallest room the largest complement.
    row = [int(held.bytes is None), ROOM_BYTES_MAX - min(held.room_bytes, ROOM_BYTES_MAX), *own]
    table = [0] * (len(row) * stages)
    table[len(row) * stage : len(row) * (stage + 1)] = row
    found = largest(table)
    rows = [found[len(row) * number : len(row) * (number + 1)] for number in range(stages)]
    rooms = [ROOM_BYTES_MAX - each[1] for each in rows]
    if any(each[0] for each in rows):
        return Gathered([], rooms)
    return Gathered([asdict(StageBytes(*each[2:])) for each in rows], rooms)


def planned_lists(groups: list[dict], figures: Gathered, **pipeline) -> dict:
    """Returns the planner's lists of all stages. As many groups and microbatches are in flight as
    every stage has room for. ``pipeline``: of the query."""
    pipeline["stage_bytes"] = figures.stage_bytes
    try:
        return queries.pipeline(groups, stage_room_bytes=figures.room_bytes, **pipeline)
    except ArgumentError as error:
        # Figures are the largest of a call; the list may still run.
        _log.warning("%s", error)
        bounds = {"live_groups_max": 1, "in_flight_max": 1}
        return queries.pipeline(groups, bounds=bounds, **pipeline)
