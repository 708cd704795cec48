"""Rows of token filtering: seconds, bytes and distance of gradients at shares of dropped rows.

Input: SmolLM2-135M in FP32, one sequence of docs/method.md, one thread; kept are the rows with the
largest losses, and in every way the loss is that of kept tokens. Peers: *masked*, whose gradients
are multiplied by the mask at every layer's output, and at K and V; *loss alone*, which leaves
dropped tokens out of the loss and nothing else. Seconds are CPU seconds of one thread, which a busy
machine changes less than the clock's: the least of runs in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches"))

from rows import LOWER, Makers, Row  # noqa: E402

RUN = Path(__file__).with_name("filtered.py")
ASLEEP_RUN = Path(__file__).with_name("filter_asleep.py")
PRELOAD = ROOT / "target" / "release" / "libdormouse_preload.so"
PERCENT = (0, 20, 40, 60)
BACKWARD, STEP, BYTES, DISTANCE = "backward", "step", "saved_bytes", "distance"
# Published for 40 %: -35 % of the backward, -22 % of the step (arXiv 2502.00340).
BARS = {(BACKWARD, 40): 0.7, (STEP, 40): 0.85}
SECONDS_MAX = 3600


def names(percent: int) -> list[str]:
    return [
        *(f"filter_{what}_over_masked_{percent}" for what in (BACKWARD, STEP)),
        f"filter_{BYTES}_over_whole_{percent}",
        f"filter_{DISTANCE}_{percent}",
    ]


def rows(percent: int) -> list[Row]:
    """Measures one share in a process of its own."""
    command = [sys.executable, str(RUN), str(percent)]
    run = subprocess.run(
        command, stdout=subprocess.PIPE, timeout=SECONDS_MAX, check=True, text=True
    )
    figures = json.loads(run.stdout)
    how = (
        f"SmolLM2-135M, one sequence of {figures['tokens']} tokens, FP32, one thread; least CPU "
        f"seconds of {figures['repeats']} interleaved runs"
    )
    backward, step, saved, distance = names(percent)
    found = []
    for name, what in ((backward, BACKWARD), (step, STEP)):
        seconds = {way: figures["seconds"][way][what] for way in ("filtered", "masked", "loss")}
        masked = seconds["masked"]
        own = ", ".join(f"{way} {each:.2f}" for way, each in seconds.items())
        row = Row(name, "ratio", LOWER, f"{how}: {own}", bar=BARS.get((what, percent)))
        row.ours = seconds["filtered"] / masked
        row.peers = {"loss alone": seconds["loss"] / masked}
        found.append(row)
    whole = figures["saved_bytes"]
    row = Row(saved, "ratio", LOWER, f"saved activations that have rows, of {whole / 1e6:.0f} MB")
    row.ours = figures["kept_bytes"] / whole if whole else 1.0
    found.append(row)
    what = "relative L2 distance to the gradient of the same loss without filtering"
    found.append(Row(distance, "ratio", LOWER, what, ours=figures["distance"]))
    return found


def maker(percent: int) -> tuple[list[str], Callable[[], list[Row]]]:
    return names(percent), partial(rows, percent)


ASLEEP = {percent: f"filter_asleep_bytes_over_whole_{percent}" for percent in PERCENT if percent}


def asleep_rows() -> list[Row]:
    """Bytes asleep in a shared step, of one process."""
    command = [sys.executable, str(ASLEEP_RUN), *map(str, PERCENT)]
    env = {**os.environ, "LD_PRELOAD": str(PRELOAD)}
    run = subprocess.run(
        command, stdout=subprocess.PIPE, timeout=SECONDS_MAX, check=True, text=True, env=env
    )
    figures = {int(percent): asleep for percent, asleep in json.loads(run.stdout).items()}
    how = (
        f"SmolLM2-135M, FP32, a prompt of 512 tokens and four responses of 384, graphs kept; of "
        f"{figures[0] / 1e6:.0f} MB asleep with nothing dropped"
    )
    return [
        Row(name, "ratio", LOWER, how, ours=figures[percent] / figures[0])
        for percent, name in ASLEEP.items()
    ]


MAKERS: Makers = [
    *(maker(percent) for percent in PERCENT),
    (list(ASLEEP.values()), asleep_rows),
]

