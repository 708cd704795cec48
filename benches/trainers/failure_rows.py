"""The row of a rank that fails: seconds until the other has a typed error."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rows import LOWER, Row

HERE = Path(__file__).parent
NAME = "dead_rank_seconds"
BAR_S = 10
RANKS = 2
# Kinds of failures and trainers, as failing_rank.py has them.
CASES = (
    ("error", "ddp"),
    ("error", "zero_2"),
    ("killed", "ddp"),
    ("killed_with_workers", "ddp"),
)
TYPED = "RankFailedError: rank 1 failed: "
# For both ranks to begin, and for an error after the failure.
BEGIN_S_MAX = 300.0
HEARD_S_MAX = 60.0
POLL_S = 0.05


def failure_rows(model_text: str, preload: Path, logs: Path) -> list[Row]:
    """The longest of :data:`CASES`; beside it the same processes without ``fail_together``."""
    row = Row(NAME, "s", LOWER, f"{model_text}; {RANKS} ranks on gloo; the longest of", bar=BAR_S)
    seconds = []
    for kind, trainer in CASES:
        name = f"{kind}_{trainer}"
        told, error = seconds_until_heard(kind, trainer, preload, logs)
        alone, other = seconds_until_heard(kind, trainer, preload, logs, "untold")
        seconds.append(told if error.startswith(TYPED) else None)
        row.put(f"untold_{name}", alone)
        row.how += f" {name} {shown(told)} ({error}), without fail_together {shown(alone)} ({other});"
    row.ours = None if None in seconds else max(seconds)
    return [row]


def shown(seconds: float | None) -> str:
    return f"no error in {HEARD_S_MAX:.0f} s" if seconds is None else f"{seconds:.2f} s"


def seconds_until_heard(
    kind: str, trainer: str, preload: Path, logs: Path, *untold: str
) -> tuple[float | None, str]:
    """Returns seconds from the failure of rank 1 to the error of rank 0, and its first words."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        log = stack.enter_context((logs / f"failing_{kind}_{trainer}.log").open("a"))
        command = [sys.executable, str(HERE / "failing_rank.py"), directory, kind, trainer, *untold]
        stack.enter_context(ranks(command, preload, log))
        failed, heard = Path(directory) / "failed", Path(directory) / "heard.0"
        if not appears(failed, BEGIN_S_MAX):
            return None, f"ranks did not begin: {log.name}"
        if not appears(heard, HEARD_S_MAX):
            return None, "none"
        error = json.loads(heard.read_text())
        start = json.loads(failed.read_text())["s"]
        return error["s"] - start, error["error"].splitlines()[0][:120]


@contextlib.contextmanager
def ranks(command: list[str], preload: Path, log) -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(RANKS),
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
        for rank in range(RANKS)
    ]
    try:
        yield
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, 9)
            worker.wait()


def appears(path: Path, seconds_max: float) -> bool:
    end = time.monotonic() + seconds_max
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
