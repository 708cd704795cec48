"""Processes that train together, one of which fails: seconds until the other has an error.

The failing one leaves ``failed`` in the directory, and rank 0 ``heard.0``, by :func:`leave`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ranks import ranks

RANKS = 2
TYPED = "RankFailedError: rank 1 failed: "
# For both ranks to begin, and for an error after the failure.
BEGIN_S_MAX = 300.0
HEARD_S_MAX = 60.0
POLL_S = 0.05
ERROR_CHARS_MAX = 120


def shown(seconds: float | None) -> str:
    return f"no error in {HEARD_S_MAX:.0f} s" if seconds is None else f"{seconds:.2f} s"


def leave(directory: Path, name: str, **values) -> None:
    """Leaves a file for the process that waits for it: the machine's clock, and ``values``."""
    whole = directory / f"{name}.part"
    whole.write_text(json.dumps({"s": time.monotonic(), **values}))
    whole.rename(directory / name)


def seconds_until_heard(
    worker: Path, arguments: tuple[str, ...], preload: Path, log: Path
) -> tuple[float | None, str]:
    """Returns seconds from the failure of rank 1 to the error of rank 0, and its first words.
    ``worker``: run as ``worker DIRECTORY ARGUMENTS``."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("a"))
        command = [sys.executable, str(worker), directory, *arguments]
        workers = stack.enter_context(ranks(command, preload, file, RANKS))
        failed, heard = Path(directory) / "failed", Path(directory) / "heard.0"
        if not appears(failed, BEGIN_S_MAX, workers):
            return None, f"ranks did not begin: {log}"
        if not appears(heard, HEARD_S_MAX, workers[:1]):
            return None, "none"
        error = json.loads(heard.read_text())
        start = json.loads(failed.read_text())["s"]
        return error["s"] - start, error["error"].splitlines()[0][:ERROR_CHARS_MAX]


def appears(path: Path, seconds_max: float, workers: Sequence[subprocess.Popen]) -> bool:
    """Waits for a file, no longer than ``workers`` live, all of which are needed for it."""
    end = time.monotonic() + seconds_max
    while not path.exists():
        if time.monotonic() > end:
            return False
        if any(worker.poll() is not None for worker in workers):
            # It may have been left last.
            return path.exists()
        time.sleep(POLL_S)
    return True
