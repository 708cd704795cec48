"""The row of what it costs that ranks compare their plans in each call."""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path

from ranks import left_by_ranks
from rows import LOWER, Row

WORKER = Path(__file__).with_name("compared_stage.py")
NAME = "plans_compared_ms"
STAGES = 4
BATCH = {"prompts": 32, "responses": 16, "prompt_tokens": 2048, "response_tokens": 1024}
SECONDS_MAX = 120.0


def compared_row(preload: Path, logs: Path) -> Row:
    """The median of rounds, of which the slowest stage counts."""
    how = (
        f"{STAGES} pipeline stages over gloo compare a call of {BATCH['prompts']} prompts of "
        f"{BATCH['prompt_tokens']} tokens with {BATCH['responses']} responses of "
        f"{BATCH['response_tokens']} tokens each: digests of all tokens, and their exchange"
    )
    row = Row(NAME, "ms", LOWER, how)
    log = logs / f"{NAME}.log"
    try:
        left = left_by_ranks(
            WORKER, (), preload, log, count=STAGES, seconds_max=SECONDS_MAX, given=BATCH
        )
    except (OSError, subprocess.SubprocessError) as error:
        row.note("ours", error)
        return row
    row.ours = 1e3 * statistics.median(map(max, zip(*left, strict=True)))
    return row
