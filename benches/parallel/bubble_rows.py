"""Rows of pipelines whose stages are played by sleeping: the bubble over the simulated one, and the
step over that with whole prompts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import median
from typing import NamedTuple

import on_cpu  # noqa: F401
from pipelines import CHUNK_ROWS_MIN, GROUPS, LAYOUTS, bubble, measured_bubble, op_ns, pipeline_of
from ranks import left_by_ranks
from rows import LOWER, Row

from dormouse.megatron import chunks
from dormouse.queries import query

WORKER = Path(__file__).with_name("played_stage.py")
BAR = 1.1
ROUNDS = 5
SECONDS_MAX = 180.0
# As the adapter exchanges: a batch of messages blocks its stage until all of it is done.
MEETING = "batched"
CHUNKS_LAYOUT = "pp4"
CHUNKS_NAME = f"step_over_whole_prompts_{CHUNKS_LAYOUT}"


class _Played(NamedTuple):
    makespan_s: float
    """Simulated."""
    simulated: float
    """The simulated bubble."""
    measured: float
    """The median bubble of the rounds."""
    step_s: float
    """The median of the rounds."""


def row_name(layout: str) -> str:
    return f"bubble_over_simulated_{layout}"


def bubble_row(layout: str, preload: Path, logs: Path) -> Row:
    stages, virtual_stages = LAYOUTS[layout]
    how = (
        f"{stages} processes carry out the planner's lists of {stages} stages of {virtual_stages} "
        f"parts, {len(GROUPS)} groups in one stream, prompts in up to {_chosen(layout)} chunks, as "
        "the adapter chooses; ops sleep for their planned time, messages are real, over gloo; "
        "bubble: step over the work of the busiest stage, less 1; simulated: pipeline_times, "
        f"{MEETING} as the adapter exchanges, messages without cost"
    )
    row = Row(row_name(layout), "ratio", LOWER, how, bar=BAR)
    try:
        found = _played(layout, _chosen(layout), preload, logs / f"{row.name}.log")
    except (OSError, subprocess.SubprocessError) as error:
        row.note("ours", error)
        return row
    row.ours = found.measured / found.simulated
    row.how += (
        f", {found.simulated:.4f} of {found.makespan_s:.2f} s; measured {found.measured:.4f}, median "
        f"of {ROUNDS} rounds; steps: {(1 + found.measured) / (1 + found.simulated):.4f}"
    )
    return row


def chunks_row(preload: Path, logs: Path) -> Row:
    how = (
        f"the lists of bubble_over_simulated_{CHUNKS_LAYOUT}, with prompts in up to "
        f"{_chosen(CHUNKS_LAYOUT)} chunks over whole ones: medians of {ROUNDS} rounds"
    )
    row = Row(CHUNKS_NAME, "ratio", LOWER, how)
    try:
        cut, whole = (
            _played(CHUNKS_LAYOUT, count, preload, logs / f"{row.name}_{count}.log")
            for count in (_chosen(CHUNKS_LAYOUT), 1)
        )
    except (OSError, subprocess.SubprocessError) as error:
        row.note("ours", error)
        return row
    row.ours = cut.step_s / whole.step_s
    row.how += (
        f", {cut.step_s:.3f} and {whole.step_s:.3f} s; bubbles {cut.measured:.3f} and "
        f"{whole.measured:.3f}; simulated {cut.makespan_s:.3f} and {whole.makespan_s:.3f} s"
    )
    return row


def _chosen(layout: str) -> int:
    """Returns the adapter's number of chunks."""
    stages, virtual_stages = LAYOUTS[layout]
    rows = [[prefix, *microbatches] for prefix, microbatches in GROUPS]
    return chunks.chosen(rows, CHUNK_ROWS_MIN, stages=stages, virtual_stages=virtual_stages)


def _played(layout: str, count: int, preload: Path, log: Path) -> _Played:
    pipeline = pipeline_of(layout, count)
    lists = query("pipeline", pipeline=pipeline)
    times = query("pipeline_times", pipeline=pipeline, stages=lists, meeting=MEETING)
    nanoseconds = op_ns(times)
    left = left_by_ranks(
        WORKER,
        (),
        preload,
        log,
        count=LAYOUTS[layout][0],
        seconds_max=SECONDS_MAX,
        given={"stages": lists["stages"], "op_ns": nanoseconds, "rounds": ROUNDS},
    )
    steps = [
        max(each["end"] for each in of_round) - min(each["start"] for each in of_round)
        for of_round in zip(*left, strict=True)
    ]
    return _Played(
        times["makespan_ns"] / 1e9,
        bubble(times["makespan_ns"], list(map(sum, nanoseconds))),
        measured_bubble(left),
        median(steps),
    )
