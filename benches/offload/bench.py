#!/usr/bin/env python3
"""Compares the offload runtime with its peers, on a machine without a GPU.

    .venv/bin/python benches/offload/bench.py                        # all rows
    .venv/bin/python benches/offload/bench.py --only 'nvme_read_*'   # some
    .venv/bin/python benches/offload/bench.py --deepspeed-python ~/deepspeed/bin/python

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from file_rows import Setting, makers
from ours import DRIVER, TARGET, Unavailable
from pairs import PAIRS_MIN
from rows import measure

OUT = TARGET / "bench" / "offload.json"
MIB = 1 << 20


def main() -> int:
    arguments = parse()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    if not DRIVER.exists():
        raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
    setting = Setting(
        arguments.dir,
        arguments.file_mib * MIB,
        arguments.pairs,
        arguments.threads,
        arguments.depth,
        arguments.deepspeed_python,
    )
    return measure(makers(setting), arguments.only, arguments.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="rows, comma-separated; * and ? match")
    parser.add_argument(
        "--dir", type=Path, default=TARGET / "bench" / "disk", help="where the file is, on a disk"
    )
    parser.add_argument("--file-mib", type=int, default=1536, help="a multiple of 256")
    parser.add_argument("--pairs", type=pairs, default=20, help=f"at least {PAIRS_MIN}")
    parser.add_argument("--threads", type=int, default=2, help="DORMOUSE_OFFLOAD_IO_THREADS")
    parser.add_argument("--depth", type=int, default=4, help="DORMOUSE_NVME_QUEUE_DEPTH")
    parser.add_argument("--deepspeed-python", help="a Python that has DeepNVMe")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def pairs(text: str) -> int:
    count = int(text)
    if count < PAIRS_MIN:
        raise argparse.ArgumentTypeError(f"{count}; at least {PAIRS_MIN} are accepted")
    return count


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unavailable as reason:
        sys.exit(f"bench: {reason}")
