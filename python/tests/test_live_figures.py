"""The page of live figures that a process has without a setting (docs/decisions/0021-live-figures.md)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")
# Says its page's name and waits for the end of its input.
CHILD = """
import os, sys
import dormouse
runtime = dormouse.Runtime()
print(f"dormouse.{os.geteuid()}.{os.getpid()}", flush=True)
sys.stdin.read()
runtime.close()
"""


def start(**changes: str) -> tuple[subprocess.Popen, Path]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **changes}
    environment.pop("LD_PRELOAD", None)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return child, SHARED / child.stdout.readline().strip()


def end(child: subprocess.Popen) -> None:
    child.communicate("")
    assert child.returncode == 0


@pytest.fixture(autouse=True)
def place():
    if not os.access(SHARED, os.W_OK):
        pytest.skip(f"{SHARED} is not writable")


def test_a_process_has_a_page_as_long_as_its_runtime():
    child, page = start()
    assert page.stat().st_size == 4096
    assert page.stat().st_mode & 0o777 == 0o600
    assert page.read_bytes()[:8] == b"dormouse"
    end(child)
    assert not page.exists()


def test_the_next_process_removes_the_page_of_a_killed_one_and_no_other():
    running, kept = start()
    killed, left = start()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.exists()
    next_one, _ = start()
    assert not left.exists()
    assert kept.exists()
    end(running)
    end(next_one)


def test_off_has_no_page():
    child, page = start(DORMOUSE_STATS_FILE="off")
    assert not page.exists()
    end(child)
