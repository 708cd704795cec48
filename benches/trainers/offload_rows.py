"""Rows of activation offloading alone: a step in ``dormouse.offload`` over the plain step."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from statistics import median

from rows import LOWER, Row

from dormouse.demo.process import Process, WorkerError

HERE = Path(__file__).parent
NAMES = ("offload_step_over_plain", "offload_peak_over_plain")
STEP_BAR = 1.05
# Of the saved bytes outside the last layers, in the file.
FILE_SHARE_MIN = 0.9
BASE, OURS = "plain", "offload"
PEERS = ("plain_libc", "offload_by_copy", "torch_save_on_cpu")
# Without the preload library: dormouse's heap serves all others.
UNLOADED = ("plain_libc",)
# Peers that cannot run here, with the reason.
MISSING = {
    "trl_offload_activations": "TRL's context leaves tensors of the CPU where they are",
    "deepspeed_cpu_checkpointing": "DeepSpeed is not in the environment",
}
BATCH = {"rows": 2, "length": 512}
ROUNDS = 10
# The peers run in the first rounds alone.
PEER_ROUNDS = 2
# No round but the first begins later.
SECONDS_MAX = 300.0


def offload_rows(model_text: str, preload: Path, logs: Path) -> list[Row]:
    """Medians of ratios within rounds, in which plain and offloaded steps run once each."""
    text = f"{model_text}; batch of {BATCH['rows']} × {BATCH['length']} tokens"
    step, peak = rows = [Row(name, "ratio", LOWER, text) for name in NAMES]
    step.bar = STEP_BAR
    try:
        rounds = run_rounds(preload, logs)
    except (WorkerError, DifferentError) as error:
        for row in rows:
            row.note("ours", error)
        return rows
    counts = f"medians of {len(rounds)} interleaved rounds, peers of {PEER_ROUNDS}"
    for row, figure in ((step, "seconds"), (peak, "peak_bytes")):
        row.ours = ratio(rounds, OURS, figure)
        for name in PEERS:
            row.put(name, ratio(rounds, name, figure))
        for name, reason in MISSING.items():
            row.put(name, None)
            row.note(name, reason)
        row.how += f"; {counts}; {described(rounds)}"
    share = median(each[OURS]["file_share"] for each in rounds)
    if share < FILE_SHARE_MIN:
        step.note("ours", f"{share:.0%} of the bytes slept in the file, and 90 % are the bar's")
        step.ours = None
    return rows


def run_rounds(preload: Path, logs: Path) -> list[dict[str, dict]]:
    names = (BASE, OURS, *PEERS)
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                Process(
                    [str(HERE / "offload_contender.py"), name],
                    preload=None if name in UNLOADED else preload,
                    log=logs / f"{name}.log",
                )
            )
            for name in names
        }
        for process in processes.values():
            process.ready()
            process.query("select", **BATCH)
        rounds: list[dict[str, dict]] = []
        start = time.monotonic()
        while len(rounds) < ROUNDS and (not rounds or time.monotonic() - start < SECONDS_MAX):
            # Another one goes first each time.
            running = names if len(rounds) < PEER_ROUNDS else (BASE, OURS)
            turn = len(rounds) % len(running)
            order = [*running[turn:], *running[:turn]]
            rounds.append({name: processes[name].query("run") for name in order})
    check_same(rounds)
    return rounds


class DifferentError(RuntimeError):
    """Two ways did not compute the same bits."""


def check_same(rounds: list[dict[str, dict]]) -> None:
    seen = {(reply["total"], reply["digest"]) for each in rounds for reply in each.values()}
    if len(seen) != 1:
        found = {name: reply["digest"][:8] for name, reply in rounds[0].items()}
        raise DifferentError(f"losses or gradients differ: {found}")


def ratio(rounds: list[dict[str, dict]], name: str, figure: str) -> float:
    return median(each[name][figure] / each[BASE][figure] for each in rounds if name in each)


def described(rounds: list[dict[str, dict]]) -> str:
    def middle(name: str, figure: str) -> float:
        return median(each[name][figure] for each in rounds if name in each)

    parts = [
        f"{name} {middle(name, 'seconds'):.2f} s, of the CPU {middle(name, 'cpu_seconds'):.2f} s, "
        f"of it the trainer's thread {middle(name, 'thread_seconds'):.2f} s, "
        f"{middle(name, 'peak_bytes') / 2**30:.2f} GiB above idle"
        for name in rounds[0]
    ]
    parts.append(f"the trainer's thread over plain {ratio(rounds, OURS, 'thread_seconds'):.3f}")
    saved, window = (middle(OURS, f"{name}_bytes") / 2**20 for name in ("saved", "window"))
    write, read = (middle(OURS, f"{name}_bytes_per_s") / 1e9 for name in ("write", "read"))
    parts.append(
        f"saved {saved:.0f} MiB, of which the last layers {window:.0f}; of the rest "
        f"{middle(OURS, 'file_share'):.1%} in the file, written at {write:.2f} GB/s and read at "
        f"{read:.2f} GB/s; waited {middle(OURS, 'wait_seconds'):.3f} s"
    )
    return "; ".join(parts)
