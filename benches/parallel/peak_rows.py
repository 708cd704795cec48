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
# Peer: what stages hold that have more memory than the plan needs.
FREE = "more memory"


def peak_row(preload: Path, logs: Path) -> Row:
    how = (
        f"Megatron's schedule with shared prompts, {STAGES} pipeline stages over gloo, four "
        "prompts of 400 to 1,500 tokens with four responses each; peak of the allocator while a "
        "stage carries out its list, beyond what it held before, over that of the plan, which "
        "knows bytes per row from a call with other prompts; each stage has as little memory as "
        "its plan is accepted in, so a list that needs more does not end"
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


def fill(row: Row, left: list[dict[str, list[dict]]]) -> None:
    """Puts the largest ratio of any stage and call into the row. ``left``: of each stage, the calls
    ``within`` the planned memory and those ``free`` to use more."""

    def ratio(call: dict) -> float:
        return call["measured"] / call["bytes"]

    within = [of_stage["within"] for of_stage in left]
    if all(call["measured"] > 0 for calls in within for call in calls):
        row.ours = max(ratio(call) for calls in within for call in calls)
    else:
        row.note("ours", "a stage measured no bytes")
    row.peers[FREE] = max(ratio(call) for of_stage in left for call in of_stage["free"])
    largest = [max(calls, key=ratio) for calls in within]
    row.how += "; by stage, measured and planned MB of the call with the largest ratio: "
    row.how += ", ".join(
        f"{call['measured'] / 1e6:.1f} and {call['bytes'] / 1e6:.1f}" for call in largest
    )
    smallest = min(ratio(call) for calls in within for call in calls)
    row.how += f"; smallest ratio {smallest:.3f}; longest wait for copies in a list: "
    waited_ns = {
        name: max(call["waited_ns"] for of_stage in left for call in of_stage[name])
        for name in ("within", "free")
    }
    row.how += (
        f"{waited_ns['within'] / 1e6:.0f} ms, with more memory {waited_ns['free'] / 1e6:.0f} ms"
    )
