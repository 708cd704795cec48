"""The row of a rank that fails: seconds until the other has a typed error."""

from __future__ import annotations

from pathlib import Path

from failing import RANKS, TYPED, seconds_until_heard, shown
from rows import LOWER, Row

WORKER = Path(__file__).with_name("failing_rank.py")
NAME = "dead_rank_seconds"
BAR_S = 10
# Kinds of failures and trainers, as failing_rank.py has them.
CASES = (
    ("error", "ddp"),
    ("error", "zero_2"),
    ("killed", "ddp"),
    ("killed_with_workers", "ddp"),
)


def failure_rows(model_text: str, preload: Path, logs: Path) -> list[Row]:
    """The longest of :data:`CASES`; beside it the same processes without ``fail_together``."""
    row = Row(NAME, "s", LOWER, f"{model_text}; {RANKS} ranks on gloo; the longest of", bar=BAR_S)
    seconds = []
    for kind, trainer in CASES:
        name = f"{kind}_{trainer}"
        log = logs / f"failing_{name}.log"
        told, error = seconds_until_heard(WORKER, (kind, trainer), preload, log)
        alone, other = seconds_until_heard(WORKER, (kind, trainer, "untold"), preload, log)
        seconds.append(told if error.startswith(TYPED) else None)
        row.put(f"untold_{name}", alone)
        row.how += f" {name} {shown(told)} ({error}), without fail_together {shown(alone)} ({other});"
    row.ours = None if None in seconds else max(seconds)
    return [row]
