#!/usr/bin/env python3
"""Histories of rollouts: what their drafts are worth beside others', and what they cost; filtered
tokens beside masked gradients.

    .venv/bin/python benches/history/bench.py                          # all rows
    .venv/bin/python benches/history/bench.py --only 'acceptance_*'    # some

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benches")]

import assignment
import dialogue_rows
import draft_rows
import filter_rows
from rows import measure

OUT = ROOT / "target" / "bench" / "history.json"
# Each module has its rows' names, and what measures them.
MAKERS = [*draft_rows.MAKERS, *filter_rows.MAKERS, *assignment.makers(), *dialogue_rows.MAKERS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names of rows, with wildcards, by commas")
    return measure(MAKERS, parser.parse_args().only, OUT)


if __name__ == "__main__":
    sys.exit(main())
