"""Rows of the bubble of pipelines whose stages are played by sleeping, over the simulated one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pipelines import LAYOUTS, bubble, measured_bubble, op_ns, pipeline_of
from ranks import left_by_ranks
from rows import LOWER, Row

from dormouse.queries import query

WORKER = Path(__file__).with_name("played_stage.py")
BAR = 1.1
ROUNDS = 5
SECONDS_MAX = 180.0
# As the adapter exchanges: a batch of messages blocks its stage until all of it is done.
MEETING = "batched"


def row_name(layout: str) -> str:
    return f"bubble_over_simulated_{layout}"


def bubble_row(layout: str, preload: Path, logs: Path) -> Row:
    stages, virtual_stages = LAYOUTS[layout]
    pipeline = pipeline_of(layout)
    lists = query("pipeline", pipeline=pipeline)
    times = query("pipeline_times", pipeline=pipeline, stages=lists, meeting=MEETING)
    nanoseconds = op_ns(times)
    simulated = bubble(times["makespan_ns"], list(map(sum, nanoseconds)))
    how = (
        f"{stages} processes carry out the planner's lists of {stages} stages of {virtual_stages} "
        f"parts, {len(pipeline['groups'])} groups in one stream; ops sleep for their planned time, "
        "messages are real, over gloo; bubble: step over the work of the busiest stage, less 1; "
        f"simulated: pipeline_times, {MEETING} as the adapter exchanges, messages without cost, "
        f"{simulated:.4f} of {times['makespan_ns'] / 1e9:.2f} s"
    )
    row = Row(row_name(layout), "ratio", LOWER, how, bar=BAR)
    request = {"stages": lists["stages"], "op_ns": nanoseconds, "rounds": ROUNDS}
    try:
        rounds = left_by_ranks(
            WORKER,
            (),
            preload,
            logs / f"{row.name}.log",
            count=stages,
            seconds_max=SECONDS_MAX,
            given=request,
        )
    except (OSError, subprocess.SubprocessError) as error:
        row.note("ours", error)
        return row
    found = measured_bubble(rounds)
    row.ours = found / simulated
    row.how += (
        f"; measured {found:.4f}, median of {ROUNDS} rounds; steps: "
        f"{(1 + found) / (1 + simulated):.4f}"
    )
    return row
