"""Rows of what planning a step of many ranks takes: the example ``plan_ranks`` of ``parallel/``."""

from __future__ import annotations

from examples import example
from rows import LOWER, Row

SECONDS, BYTES = NAMES = ("plan_4096_ranks_seconds", "plan_4096_ranks_peak_bytes")
SECONDS_BAR = 10
BYTES_BAR = 4e9


def planner_rows() -> list[Row]:
    found = example("plan_ranks")
    how = (
        f"plan_ranks: {found['ranks']} ranks: {found['replicas']} replicas of {found['stages']} "
        f"stages of {found['tensor_parallel']} tensor-parallel ranks, which have one list; "
        f"{found['sequences']} responses to {found['groups']} prompts in up to {found['chunks']} "
        f"chunks, as the adapter of Megatron asks, {found['ops']} ops, in rooms that took up to "
        f"{found['lists_tried']} lists of a replica; in one process and one thread all shares, "
        "parts, plans of groups and lists of stages; a rank plans its own replica alone, "
        f"{found['replica_seconds']:.3f} s for the slowest"
    )
    return [
        Row(SECONDS, "s", LOWER, how, found["seconds"], SECONDS_BAR),
        Row(
            BYTES, "bytes", LOWER, f"{how}; most resident bytes", found["peak_bytes"], BYTES_BAR
        ),
    ]
