"""``python -m dormouse.demo run | record | record-epochs``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import epochs, paths


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m dormouse.demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="measure one update dense and shared, and report")
    run.add_argument("--full", action="store_true", help="take every recorded group, not only one")
    run.add_argument("--rounds", type=int, default=3, help="timed rounds (default and least: 3)")
    run.add_argument(
        "--preload",
        type=Path,
        default=paths.CHECKOUT / "target" / "release" / "libdormouse_preload.so",
        help="the preload library (default: %(default)s)",
    )
    run.add_argument(
        "--nvme-dir",
        type=Path,
        default=paths.DEMO_DIR / "nvme",
        help="directory on a disk for sleeping bytes (default: %(default)s)",
    )

    record = commands.add_parser("record", help="sample the rollouts anew")
    record.add_argument("--seed", type=int, default=None, help="default: the shipped trace's")
    record.add_argument("--out", type=Path, default=paths.TRACE_DIR, help="default: %(default)s")

    again = commands.add_parser("record-epochs", help="sample rollouts of a policy as it trains")
    again.add_argument("--seed", type=int, default=None, help="default: the shipped recording's")
    again.add_argument("--prompts", type=int, default=None, help="the shortest; default: all")
    again.add_argument("--out", type=Path, default=epochs.DIRECTORY, help="default: %(default)s")

    options = parser.parse_args(arguments)
    return {"run": _run, "record": _record, "record-epochs": _record_epochs}[options.command](
        options
    )


def _run(options) -> int:
    from . import run
    from .model import ModelNotFound
    from .process import WorkerError
    from .trace import TraceError

    try:
        return run.run(run.Options(options.preload, options.nvme_dir, options.rounds, options.full))
    except (run.CannotRun, WorkerError, ModelNotFound, TraceError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _record(options) -> int:
    from . import record

    made = record.record(options.out, record.SEED if options.seed is None else options.seed)
    print(f"{len(made.groups)} groups in {made.directory}; default {made.default_group}")
    return 0


def _record_epochs(options) -> int:
    from . import record

    seed = record.SEED if options.seed is None else options.seed
    for epoch in epochs.record(options.out, seed, options.prompts):
        rewards = [each.reward for rows in epoch.answers.values() for each in rows]
        print(f"epoch {epoch.number}: mean reward {sum(rewards) / len(rewards):.3f}", flush=True)
    return 0
