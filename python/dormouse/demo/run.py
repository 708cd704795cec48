"""Measures one group dense, shared awake and shared asleep, and reports.

Timed runs of the three modes alternate, each in a warmed-up process while the others wait, so that
a machine that slows down affects all modes. Peaks come from fresh processes, because a used process
keeps memory.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from . import model as models
from . import paths, report, table, trace
from .modes import ASLEEP, AWAKE, DENSE, MODES, NVME_FILE_BYTES
from .process import Process

TIMED_MICROBATCH_TOKENS = 512
PEAK_MICROBATCH_TOKENS = 128
ROUNDS_MIN = 3

# In addition to the file of sleeping bytes: the model's cache, reports, dumps.
DISK_SPARE_BYTES = 1 << 30

WORKER_MODULE = "dormouse.demo.worker"
# The width of the longest step's name keeps the bar in place.
DESCRIPTION_COLUMNS = 36

DUMPS = {"perfetto": "timeline.pftrace", "picture": "timeline.html"}


class CannotRun(RuntimeError):
    """A requirement of the demo is missing; the message says how to get it."""


@dataclass(frozen=True)
class Options:
    """Options of a run. ``nvme_dir``: directory of the file tier, on a disk."""

    preload: Path
    nvme_dir: Path
    rounds: int = ROUNDS_MIN
    full: bool = False


def run(options: Options) -> int:
    """Runs the demo and prints the table. Returns 1 if a correctness bar is missed."""
    check_ready(options)
    recorded = trace.read()
    with _Progress(_step_count(options, recorded)) as progress:
        measured = _measure(options, recorded, progress)
    result = report.assemble(measured)
    verdict = report.bars(result, measured)
    report.write(result, paths.REPORT_PATH)
    print(table.render(result, verdict))
    print(f"report: {paths.REPORT_PATH.relative_to(paths.CHECKOUT)}")
    return 1 if any(bar.correctness and not bar.met for bar in verdict) else 0


def check_ready(options: Options) -> None:
    """Checks all requirements before any slow step."""
    if options.rounds < ROUNDS_MIN:
        raise CannotRun(f"{options.rounds} rounds; accepted: at least {ROUNDS_MIN}")
    if not options.preload.is_file():
        raise CannotRun(f"{options.preload} is missing; `make lib` builds it")
    options.nvme_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(options.nvme_dir).free
    # One process sleeps at a time, into one file.
    needed = NVME_FILE_BYTES + DISK_SPARE_BYTES
    if free < needed:
        raise CannotRun(
            f"{options.nvme_dir} has {free >> 20} MiB free; accepted: at least {needed >> 20} MiB "
            "(--nvme-dir names another directory)"
        )


def _measure(options: Options, recorded: trace.Trace, progress: _Progress) -> report.Measured:
    progress.begin("model: dequantised once, then kept")
    models.prepare(models.find())
    progress.done()
    with contextlib.ExitStack() as stack:
        workers = {}
        for mode in MODES:
            workers[mode] = stack.enter_context(_start(options, mode, progress))
        chosen = workers[ASLEEP].query("select")
        info = workers[ASLEEP].query("info")
        prediction = workers[ASLEEP].query("predict", microbatch_tokens=TIMED_MICROBATCH_TOKENS)
        rounds, dense_peak = _timed_rounds(options, workers, progress)
        dumps = _dump(workers[ASLEEP], progress)
        groups = _other_groups(workers, recorded, progress) if options.full else []
        # Last, because it leaves its model in FP64.
        progress.begin("gradients against FP64")
        error = workers[ASLEEP].query("grad_error")
        progress.done()
    peaks = {DENSE: dense_peak}
    for mode in (AWAKE, ASLEEP):
        peaks[mode] = _fresh_peak(options, mode, progress)
    return report.Measured(
        _setting(chosen, info, recorded), prediction, rounds, peaks, error, dumps, groups
    )


def _setting(chosen: dict, info: dict, recorded: trace.Trace) -> dict:
    lengths = chosen["response_tokens"]
    return {
        "model": recorded.model["id"],
        "dtype": "float32",
        "group": chosen["id"],
        "prompt_tokens": chosen["prompt_tokens"],
        "responses": chosen["responses"],
        "response_tokens_mean": sum(lengths) / len(lengths),
        "microbatch_tokens": {"timed": TIMED_MICROBATCH_TOKENS, "peaks": PEAK_MICROBATCH_TOKENS},
        "threads": info["threads"],
        "nvme_write_bytes_per_s": info["nvme_write_bytes_per_s"],
        "nvme_read_bytes_per_s": info["nvme_read_bytes_per_s"],
    }


def _start(options: Options, mode: str, progress: _Progress) -> Process:
    """Starts a worker and waits until it is loaded. Must not run during a timed step."""
    progress.begin(f"start a process: {mode}")
    arguments = ["-m", WORKER_MODULE, mode]
    if mode == ASLEEP:
        arguments += ["--nvme-dir", str(options.nvme_dir)]
    worker = Process(arguments, preload=options.preload, log=paths.DEMO_DIR / f"worker-{mode}.log")
    try:
        worker.ready()
    except BaseException:
        worker.close()
        raise
    progress.done()
    return worker


def _timed_rounds(options: Options, workers: dict[str, Process], progress: _Progress):
    for mode, worker in workers.items():
        progress.begin(f"warm-up: {mode}")
        worker.query("warm", progress.listen, microbatch_tokens=TIMED_MICROBATCH_TOKENS)
        progress.done()
    workers[DENSE].query("idle")
    rounds, dense_peak = [], None
    for index in range(options.rounds):
        replies = {}
        for mode in (DENSE, ASLEEP, AWAKE):
            progress.begin(f"round {index + 1} of {options.rounds}: {mode}")
            # The dense process is fresh in its first run, and reading a peak there is free.
            first_dense = mode == DENSE and index == 0
            replies[mode] = workers[mode].query(
                "run", progress.listen, microbatch_tokens=TIMED_MICROBATCH_TOKENS, peaks=first_dense
            )
            if first_dense:
                dense_peak = replies[mode]
            progress.done()
        rounds.append(replies)
    return rounds, dense_peak


def _fresh_peak(options: Options, mode: str, progress: _Progress) -> dict:
    with _start(options, mode, progress) as worker:
        progress.begin(f"peaks: {mode}")
        worker.query("warm", progress.listen, microbatch_tokens=PEAK_MICROBATCH_TOKENS)
        worker.query("idle")
        reply = worker.query(
            "run",
            progress.listen,
            microbatch_tokens=PEAK_MICROBATCH_TOKENS,
            peaks=True,
            digest=True,
        )
        progress.done()
        return reply


def _dump(worker: Process, progress: _Progress) -> dict[str, str]:
    progress.begin("timeline")
    files = {kind: paths.DEMO_DIR / name for kind, name in DUMPS.items()}
    worker.query("dump", paths=[str(path) for path in files.values()])
    progress.done()
    return {kind: str(path.relative_to(paths.CHECKOUT)) for kind, path in files.items()}


def _other_groups(workers: dict[str, Process], recorded: trace.Trace, progress: _Progress):
    rows = []
    for group_id in recorded.groups:
        replies = {}
        for mode in (DENSE, ASLEEP):
            progress.begin(f"{group_id}: {mode}")
            chosen = workers[mode].query("select", group=group_id)
            replies[mode] = workers[mode].query(
                "run", progress.listen, microbatch_tokens=TIMED_MICROBATCH_TOKENS
            )
            progress.done()
        prediction = workers[ASLEEP].query("predict", microbatch_tokens=TIMED_MICROBATCH_TOKENS)
        dense_s, shared_s = (replies[mode]["wall_seconds"] for mode in (DENSE, ASLEEP))
        rows.append(
            {
                "id": group_id,
                "prompt_tokens": chosen["prompt_tokens"],
                "dense_seconds": dense_s,
                "shared_seconds": shared_s,
                "speedup": dense_s / shared_s,
                "predicted_speedup": prediction["speedup"],
                "dense_loss": replies["dense"]["loss"],
                "shared_loss": replies["asleep"]["loss"],
            }
        )
    return rows


def _step_count(options: Options, recorded: trace.Trace) -> int:
    timed = 3 + 3 + 3 * options.rounds + 2
    fresh = 2 * 2
    return 1 + timed + fresh + (2 * len(recorded.groups) if options.full else 0)


class _Progress:
    """Progress bar over all steps, with the current step's message."""

    def __init__(self, steps: int):
        plain = "{desc} {bar} {n_fmt}/{total_fmt} [{elapsed}]{postfix}"
        self._bar = tqdm(total=steps, bar_format=plain, dynamic_ncols=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc) -> None:
        self._bar.close()

    def begin(self, what: str) -> None:
        """Sets the name of the current step."""
        self._bar.set_postfix_str("")
        self._bar.set_description_str(what.ljust(DESCRIPTION_COLUMNS))

    def listen(self, event: dict) -> None:
        """Shows the progress of a worker."""
        if event["event"] == "response":
            self._bar.set_postfix_str(f"response {event['done']} of {event['of']}")
        elif event["event"] == "phase" and event["name"] != "end":
            self._bar.set_postfix_str(f"phase {event['name']}")

    def done(self) -> None:
        """Ends the step."""
        self._bar.update()
