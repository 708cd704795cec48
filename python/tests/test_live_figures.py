"""The page of live figures that a process has without a setting (docs/decisions/0021-live-figures.md)."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
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

# The same under the preload library, with a tag that sleeps and a dump; "n" on its input goes on.
TAGGED = """
import os, sys
import torch
import dormouse
MIB = 1 << 20
runtime = dormouse.Runtime()
print(f"dormouse.{os.geteuid()}.{os.getpid()}", flush=True)
with runtime.tag("weights") as weights, runtime.tag("small") as small:
    with weights.collect():
        held = torch.ones(8 * MIB, dtype=torch.uint8)
    with small.collect():
        other = torch.ones(4 * MIB, dtype=torch.uint8)
    print("allocated", flush=True)
    sys.stdin.readline()
    assert weights.sleep("host") is None
    path = runtime.dump(sys.argv[1] + "/a dump.html")
    print("asleep", flush=True)
    sys.stdin.readline()
runtime.close()
"""
PRELOAD = os.environ.get("LD_PRELOAD", "")
# Of the page's layout, version 3 (timeline/src/live.rs).
TAGS_AT, TAG_BYTES, LAST_DUMP_AT = 256, 80, 896


def text(page: bytes, at: int, most: int) -> str:
    return page[at : at + most].split(b"\0")[0].decode()


def tags(page: bytes) -> dict[str, tuple[int, int]]:
    """Resident and sleeping MiB by name."""
    found = {}
    for at in range(TAGS_AT, LAST_DUMP_AT, TAG_BYTES):
        resident, asleep = struct.unpack_from("=QQ", page, at)
        if name := text(page, at + 16, 64):
            found[name] = (resident >> 20, asleep >> 20)
    return found


def until(page: Path, wanted) -> bytes:
    """The page, once it is as wanted: it is updated ten times a second."""
    deadline = time.monotonic() + 60
    while not wanted(seen := page.read_bytes()):
        assert time.monotonic() < deadline, tags(seen)
        time.sleep(0.02)
    return seen


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


@pytest.mark.skipif("dormouse_preload" not in PRELOAD, reason="without the preload library")
def test_the_page_has_the_largest_tags_and_the_last_dump(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    child = subprocess.Popen(
        [sys.executable, "-c", TAGGED, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    page = SHARED / child.stdout.readline().strip()
    assert child.stdout.readline() == "allocated\n"
    seen = until(page, lambda page: tags(page) == {"weights": (8, 0), "small": (4, 0)})
    assert struct.unpack_from("=Q", seen, LAST_DUMP_AT) == (0,)
    child.stdin.write("n\n")
    child.stdin.flush()
    assert child.stdout.readline() == "asleep\n"
    seen = until(page, lambda page: tags(page) == {"weights": (0, 8), "small": (4, 0)})
    assert list(tags(seen)) == ["weights", "small"], "the largest first, asleep or not"
    written = struct.unpack_from("=Q", seen, LAST_DUMP_AT)[0] / 1e9
    assert 0 <= time.time() - written < 120
    assert text(seen, LAST_DUMP_AT + 8, 16) == "call"
    assert text(seen, LAST_DUMP_AT + 24, 2048) == f"{tmp_path}/a dump.html"
    child.communicate("n\n")
    assert child.returncode == 0
