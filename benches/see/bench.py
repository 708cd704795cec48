#!/usr/bin/env python3
"""Seeing and installing: what recording costs, how fast a page opens, how large the wheel is.

    .venv/bin/python benches/see/bench.py                    # all rows
    .venv/bin/python benches/see/bench.py --only 'page_*'    # some

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches"))

import timeline_rows
import top_rows
import wheel_rows
from rows import measure

OUT = ROOT / "target" / "bench" / "see.json"
# Each file of rows adds its own here.
MAKERS = [*timeline_rows.MAKERS, *top_rows.MAKERS, *wheel_rows.MAKERS]


def main() -> int:
    return measure(MAKERS, parse().only, OUT)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names of rows, with wildcards, by commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
