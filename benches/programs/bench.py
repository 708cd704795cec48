#!/usr/bin/env python3
"""Runs other people's programs under the preload library and without it.

    .venv/bin/python benches/programs/bench.py --check             # same results? one run each
    .venv/bin/python benches/programs/bench.py                     # all rows
    .venv/bin/python benches/programs/bench.py --programs 'git,cpython.*' --only '*_over_glibc_*'

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from heap_rows import heap_makers
from program_rows import program_makers
from rows import measure
from running import TARGET, Libraries, Unavailable, build

OUT = TARGET / "bench" / "programs.json"


def main() -> int:
    arguments = parse()
    libraries = Libraries(arguments.libs.resolve())
    libraries.settings()
    build()
    pairs = 1 if arguments.check else arguments.pairs
    makers = program_makers(libraries, arguments.programs, pairs, arguments.check)
    if not arguments.check:
        makers += heap_makers(libraries, arguments.pairs, arguments.forks)
    status = measure(makers, arguments.only, arguments.out)
    return status or int(arguments.check and failed(arguments.out))


def failed(out: Path) -> bool:
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    return not rows["programs_failed"]["met"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="rows, comma-separated; * and ? match")
    parser.add_argument("--programs", default="*", help="programs, in the same way")
    parser.add_argument("--check", action="store_true", help="results alone, of one run each")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved runs of each program")
    parser.add_argument("--forks", type=int, default=10_000, help="children of fork_hangs")
    parser.add_argument("--libs", type=Path, default=TARGET / "release")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unavailable as reason:
        sys.exit(f"bench: {reason}")
