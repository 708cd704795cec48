"""The row of a pipeline stage's peak: that of the allocator over the planned one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ranks import left_by_ranks
from rows import LOWER, Row

WORKER = Path(__file__).with_name("peak_stage.py")
NAME = "peak_over_planned_pp4"
BAR = 1.03
STAGES = 4
SECONDS_MAX = 300.0


def peak_row(preload: Path, logs: Path) -> Row:
    how = (
        f"Megatron's schedule with shared prompts, {STAGES} pipeline stages over gloo, four "
        "prompts of 400 to 1,500 tokens with four responses each; peak of the allocator while a "
        "stage carries out its list, beyond what it held before, over that of the plan, which "
        "knows bytes per row from a call with other prompts"
    )
    row = Row(NAME, "ratio", LOWER, how, bar=BAR)
    try:
        log = logs / f"{NAME}.log"
        left = left_by_ranks(WORKER, (), preload, log, count=STAGES, seconds_max=SECONDS_MAX)
    except (OSError, subprocess.SubprocessError) as error:
        row.note("ours", error)
        return row
    fill(row, left)
    return row


def fill(row: Row, left: list[list[dict]]) -> None:
    """Puts the largest ratio of any stage and call into the row. ``left``: calls of each stage."""
    ratios = [[each["measured"] / each["planned"] for each in of_stage] for of_stage in left]
    row.ours = max(map(max, ratios))
    row.how += (
        "; by stage, measured and planned MB of the call with the largest ratio: "
        + ", ".join(
            f"{each['measured'] / 1e6:.1f} and {each['planned'] / 1e6:.1f}"
            for of_stage in left
            for each in [max(of_stage, key=lambda it: it["measured"] / it["planned"])]
        )
    )
    row.how += f"; smallest ratio {min(map(min, ratios)):.3f}"
