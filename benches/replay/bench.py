#!/usr/bin/env python3
"""Optimizer updates of SmolLM2 on the recorded rollouts, dense and shared from one start.

    .venv/bin/python benches/replay/bench.py                    # 100 updates in FP32
    .venv/bin/python benches/replay/bench.py --dtype bf16       # under autocast

README.md in this directory describes the runs and the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benches"), str(HERE)]

import replay_figures as figures
from recorded import Size
from rows import measure
from updates import DTYPES, END_FILE, FP32, UPDATES_FILE, Settings

BENCH = ROOT / "target" / "bench"
OUT = BENCH / "replay.json"
PRELOAD = ROOT / "target" / "release" / "libdormouse_preload.so"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--dtype", choices=DTYPES, default=FP32, help="bf16: under autocast")
    parser.add_argument("--layers", type=int, default=30, help="of SmolLM2-135M, which has 30")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="the last of each prompt")
    parser.add_argument("--responses", type=int, default=4, help="of the recorded 8")
    parser.add_argument("--response-tokens", type=int, default=24, help="the first of each")
    options = parser.parse_args()
    size = Size(options.prompt_tokens, options.responses, options.response_tokens)
    directory = BENCH / "replay" / options.dtype
    settings = Settings(
        str(directory), options.updates, options.layers, options.dtype, asdict(size)
    )
    return measure([(figures.names(options.dtype), lambda: replay(settings))], "*", OUT)


def replay(settings: Settings) -> list:
    """Runs the updates, or those that an earlier run left, and writes the picture."""
    directory = Path(settings.directory)
    directory.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "LD_PRELOAD": str(PRELOAD),
        # The runtime that the preload library serves from.
        "DORMOUSE_LIB": str(PRELOAD.with_name("libdormouse.so")),
    }
    command = [sys.executable, str(HERE / "updates.py"), json.dumps(asdict(settings))]
    subprocess.run(command, env=environment, check=True)
    lines = (directory / UPDATES_FILE).read_text().splitlines()
    updates = [json.loads(line) for line in lines]
    end = json.loads((directory / END_FILE).read_text())
    picture = BENCH / f"replay-{settings.dtype}.svg"
    picture.write_text(figures.picture(settings, updates))
    print(f"bench: {picture.relative_to(ROOT)}", file=sys.stderr)
    return figures.rows(settings, updates, end)


if __name__ == "__main__":
    sys.exit(main())
