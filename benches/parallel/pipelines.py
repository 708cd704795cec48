"""Pipelines that are planned and played, and the bubble of a run; pure."""

from __future__ import annotations

from statistics import median

# Of a row on one part. Sleeps of tens of milliseconds: what is measured is the order, not the clock.
FORWARD_NS_PER_ROW = 50_000
BACKWARD_OVER_FORWARD = 2
# Rows of a prefix, and of its microbatches.
GROUPS = (
    (1200, (400, 400, 500)),
    (600, (500, 300, 400, 400, 300)),
    (1600, (400, 500, 400, 300)),
    (900, (300, 400)),
)
# The adapter's chunks have at least the rows of a microbatch.
CHUNK_ROWS_MIN = max(rows for _, microbatches in GROUPS for rows in microbatches)
# Of a row in a message: 256 numbers in BF16.
COLUMNS = 256
NUMBER_BYTES = 2
# Stages, and parts of each.
LAYOUTS = {"pp2": (2, 1), "pp4": (4, 1), "interleaved": (4, 2)}


def pipeline_of(layout: str, chunks: int) -> dict:
    """Returns a pipeline as the query takes it, in one stream, as the adapter of Megatron plans.
    ``chunks``: of a prefix."""

    def costs(rows: int) -> tuple[int, int]:
        forward = rows * FORWARD_NS_PER_ROW
        return forward, BACKWARD_OVER_FORWARD * forward

    groups = []
    for prefix, microbatches in GROUPS:
        forward, backward = costs(prefix)
        described = []
        for rows in microbatches:
            each_forward, each_backward = costs(rows)
            described.append(
                {"rows": rows, "forward_ns": each_forward, "backward_ns": each_backward}
            )
        groups.append(
            {
                "prefix_rows": prefix,
                "forward": {"linear_ns": forward},
                "backward": {"linear_ns": backward},
                "microbatches": described,
            }
        )
    stages, virtual_stages = LAYOUTS[layout]
    row_bytes = {"activation": COLUMNS * NUMBER_BYTES}
    row_bytes |= dict.fromkeys(("boundary", "prefix_saved", "microbatch_saved"), 0)
    return {
        "stages": stages,
        "virtual_stages": virtual_stages,
        "groups": groups,
        "order": "stream",
        "chunks": chunks,
        "chunk_rows_min": CHUNK_ROWS_MIN,
        "row_bytes": row_bytes,
    }


def op_ns(times: dict) -> list[list[int]]:
    """Returns the time of each op of each stage, of the answer to ``pipeline_times``."""
    return [[op["end_ns"] - op["start_ns"] for op in stage] for stage in times["ops"]]


def bubble(makespan: float, busy: list[float]) -> float:
    """Returns the idle time of the busiest stage over its work."""
    return makespan / max(busy) - 1


def measured_bubble(stages: list[list[dict]]) -> float:
    """Returns the median over rounds. ``stages``: of each stage the rounds that it left."""
    found = []
    for of_round in zip(*stages, strict=True):
        makespan = max(each["end"] for each in of_round) - min(each["start"] for each in of_round)
        found.append(bubble(makespan, [each["busy"] for each in of_round]))
    return median(found)
