"""fio: which of its O_DIRECT settings is the best here, and how fast that is now."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from statistics import median

from ours import Run, Unavailable
from pages import Pages

FIXED = ("--fixedbufs", "--registerfiles")
RING, LIBAIO = "--ioengine=io_uring", "--ioengine=libaio"
# All shapes have 32 MiB of buffers, like ours (PAGES_BYTES). A few MiB that are not read stay in
# the host's cache and make every engine faster than in real use.
SHAPES = tuple(
    (f"--bs={size}", f"--iodepth={depth}") for size, depth in (("256k", 128), ("1M", 32), ("4M", 8))
)
SETTINGS: tuple[tuple[str, ...], ...] = (
    *((RING, *shape) for shape in SHAPES),
    *((RING, *shape, *FIXED) for shape in SHAPES),
    *((LIBAIO, *shape) for shape in SHAPES),
    (RING, *SHAPES[1], *FIXED, "--sqthread_poll"),
)
# Every setting so often; then the best of them so often more.
ROUNDS_FIRST, FINALISTS, ROUNDS_LAST = 3, 3, 4
RUN_SECONDS_MAX = 120


def run(file: Path, file_bytes: int, way: str, setting: tuple[str, ...], pages: Path) -> Run:
    """``way``: ``read`` or ``write``, all of the file in order."""
    if shutil.which("fio") is None:
        raise Unavailable("fio is not installed (apt-get install fio)")
    command = [
        "fio",
        "--name=peer",
        f"--filename={file}",
        f"--size={file_bytes}",
        f"--rw={way}",
        "--direct=1",
        "--thread",
        "--allow_file_create=0",
        "--overwrite=1",
        "--output-format=json",
        f"--iomem=mmapshared:{pages}",
        *setting,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    if ended.returncode != 0:
        lines = (ended.stderr or ended.stdout).strip().splitlines()
        raise Unavailable(f"fio {' '.join(setting)}: {lines[-1] if lines else 'no reason given'}")
    job = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"][0]
    seconds = job[way]["runtime"] / 1e3
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Run(job[way]["io_bytes"], seconds, cpu_seconds)


def best(file: Path, file_bytes: int, way: str, pages: Pages) -> tuple[str, ...]:
    """The fastest setting by the median of its runs, all of them in rotation."""
    rates: dict[tuple[str, ...], list[float]] = {setting: [] for setting in SETTINGS}

    def rotate(settings: list[tuple[str, ...]], rounds: int) -> list[tuple[str, ...]]:
        for _ in range(rounds):
            pages.renew()
            for setting in settings:
                rates[setting].append(run(file, file_bytes, way, setting, pages.path).gb_per_s)
        return sorted(settings, key=lambda setting: -median(rates[setting]))

    finalists = rotate(list(SETTINGS), ROUNDS_FIRST)[:FINALISTS]
    return rotate(finalists, ROUNDS_LAST)[0]
