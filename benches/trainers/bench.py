#!/usr/bin/env python3
"""What sharing prompts in other people's trainers takes, and what it costs.

    target/trainers-venv/bin/python benches/trainers/bench.py                    # all rows
    target/trainers-venv/bin/python benches/trainers/bench.py --only 'lines_*'   # some rows

README.md in this directory describes the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benches"), str(HERE)]

import failure_rows
import offload_rows
import small_model
from lines import LINES_MAX, lines_row
from rows import LOWER, Row, measure

from dormouse.demo.process import Process, WorkerError

OUT = ROOT / "target" / "bench" / "trainers.json"
LOGS = ROOT / "target" / "bench" / "trainers"
PRELOAD = ROOT / "target" / "release" / "libdormouse_preload.so"

# Of examples/TRAINER: as the trainer is, and with shared prompts.
SCRIPTS = {
    "trl": ("grpo.py", "grpo_shared.py"),
    "deepspeed": ("train.py", "train_shared.py"),
    "verl": ("actor.py", "actor_shared.py"),
    "openrlhf": ("actor.py", "actor_shared.py"),
    "nemo_rl": ("policy.py", "policy_shared.py"),
}
# Rows that timing.py measures, and their bars.
RATIOS = {"adapter_overhead": 1.03, "unshared_over_dense": 1.03, "trl_over_plain": None}
# Prompt, responses, and the longest response.
SHAPES = ((512, 8, 64), (256, 8, 192), (1024, 16, 64))
PEER = "prefixgrouper"
CONTENDERS = (PEER, "awake", "asleep")
SPEED_BARS = {"awake": 0.95, "asleep": 1.0}
PEAK_BAR = 0.6
ROUNDS = 5
# Of a shape: no round but the first begins later.
SECONDS_MAX = 180.0
# Sums and gradients' norms of two ways that compute the same in FP32.
DISTANCE_MAX = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="patterns of row names, separated by commas")
    parser.add_argument(
        "--layers", type=int, default=small_model.LAYERS, help="of SmolLM2-135M, which has 30"
    )
    options = parser.parse_args()
    os.environ[small_model.VARIABLE] = str(options.layers)
    makers = [
        ((f"lines_{name}",), lambda name=name, scripts=scripts: [lines_row(name, *scripts)])
        for name, scripts in SCRIPTS.items()
    ]
    makers += [((name,), lambda name=name: [ratio_row(name)]) for name in RATIOS]
    makers += [(grouper_names(shape), lambda shape=shape: grouper_rows(shape)) for shape in SHAPES]
    makers += [
        (offload_rows.NAMES, lambda: offload_rows.offload_rows(model_text(), PRELOAD, LOGS))
    ]
    makers += [
        ((failure_rows.NAME,), lambda: failure_rows.failure_rows(model_text(), PRELOAD, LOGS))
    ]
    return measure(makers, options.only, OUT)


def model_text() -> str:
    return f"{os.environ[small_model.VARIABLE]} layers of SmolLM2-135M in FP32, 1 thread"


def ratio_row(name: str) -> Row:
    row = Row(name, "ratio", LOWER, model_text(), bar=RATIOS[name])
    environment = os.environ | {"LD_PRELOAD": str(PRELOAD)}
    command = [sys.executable, str(HERE / "timing.py"), name]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        row.note("ours", result.stderr.strip().splitlines()[-1])
        return row
    figures = json.loads(result.stdout.splitlines()[-1])
    one, other = figures["seconds"]
    row.how += (
        f"; {figures['batch']}; median of {figures['pairs']} interleaved pairs, {one:.2f} s and "
        f"{other:.2f} s; by CPU time {figures['cpu_ratio']:.3f}"
    )
    row.ours = figures["ratio"]
    return row


def grouper_names(shape: tuple[int, int, int]) -> list[str]:
    label = "x".join(map(str, shape))
    speeds = [f"speed_over_prefixgrouper_{label}_{state}" for state in SPEED_BARS]
    return [*speeds, f"peak_over_prefixgrouper_{label}_asleep"]


def grouper_rows(shape: tuple[int, int, int]) -> list[Row]:
    """Medians of ratios within rounds, in which each contender runs once."""
    *speeds, peak = (Row(name, "ratio", LOWER, model_text()) for name in grouper_names(shape))
    for row, bar in zip((*speeds, peak), (*SPEED_BARS.values(), PEAK_BAR), strict=True):
        row.bar = bar
    try:
        rounds = run_rounds(shape)
    except (WorkerError, DifferentError) as error:
        for row in (*speeds, peak):
            row.note("ours", error)
        return [*speeds, peak]
    for row, state in zip(speeds, SPEED_BARS, strict=True):
        row.ours = median_of(rounds, state, "seconds")
    peak.ours = median_of(rounds, "asleep", "peak_bytes")
    for name in CONTENDERS:
        seconds, cpu_seconds, peak_bytes = (
            median(each[name][figure] for each in rounds)
            for figure in ("seconds", "cpu_seconds", "peak_bytes")
        )
        text = (
            f"; {name} ({rounds[0][name]['mode']}) {seconds:.2f} s, of the CPU {cpu_seconds:.2f} s, "
            f"{peak_bytes / 2**30:.2f} GiB above idle"
        )
        for row in (*speeds, peak):
            row.how += text
    for row in (*speeds, peak):
        row.how += f"; median of {len(rounds)} interleaved rounds"
    return [*speeds, peak]


class DifferentError(RuntimeError):
    """Two contenders did not compute the same."""


def run_rounds(shape: tuple[int, int, int]) -> list[dict[str, dict]]:
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                Process(
                    [str(HERE / "contender.py"), name], preload=PRELOAD, log=LOGS / f"{name}.log"
                )
            )
            for name in CONTENDERS
        }
        for process in processes.values():
            process.ready()
            process.query("select", **dict(zip(("prompt", "responses", "length"), shape)))
        rounds: list[dict[str, dict]] = []
        start = time.monotonic()
        while len(rounds) < ROUNDS and (not rounds or time.monotonic() - start < SECONDS_MAX):
            # Another one goes first each time.
            order = [*CONTENDERS[len(rounds) % 3 :], *CONTENDERS[: len(rounds) % 3]]
            rounds.append({name: processes[name].query("run") for name in order})
    check_same(rounds[0])
    return rounds


def check_same(replies: dict[str, dict]) -> None:
    for figure in ("total", "gradient_norm"):
        wanted = replies[PEER][figure]
        for name, reply in replies.items():
            if not abs(reply[figure] - wanted) <= DISTANCE_MAX * abs(wanted):
                raise DifferentError(f"{figure} of {name} is {reply[figure]}, of {PEER} {wanted}")


def median_of(rounds: list[dict[str, dict]], name: str, figure: str) -> float:
    return median(each[name][figure] / each[PEER][figure] for each in rounds)


if __name__ == "__main__":
    sys.exit(main())
