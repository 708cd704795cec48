"""Runs a command with a limit, and ends everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# After being asked to end, and after being ended.
GRACE_SECONDS = 5
REAP_SECONDS = 10
# What is kept of each stream; a part prints far less.
OUTPUT_BYTES_MAX = 8 << 20


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``status``: None where its limit ended it; minus a signal's number."""

    status: int | None
    seconds: float
    output: str
    errors: str


def run(command: list[str], seconds: float, environment: dict[str, str], folder) -> Ended:
    """Runs ``command`` in a process group of its own, in ``folder``.

    At its limit, or when this process is interrupted, the whole group is ended: asked first, then
    killed. What it had printed by then is returned. Files, not pipes, take the output: a process
    that outlives its parent would hold a pipe open.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
        return Ended(status, time.monotonic() - start, _text(output), _text(errors))


def _end_group(process: subprocess.Popen) -> None:
    """Also where the leader ended by itself: it may have left others."""
    for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, REAP_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            process.poll()
            if not _group_lives(process.pid):
                return
            time.sleep(0.02)
    # A process inside the driver may not even die: the next part starts without it.


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name stands in parentheses and may hold anything.
            state, _, own_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(own_group) == group and state not in "ZX":
                return True
    return False


def _text(file) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT_BYTES_MAX))
    return file.read().decode(errors="replace")
