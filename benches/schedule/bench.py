#!/usr/bin/env python3
"""Plans: what making them takes, how good they are, how near what they predict is.

    .venv/bin/python benches/schedule/bench.py                    # all rows
    .venv/bin/python benches/schedule/bench.py --only 'plan_*'    # some

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches"))

import planner_rows
import step_rows
from rows import measure

OUT = ROOT / "target" / "bench" / "schedule.json"


def main() -> int:
    return measure(planner_rows.MAKERS + step_rows.MAKERS, parse().only, OUT)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names of rows, with wildcards, by commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
