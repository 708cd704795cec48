"""One program, with the preload library and without it: what it did, and what it used."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target"
BUILT = TARGET / "bench" / "programs"
DRIVERS = Path(__file__).resolve().parent / "drivers"
# A program that needs longer has hung.
PROGRAM_SECONDS_MAX = 900
TIMED_OUT = 124
# What differs between two runs of any program.
VOLATILE = re.compile(r"0x[0-9a-fA-F]{4,}|\b(\d+ min )?\d+(\.\d+)? ?(ns|us|ms|s|sec|secs|seconds)\b")


class Unavailable(Exception):
    """Why something was not run."""


@dataclass(frozen=True)
class Result:
    status: int
    output: str
    errors: str
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Libraries:
    """The library and its preload library."""

    folder: Path

    def settings(self) -> list[str]:
        """The program's environment, for env: the launcher itself runs without them."""
        library, preload = (
            self.folder / name for name in ("libdormouse.so", "libdormouse_preload.so")
        )
        for path in (library, preload):
            if not path.exists():
                raise Unavailable(f"{path} is missing (make lib builds it)")
        return [f"DORMOUSE_LIB={library}", f"LD_PRELOAD={preload}"]


def build() -> None:
    """Compiles the drivers."""
    BUILT.mkdir(parents=True, exist_ok=True)
    for source in sorted(DRIVERS.glob("*.c")):
        # Without builtins: the compiler would drop pairs of malloc and free.
        command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-builtin", "-pthread"]
        subprocess.run([*command, "-o", BUILT / source.stem, source], check=True)


def run(
    command: list[str],
    settings: list[str],
    seconds_max: float = PROGRAM_SECONDS_MAX,
) -> Result:
    """Runs the command in an empty folder of its own.

    CPU time is of the whole tree, peak memory of the largest process in it.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, work = Path(folder) / "report", Path(folder) / "work"
        work.mkdir()
        with (Path(folder) / "out").open("w+b") as out, (Path(folder) / "err").open("w+b") as err:
            launcher = subprocess.Popen(
                [BUILT / "launch", report, "env", *settings, *command],
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                launcher.wait(seconds_max)
            except subprocess.TimeoutExpired:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
            texts = [read(stream) for stream in (out, err)]
        if not report.exists():
            return Result(TIMED_OUT, *texts, float("nan"), 0)
        status, user, system, peak_kib = report.read_text().split()
        return Result(int(status), *texts, float(user) + float(system), int(peak_kib) * 1024)


def read(stream) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def normalised(output: str, ignored: str) -> list[str]:
    """Lines without addresses and times, and without those that match ``ignored``."""
    lines = (VOLATILE.sub("#", line.rstrip()) for line in output.splitlines())
    return [line for line in lines if not (ignored and re.search(ignored, line))]


def difference(ours: Result, theirs: Result, ignored: str) -> str | None:
    """How the program's run under dormouse differs from that under glibc; None if it does not."""
    if ours.status != theirs.status:
        last = ours.errors.strip().splitlines()[-1:] or ["nothing on stderr"]
        return f"status {ours.status}, under glibc {theirs.status}: {last[0][:200]}"
    pairs = (normalised(result.output, ignored) for result in (ours, theirs))
    left, right = pairs
    for one, other in zip(left, right, strict=False):
        if one != other:
            return f"prints {one[:100]!r}, under glibc {other[:100]!r}"
    if len(left) != len(right):
        return f"prints {len(left)} lines, under glibc {len(right)}"
    return None
