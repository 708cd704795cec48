"""Processes that train together."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ranks(command: list[str], preload: Path, log, count: int) -> Iterator[list[subprocess.Popen]]:
    """Context of ``count`` processes that meet as torchrun's do; they end with it."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "LD_PRELOAD": str(preload),
        "DORMOUSE_LIB": str(preload.with_name("libdormouse.so")),
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=log,
            # With the child that it leaves behind.
            start_new_session=True,
        )
        for rank in range(count)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, 9)
            worker.wait()


def left_by_ranks(
    worker: Path,
    arguments: tuple[str, ...],
    preload: Path,
    log: Path,
    *,
    count: int,
    seconds_max: float,
    given: dict | None = None,
) -> list:
    """Returns what each rank left in ``RANK.json``. ``worker``: run as ``worker DIRECTORY
    ARGUMENTS``; it finds ``given`` in ``given.json`` there.

    Raises ``subprocess.SubprocessError`` if one fails or takes longer than ``seconds_max``.
    """
    with tempfile.TemporaryDirectory() as directory, log.open("a") as file:
        (Path(directory) / "given.json").write_text(json.dumps(given))
        command = [sys.executable, str(worker), directory, *arguments]
        with ranks(command, preload, file, count) as workers:
            for each in workers:
                code = each.wait(seconds_max)
                if code:
                    raise subprocess.CalledProcessError(code, command)
        files = [Path(directory) / f"{rank}.json" for rank in range(count)]
        return [json.loads(each.read_text()) for each in files]
