#!/usr/bin/env python3
"""Steps for an hour: does anything grow that should not?

    .venv/bin/python benches/soak/soak.py --minutes 60

README.md in this directory describes runs, samples and bars.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches"))

from flat import judge
from rows import Row, table, write
from subjects import Demo, Engine, Subject

TARGET = ROOT / "target"
SAMPLE_SECONDS = 10


def main() -> int:
    arguments = parse()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    makers = {
        Demo.name: lambda: Demo(
            arguments.release / "libdormouse_preload.so",
            arguments.dir,
            arguments.out.with_name("soak-demo.log"),
        ),
        Engine.name: lambda: Engine(
            arguments.release / "examples" / "soak_steps", arguments.dir
        ),
    }
    stop = threading.Event()
    with ThreadPoolExecutor() as threads:
        soaks = [
            threads.submit(soak, makers[name], arguments.minutes * 60, arguments.out, stop)
            for name in arguments.only.split(",")
        ]
        rows = [row for each in soaks for row in each.result()]
    write(rows, arguments.out)
    print(table(rows))
    return 0 if all(row.met for row in rows) else 1


def soak(make, seconds: float, out: Path, stop: threading.Event) -> list[Row]:
    """Runs one subject to the end, or until another one fails; its samples are kept as they come."""
    try:
        with closing(make()) as subject:
            return _soak(subject, seconds, out, stop)
    except BaseException:
        stop.set()
        raise


def _soak(subject: Subject, seconds: float, out: Path, stop: threading.Event) -> list[Row]:
    until = time.monotonic() + seconds
    samples: list[dict[str, int]] = []
    steps = 0
    with out.with_name(f"soak-{subject.name}.jsonl").open("w") as kept:
        while time.monotonic() < until and not stop.is_set():
            steps += subject.run(SAMPLE_SECONDS)
            samples.append(subject.figures())
            kept.write(json.dumps({"steps": steps, **samples[-1]}) + "\n")
            kept.flush()
    minutes = seconds / 60
    return judge(subject.name, f"{steps:,} {subject.about}, {minutes:.3g} minutes", samples)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", default=f"{Demo.name},{Engine.name}", help="comma-separated")
    parser.add_argument("--release", type=Path, default=TARGET / "release", help="what was built")
    parser.add_argument(
        "--dir", type=Path, default=TARGET / "bench" / "disk", help="where files are, on a disk"
    )
    parser.add_argument("--out", type=Path, default=TARGET / "bench" / "soak.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
