"""The row of a pipeline stage that fails: seconds until the other has a typed error."""

from __future__ import annotations

from pathlib import Path

from failing import TYPED, seconds_until_heard, shown
from rows import LOWER, Row

WORKER = Path(__file__).with_name("failing_stage.py")
NAME = "dead_rank_seconds"
BAR_S = 10
# As failing_stage.py has them.
KINDS = ("error", "killed")


def failure_row(preload: Path, logs: Path) -> Row:
    """The longest of :data:`KINDS`."""
    how = (
        "Megatron's schedule with shared prompts, two pipeline stages over gloo; "
        "stage 1 fails in the first backward of its list while stage 0 waits for the gradient; the "
        "longest of"
    )
    row = Row(NAME, "s", LOWER, how, bar=BAR_S)
    seconds = []
    for kind in KINDS:
        log = logs / f"failing_{kind}.log"
        told, error = seconds_until_heard(WORKER, (kind,), preload, log)
        seconds.append(told if error.startswith(TYPED) else None)
        row.how += f" {kind} {shown(told)} ({error});"
    row.ours = None if None in seconds else max(seconds)
    return row
