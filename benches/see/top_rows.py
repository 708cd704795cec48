"""The row of ``dormouse top``: its processor time on a terminal, watching eight ranks."""

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

from rows import LOWER, Row

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "target" / "release"
RANKS = 8
SECONDS = 20
# Drawn before it is measured: the start is not what a watcher pays for.
SECONDS_BEFORE = 2
COLUMNS, ROWS = 120, 80
# A runtime without torch: what is watched is its page.
RANK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
runtime = ctypes.c_void_p()
status = library.dormouse_runtime_create(None, ctypes.byref(runtime))
print(status, flush=True)
sys.stdin.read()
library.dormouse_runtime_destroy(runtime)
"""


def top_rows() -> list[Row]:
    row = Row(
        "top_cpu_percent",
        "%",
        LOWER,
        f"`dormouse top` on a terminal of {COLUMNS} x {ROWS} at its interval of a second, "
        f"{RANKS} ranks, {SECONDS} s: user and system time, of one processor",
        bar=1,
    )
    row.ours = top_cpu_percent(RELEASE / "dormouse", RELEASE / "libdormouse.so")
    return [row]


def top_cpu_percent(program: Path, library: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_ranks(library, Path(folder))
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(program, [str(program), "top", folder])
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.set_blocking(terminal, False)
        try:
            drawn(terminal, SECONDS_BEFORE)
            before_s = used_s(pid)
            shown = drawn(terminal, SECONDS)
            after_s = used_s(pid)
        finally:
            os.write(terminal, b"q")
            os.waitpid(pid, 0)
            os.close(terminal)
            for rank in ranks:
                rank.communicate("")
    last = f"rank {RANKS - 1}".encode()
    assert shown.count(last) >= SECONDS // 2, f"drawn {shown.count(last)} times"
    return 100 * (after_s - before_s) / SECONDS


def start_ranks(library: Path, folder: Path) -> list[subprocess.Popen]:
    """Starts processes with a page each, and waits until they have it."""
    environment = {**os.environ, "DORMOUSE_STATS_FILE": str(folder / "%r.page")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, library],
            env={**environment, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        assert rank.stdout.readline().strip() == "0"
    return ranks


def used_s(pid: int) -> float:
    """Returns the processor time of a process whose threads stay: to the nanosecond, as a turn
    takes less than a tick of 10 ms."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def drawn(terminal: int, seconds: float) -> bytes:
    """Reads what is drawn for a while, as a terminal does."""
    end_s, shown = time.monotonic() + seconds, b""
    while time.monotonic() < end_s:
        time.sleep(0.05)
        try:
            shown += os.read(terminal, 1 << 20)
        except BlockingIOError:
            continue
    return shown


MAKERS = [(("top_cpu_percent",), top_rows)]
