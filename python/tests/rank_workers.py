"""Runs the ranks of a test as processes that meet as torchrun's do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

RANKS = 2


def run_ranks(
    worker: Path, *arguments, ranks: int = RANKS, seconds_max: float, **environment: str
) -> list[int]:
    """Runs ``python WORKER ARGUMENTS`` once for each rank; returns the exit codes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    workers = [
        subprocess.Popen(
            [sys.executable, str(worker), *map(str, arguments)],
            env=os.environ
            | meeting
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | environment,
        )
        for rank in range(ranks)
    ]
    try:
        return [process.wait(seconds_max) for process in workers]
    finally:
        for process in workers:
            process.kill()
            process.wait()


def left_by_ranks(
    worker: Path, directory: Path, *, ranks: int = RANKS, seconds_max: float
) -> dict[str, list]:
    """Runs ranks that leave what they have of each case in ``RANK.pt``; returns it, of every rank,
    by case."""
    codes = run_ranks(worker, directory, ranks=ranks, seconds_max=seconds_max)
    assert codes == [0] * ranks
    of_ranks = [torch.load(directory / f"{rank}.pt") for rank in range(ranks)]
    return {name: [each[name] for each in of_ranks] for name in of_ranks[0]}


def left_by_each(
    worker: Path,
    make_directory: Callable[[str], Path],
    numbers: Iterable[int],
    *,
    seconds_max: float,
) -> dict[str, list]:
    """Returns what :func:`left_by_ranks` does, of runs with each of these numbers of ranks.
    ``make_directory(name)``: as ``tmp_path_factory.mktemp``."""
    left: dict[str, list] = {}
    for ranks in numbers:
        directory = make_directory(f"ranks_{ranks}")
        left |= left_by_ranks(worker, directory, ranks=ranks, seconds_max=seconds_max)
    return left
