"""What is soaked: processes that run steps for as long as they are told, and are looked at."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Protocol

from dormouse.demo.modes import ASLEEP
from dormouse.demo.process import Process
from dormouse.demo.run import TIMED_MICROBATCH_TOKENS

# Half of what a step of the demo puts to sleep; the rest goes to host memory.
DEMO_FILE_BYTES = 480 << 20
# "5" resets the peak of resident memory to what is resident now (proc(5)).
RESET_PEAK = "5"


class Subject(Protocol):
    """One process. Not thread-safe."""

    name: str
    about: str

    def run(self, seconds: float) -> int:
        """Whole steps for at least so long; how many."""

    def figures(self) -> dict[str, int]:
        """What the process and the library hold between two steps, and held at most."""

    def close(self) -> None:
        """Ends it."""


class Demo:
    """The demo's step asleep: a real model under the preload library, through Python and C."""

    name = "demo"
    about = "steps of the demo, SmolLM2-135M, asleep in file and host memory"

    def __init__(self, library: Path, directory: Path, log: Path):
        script = Path(__file__).with_name("worker.py")
        arguments = [str(script), ASLEEP, "--nvme-dir", str(directory)]
        self._process = Process(arguments, preload=library, log=log)
        self._process.ready()
        self._process.ask("limit_file", nbytes=DEMO_FILE_BYTES)
        self._process.ask("warm", microbatch_tokens=TIMED_MICROBATCH_TOKENS)

    def run(self, seconds: float) -> int:
        until = time.monotonic() + seconds
        steps = 0
        while time.monotonic() < until:
            self._process.ask("run", microbatch_tokens=TIMED_MICROBATCH_TOKENS)
            steps += 1
        return steps

    def figures(self) -> dict[str, int]:
        return {**system_figures(self._process.pid), **self._process.ask("figures")}

    def close(self) -> None:
        self._process.close()


class Engine:
    """Small steps of the engine alone: where every one leaves something, it shows soonest."""

    name = "engine"
    about = "steps of the engine, 32 layers of 4 regions of 64 KiB, asleep in file and host memory"

    def __init__(self, driver: Path, directory: Path):
        self._process = subprocess.Popen(
            [str(driver), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._held: dict[str, int] = {}
        self._steps = 0

    def run(self, seconds: float) -> int:
        self._process.stdin.write(f"{round(seconds * 1000)}\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's steps ended with status {self._process.wait()}")
        self._held = json.loads(line)
        steps = self._held.pop("steps")
        before, self._steps = self._steps, steps
        return steps - before

    def figures(self) -> dict[str, int]:
        return {**system_figures(self._process.pid), **self._held}

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def system_figures(pid: int) -> dict[str, int]:
    """What the kernel counts for a process; starts its peak of resident memory anew."""
    proc = Path("/proc") / str(pid)
    status = dict(
        line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
    )
    (proc / "clear_refs").write_text(RESET_PEAK)
    return {
        "resident_bytes": _kib(status["VmRSS"]),
        "resident_bytes_peak": _kib(status["VmHWM"]),
        "open_files": sum(1 for _ in (proc / "fd").iterdir()),
        "threads": int(status["Threads"]),
        "mappings": len((proc / "maps").read_text().splitlines()),
    }


def _kib(text: str) -> int:
    return int(text.split()[0]) << 10
