"""Rows of gradients of Megatron's schedule with shared prompts, and of the bytes its ranks send, over
all layouts of python/tests_megatron/case_table.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ranks import left_by_ranks
from rows import LOWER, Row

WORKER = Path(__file__).with_name("layouts.py")
RANKS = (1, 2, 4)
DTYPES = ("float32", "bfloat16")
BYTES = "exchanged_over_planned_bytes"
BARS = {"gradient_ratio_worst": 4.0, "gradient_ratio_p99": 2.5}
NAMES = (BYTES, *BARS)
# Of a worker, which runs each layout three times, with up to 32 calls.
SECONDS_MAX = 3600.0


def empty_rows() -> list[Row]:
    """Returns the rows of :data:`NAMES`, without figures."""
    how = "distance to the FP64 truth over that of Megatron's own run"
    sent = "bytes that stages send in their lists, and context-parallel ranks in passes of prompts"
    exchanged = Row(BYTES, "ratio", LOWER, sent, bar=1)
    return [exchanged, *(Row(name, "ratio", LOWER, how, bar=bar) for name, bar in BARS.items())]


def gradient_rows(preload: Path, logs: Path) -> list[Row]:
    rows = empty_rows()
    found: list[dict] = []
    try:
        for count in RANKS:
            for dtype in DTYPES:
                log = logs / f"layouts_{count}_{dtype}.log"
                left = left_by_ranks(
                    WORKER, (dtype,), preload, log, count=count, seconds_max=SECONDS_MAX
                )
                found += [each for of_rank in left for each in of_rank]
    except (OSError, subprocess.SubprocessError) as error:
        for row in rows:
            row.note("ours", error)
        return rows
    fill(rows, found)
    return rows


def fill(rows: list[Row], found: list[dict]) -> None:
    """Puts the figures of :data:`NAMES` into their rows."""
    exchanged, worst, p99 = rows
    pairs = [pair for each in found for pair in each["bytes"]]
    # A stage that sends less is as wrong as one that sends more.
    ratios = [max(sent / planned, planned / sent) for planned, sent in pairs]
    exchanged.ours = max(ratios)
    exchanged.how += (
        f", over those planned, the ratio farthest from 1 of {len(pairs)}: "
        f"{sum(sent for _, sent in pairs):,} bytes sent, {sum(each for each, _ in pairs):,} planned"
    )
    of_all = max(each["ratio_global"] for each in found)
    noise = max(each["dense_global"] for each in found)
    outside = [f"{each['name']}, {each['dtype']}" for each in found if not each["within_bounds"]]
    for row, figure in ((worst, "ratio_max"), (p99, "ratio_p99")):
        if outside:
            row.note("ours", f"outside other bounds of docs/method.md §10: {'; '.join(outside)}")
            continue
        case = max(found, key=lambda each: each[figure])
        row.ours = case[figure]
        row.how += (
            f", by parameter: {'largest' if row is worst else '99th percentile'} of the worst of "
            f"{len(found)} layouts and dtypes on each rank, calls pooled: {case['name']}, "
            f"{case['dtype']}, {case['worst_parameter']}; over all parameters at most "
            f"{of_all:.2f}, where Megatron's own run is at most {noise:.2g} from the truth"
        )
