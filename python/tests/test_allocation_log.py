"""Logs of allocations of a run (``DORMOUSE_ALLOC_LOG_DIR``), under the preload library."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches" / "traces"))
import format as traces  # noqa: E402

LIBRARY = os.environ.get("DORMOUSE_LIB", "")
PROGRAM = Path(LIBRARY).parent / "dormouse"

# Two threads, a block from before the log, one that sleeps, and one that lives at the end.
RUN = """
import threading
import torch
import dormouse
MIB = 1 << 20
def hold(*sizes):
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]
before = hold(7 * MIB)
runtime = dormouse.Runtime()
runtime.reset_peaks()
with runtime.tag("weights") as weights:
    with weights.collect():
        slept = hold(9 * MIB)
    assert weights.sleep("host") is None
    held = hold(3 * MIB + 1, 5 * MIB, MIB)
    del held[1], before
    weights.wake()
def work():
    for step in range(200):
        hold((1 + step % 3) * MIB + step, 2 * MIB)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
del slept
requested = runtime.stats()["requested"]
print(requested["peak_bytes"], requested["current_bytes"])
runtime.close()
"""
THREADS = """
import pathlib
print([path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")])
"""


def run(code: str = RUN, limit_bytes: int | None = None, **changes: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **changes}

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


def replay(log: Path) -> dict:
    done = subprocess.run([PROGRAM, "replay", "--json", log], capture_output=True, text=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_replay_of_a_run_has_its_peak_to_the_byte(tmp_path):
    done = run(DORMOUSE_ALLOC_LOG_DIR=str(tmp_path), RANK="3")
    assert done.stderr == ""
    peak, current = (int(word) for word in done.stdout.split())
    (log,) = tmp_path.iterdir()
    assert log.name.startswith("dormouse-") and "-rank3-pid" in log.name
    assert log.name.endswith("-host.csv") and log.stat().st_mode & 0o777 == 0o600
    assert replay(log)["requested_peak_bytes"] == peak

    # As the reader of the benchmark's traces sees it, which refuses what RMM would not write.
    trace = traces.read(log)
    live = sum(event.size if event.action == "allocate" else -event.size for event in trace.events)
    assert live <= current, "what is live at the end of the log was live before its last rows"
    assert len({event.thread for event in trace.events}) >= 3
    # The block from before is the first row, and 800 blocks of the threads follow.
    assert 7 << 20 in [event.size for event in trace.events[:50]]
    assert sum(event.action == "allocate" for event in trace.events) >= 805
    assert [event.size for event in trace.events].count(9 << 20) == 2, "once, though it slept"


def test_the_columns_are_those_of_rmm(tmp_path):
    run(DORMOUSE_ALLOC_LOG_DIR=str(tmp_path))
    (log,) = tmp_path.iterdir()
    columns, *rows = log.read_text().splitlines()
    assert columns == "Thread,Time,Action,Pointer,Size,Stream"
    for row in rows:
        thread, time, action, pointer, size, stream = row.split(",")
        hours, minutes, seconds = time.split(":")
        assert int(hours) < 24 and int(minutes) < 60 and float(seconds) < 60
        assert action in ("allocate", "free") and int(pointer, 16) > 0
        assert int(thread) > 0 and int(size) > 0 and int(stream) >= 0


def test_a_full_disk_is_one_warning_and_leaves_whole_rows(tmp_path):
    done = run(limit_bytes=8192, DORMOUSE_ALLOC_LOG_DIR=str(tmp_path))
    assert len(done.stderr.splitlines()) == 1 and "an allocation log has ended" in done.stderr
    assert "File too large" in done.stderr
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    assert len(text) <= 8192 and text.endswith("\n")
    assert replay(log)["calls"] == text.count("\n") - 1


def test_a_directory_that_is_missing_is_one_warning(tmp_path):
    done = run(DORMOUSE_ALLOC_LOG_DIR=str(tmp_path / "absent"))
    assert len(done.stderr.splitlines()) == 1
    assert "No such file" in done.stderr and not list(tmp_path.iterdir())


def test_without_the_setting_there_is_neither_file_nor_thread(tmp_path):
    code = RUN + THREADS
    assert "dormouse-alloc" not in run(code).stdout
    with_log = run(code, DORMOUSE_ALLOC_LOG_DIR=str(tmp_path)).stdout
    assert "dormouse-alloc" in with_log
