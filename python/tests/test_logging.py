"""Events of the library in Python's ``logging``."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

import dormouse
import dormouse.logging

# Forwarding begins before the first runtime, whose creation is an event.
SCRIPT = """
import logging, os, sys, threading, time
import dormouse, dormouse.logging

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
dormouse.logging.start({period_s})
dormouse.logging.start({period_s})
with dormouse.Runtime() as runtime:
    pass
"""


def run(ending: str, period_s: float) -> str:
    """Runs the script, which must succeed and write nothing to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{period_s}", str(period_s)) + ending],
        env=os.environ | {"DORMOUSE_LOG": "info"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_events_become_records_with_their_level_time_and_fields():
    ending = """
def threads():
    return [each.name for each in threading.enumerate()].count("dormouse-logging")

assert threads() == 1
dormouse.logging.stop()
dormouse.logging.stop()
assert threads() == 0
(record,) = created()
assert record.name == "dormouse.ffi"
assert record.levelno == logging.INFO
assert before - 1 < record.created <= time.time()
assert "version" in record.fields
assert f"version={record.fields['version']}" in record.getMessage()
dormouse.logging.start(3600)
assert threads() == 1
"""
    assert run(ending, 3600) == ""


def test_events_arrive_while_the_program_runs():
    ending = """
deadline = time.time() + 60
while not created() and time.time() < deadline:
    time.sleep(0.01)
assert created()
"""
    assert run(ending, 0.01) == ""


def test_the_last_events_are_forwarded_at_exit_and_not_by_a_forked_child():
    ending = """
logging.getLogger("dormouse").addHandler(logging.StreamHandler(sys.stdout))
child = os.fork()
if child == 0:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
"""
    assert run(ending, 3600).count("runtime created") == 1


def test_levels_and_texts(caplog):
    caplog.set_level(logging.INFO, "dormouse")
    for level in dormouse.logging.LEVELS:
        event = {"time_ns": 1_500_000_000, "level": level, "target": "offload"}
        dormouse.logging._handle(event | {"message": "100 % full", "fields": {"bytes": 7}})
    seen = [(each.levelname, each.name, each.getMessage()) for each in caplog.records]
    assert seen == [
        (name, "dormouse.offload", "100 % full bytes=7") for name in ("ERROR", "WARNING", "INFO")
    ]
    assert {(each.created, each.msecs) for each in caplog.records} == {(1.5, 500)}


@pytest.mark.parametrize("period_s", [0, -1, float("nan")])
def test_a_period_that_is_not_positive_is_refused(period_s):
    with pytest.raises(dormouse.ArgumentError, match="accepted: positive numbers"):
        dormouse.logging.start(period_s)
