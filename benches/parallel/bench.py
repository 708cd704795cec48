#!/usr/bin/env python3
"""Parallel dimensions: Megatron's schedule with shared prompts, pipelines, and their plans.

    target/megatron-venv/bin/python benches/parallel/bench.py                     # all rows
    target/megatron-venv/bin/python benches/parallel/bench.py --only 'bubble_*'   # some

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("python", "benches", "examples/megatron")]

import bubble_rows
import compared_rows
import failure_rows
import gradient_rows
import peak_rows
import planner_rows
from lines import lines_row
from pipelines import LAYOUTS
from rows import measure

OUT = ROOT / "target" / "bench" / "parallel.json"
LOGS = ROOT / "target" / "bench" / "parallel"
PRELOAD = ROOT / "target" / "release" / "libdormouse_preload.so"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="patterns of row names, separated by commas")
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    makers = [(("lines_megatron",), lambda: [lines_row("megatron", "train.py", "train_shared.py")])]
    makers += [
        (
            (bubble_rows.row_name(layout),),
            lambda layout=layout: [bubble_rows.bubble_row(layout, PRELOAD, LOGS)],
        )
        for layout in LAYOUTS
    ]
    makers += [
        ((bubble_rows.CHUNKS_NAME,), lambda: [bubble_rows.chunks_row(PRELOAD, LOGS)]),
        (gradient_rows.NAMES, lambda: gradient_rows.gradient_rows(PRELOAD, LOGS)),
        ((peak_rows.NAME,), lambda: [peak_rows.peak_row(PRELOAD, LOGS)]),
        ((failure_rows.NAME,), lambda: [failure_rows.failure_row(PRELOAD, LOGS)]),
        ((compared_rows.NAME,), lambda: [compared_rows.compared_row(PRELOAD, LOGS)]),
        (planner_rows.NAMES, planner_rows.planner_rows),
    ]
    return measure(makers, options.only, OUT)


if __name__ == "__main__":
    sys.exit(main())
