#!/usr/bin/env python3
"""Plans: what making them takes, how good they are, how near what they predict is.

    .venv/bin/python benches/schedule/bench.py                    # all rows
    .venv/bin/python benches/schedule/bench.py --only 'plan_*'    # some

README.md beside it says what is measured and how.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches"))

import planner_rows
import step_rows
from rows import Row, table, write

OUT = ROOT / "target" / "bench" / "schedule.json"


def main() -> int:
    arguments = parse()
    patterns = arguments.only.split(",")
    rows: list[Row] = []
    for names, measure in planner_rows.MAKERS + step_rows.MAKERS:
        if not any(fnmatch(name, pattern) for name in names for pattern in patterns):
            continue
        print(f"bench: {', '.join(names)}", file=sys.stderr, flush=True)
        rows += measure()
        # Written as they come: a run that is ended early keeps what it has.
        write(rows, OUT)
    if not rows:
        print(f"no row is called {arguments.only}", file=sys.stderr)
        return 2
    print(table(rows))
    for row in rows:
        print(f"{row.name}: {row.how}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names of rows, with wildcards, by commas")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
