"""The processor time of ``dormouse top`` on a terminal, watching eight ranks.

::

    PYTHONPATH=python python benches/see/top_cpu.py target/release/dormouse
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

RANKS = 8
SECONDS = 20
# Drawn before it is measured: the start is not what a watcher pays for.
SECONDS_BEFORE = 2
COLUMNS, ROWS = 120, 80
RANK = """
import sys
import dormouse
runtime = dormouse.Runtime()
print("ready", flush=True)
sys.stdin.read()
"""


def used_s(pid: int) -> float:
    """Returns the processor time of a process, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ranks(folder: Path) -> list[subprocess.Popen]:
    """Starts processes with a page each, and waits until they have it."""
    environment = {**os.environ, "DORMOUSE_STATS_FILE": str(folder / "%r.page")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**environment, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for process in started:
        process.stdout.readline()
    return started


def top_cpu_percent(program: Path) -> float:
    """Returns the share of one processor that ``dormouse top`` takes at its built-in interval."""
    with tempfile.TemporaryDirectory() as folder:
        started = ranks(Path(folder))
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(program, [str(program), "top", folder])
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.set_blocking(terminal, False)
        try:
            drain(terminal, SECONDS_BEFORE)
            before = used_s(pid)
            shown = drain(terminal, SECONDS)
            after = used_s(pid)
            assert shown.count(b"rank 7") >= SECONDS - 2, f"{len(shown)} bytes were drawn"
        finally:
            os.write(terminal, b"q")
            os.waitpid(pid, 0)
            os.close(terminal)
            for process in started:
                process.communicate("")
    return 100 * (after - before) / SECONDS


def drain(terminal: int, seconds: float) -> bytes:
    """Reads what is drawn for a while, as a terminal does."""
    end, shown = time.monotonic() + seconds, b""
    while time.monotonic() < end:
        time.sleep(0.05)
        try:
            shown += os.read(terminal, 1 << 20)
        except BlockingIOError:
            continue
    return shown


if __name__ == "__main__":
    print(f"top_cpu_percent {top_cpu_percent(Path(sys.argv[1])):.2f}")
