"""Runs the ranks of a test as processes that meet as torchrun's do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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
