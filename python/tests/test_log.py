"""Log events of the library in Python's logging, under the preload library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dormouse

HERE = Path(__file__).resolve().parent
ALONE_SECONDS_MAX = 300

SCRIPT = """
import logging, os, threading
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record)
logging.getLogger("dormouse").addHandler(Keep())
logging.getLogger("dormouse").setLevel(logging.DEBUG)

import dormouse
from dormouse import _native as native
import ctypes

def put(count):
    data = ctypes.create_string_buffer(count)
    number = ctypes.c_uint64()
    address = ctypes.addressof(data)
    return native.call(
        "stash_put", runtime._handle, address, count, 77, None, ctypes.byref(number)
    )

with dormouse.Runtime() as runtime:
    runtime.set_budget("host", 0)
    bridge = dormouse.log_to_logging(interval_s=0.01)
    assert put(4321) == native.DECLINED
    bridge.flush()
    for record in records:
        print(record.name, record.levelname, record.getMessage(), record.fields)

    # Threads that allocate through the library while events are passed on, and children.
    stop = threading.Event()
    def churn():
        while not stop.is_set():
            assert len(bytearray(3 << 20)) == 3 << 20
    threads = [threading.Thread(target=churn) for _ in range(3)]
    [thread.start() for thread in threads]
    for _ in range(5):
        put(99)
        child = os.fork()
        if child == 0:
            grown = bytearray(5 << 20)
            os._exit(0 if len(grown) == 5 << 20 else 1)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    [thread.join() for thread in threads]
bridge.stop()
bridge.stop()
print("later", sum(r.fields.get("bytes") == 99 and r.levelno == logging.INFO for r in records))
"""


def run(**environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(HERE.parent)} | environment,
        capture_output=True,
        text=True,
        timeout=ALONE_SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_events_reach_pythons_logging():
    done = run(DORMOUSE_LOG="trace")
    assert "later 5" in done.stdout, done.stdout
    declined = [line for line in done.stdout.splitlines() if "stash declined" in line]
    assert len(declined) == 1, done.stdout
    assert declined[0].startswith("dormouse.offload INFO stash declined bytes=4321 reason=")
    assert "'storage_key': 77" in declined[0]
    # What came before the bridge is on standard error, and nothing after it.
    assert "runtime created" in done.stderr
    assert "stash declined" not in done.stderr


def test_a_level_without_those_events_passes_none():
    done = run(DORMOUSE_LOG="warn")
    assert (done.stdout, done.stderr) == ("later 0\n", "")


FIRST = """
import logging, os, sys, threading, time
import dormouse

class Kept(logging.Handler):
    records = []
    def emit(self, record):
        self.records.append(record)

def created():
    return [each for each in Kept.records if each.getMessage().startswith("runtime created")]

logging.getLogger("dormouse").addHandler(Kept())
logging.getLogger("dormouse").setLevel(logging.DEBUG)
logging.getLogger("dormouse").propagate = False
before = time.time()
bridge = dormouse.log_to_logging(interval_s={interval_s})
with dormouse.Runtime() as runtime:
    pass
"""


def run_first(ending: str, interval_s: float) -> str:
    """Runs a script whose bridge is there before the first runtime; nothing is on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST.replace("{interval_s}", str(interval_s)) + ending],
        env=os.environ | {"PYTHONPATH": str(HERE.parent), "DORMOUSE_LOG": "info"},
        capture_output=True,
        text=True,
        timeout=ALONE_SECONDS_MAX,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_runtimes_events_have_their_level_and_time():
    ending = """
bridge.stop()
assert "dormouse-log" not in [each.name for each in threading.enumerate()]
(record,) = created()
assert (record.name, record.levelno) == ("dormouse.ffi", logging.INFO)
assert before - 1 < record.created <= time.time()
assert "version" in record.fields
"""
    assert run_first(ending, 3600) == ""


def test_events_arrive_while_the_program_runs():
    ending = """
deadline = time.time() + 60
while not created() and time.time() < deadline:
    time.sleep(0.01)
assert created()
"""
    assert run_first(ending, 0.01) == ""


def test_the_last_events_arrive_at_exit_and_not_in_a_forked_child():
    ending = """
logging.getLogger("dormouse").addHandler(logging.StreamHandler(sys.stdout))
child = os.fork()
if child == 0:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
"""
    assert run_first(ending, 3600).count("runtime created") == 1


@pytest.mark.parametrize("interval_s", [0, -1, float("nan")])
def test_an_interval_that_is_not_positive_is_refused(interval_s):
    with pytest.raises(dormouse.ArgumentError, match="accepted: positive numbers"):
        dormouse.log_to_logging(interval_s=interval_s)
