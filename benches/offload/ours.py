"""Our file tier: a process that holds the file and reads or writes all of it when told to."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target"
DRIVER = TARGET / "release" / "examples" / "nvme_rate"


class Unavailable(Exception):
    """What could not be measured: the reason, for the table."""


@dataclass(frozen=True)
class Run:
    """One time through the file."""

    bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_seconds / (self.bytes / 1e9)


class Ours:
    """The tier, made as a runtime makes it by default."""

    def __init__(self, directory: Path, file_bytes: int, threads: int, depth: int) -> None:
        command = [DRIVER, directory, file_bytes, "auto", threads, depth]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        about = self._answer()
        self.engine, self.note = about["engine"], about["note"]

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise Unavailable(f"{DRIVER.name} ended with {self.process.wait()}")
        return json.loads(line)

    @property
    def file(self) -> Path:
        """The unlinked file, for others to open: the same bytes of the same disk for all."""
        for descriptor in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if str(descriptor.readlink()).endswith(" (deleted)"):
                return descriptor
        raise Unavailable(f"process {self.process.pid} has no file of ours open")

    def run(self, way: str, pages: Path, sums: bool = False) -> Run:
        """``write`` or ``read``. What was written with sums is read with them."""
        self.process.stdin.write(f"{way} {'sums' if sums else 'plain'} {pages}\n")
        self.process.stdin.flush()
        return Run(**self._answer())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
