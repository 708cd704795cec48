"""One peak, to the byte: of the page, the trace, ``stats()`` and the prefix's report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from dormouse import Prefix
from dormouse._native import Edge, Phase

MIB = 1 << 20
# More than any test before has held.
LARGE_BYTES = 1536 * MIB

TRACE_PACKET, TRACK_EVENT, TRACK_DESCRIPTOR = 1, 11, 60
EVENT_TRACK, COUNTER_VALUE, TRACK_UUID, TRACK_NAME = 11, 30, 1, 2


def fields(message: bytes):
    """The fields of a protobuf message, as (number, value)."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        kind = key & 7
        if kind == 0:
            value, at = varint(at)
        else:
            size, at = varint(at) if kind == 2 else (8, at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def counter_peaks(trace: bytes) -> dict[str, int]:
    """The highest value of each counter of a Perfetto trace."""
    names, peaks = {}, {}
    for _, packet in fields(trace):
        for number, body in fields(packet):
            if number == TRACK_DESCRIPTOR:
                told = dict(fields(body))
                names[told[TRACK_UUID]] = told[TRACK_NAME].decode()
            elif number == TRACK_EVENT:
                told = dict(fields(body))
                if COUNTER_VALUE in told:
                    track = told[EVENT_TRACK]
                    peaks[track] = max(peaks.get(track, 0), told[COUNTER_VALUE])
    return {names[track]: peak for track, peak in peaks.items()}


def page_data(path: Path) -> dict:
    text = path.read_text()
    return json.loads(re.search(r'id="data">(.*?)</script', text, re.S).group(1))


def test_the_peak_is_the_same_wherever_it_is_told(runtime, tmp_path):
    with Prefix(runtime, None, layers=1) as node:
        node.enter(Phase.A)
        node.mark(Edge.FORWARD_BEGIN, 0)
        node.mark(Edge.FORWARD_END, 0)
        node.enter(Phase.B)
        # Gone before the next mark: a sample at marks does not see it.
        large = torch.empty(LARGE_BYTES + 12_345, dtype=torch.uint8)
        small = torch.empty(300_000, dtype=torch.uint8)
        del large, small
        node.enter(Phase.C)
        node.mark(Edge.BACKWARD_BEGIN, 0)
        node.mark(Edge.BACKWARD_END, 0)
        report = node.report()
        runtime.dump(tmp_path / "page.html")
        runtime.dump(tmp_path / "trace.pftrace")
        stats = runtime.stats()
    peak = stats["allocated"]["peak_bytes"]
    data = page_data(tmp_path / "page.html")
    counters = counter_peaks((tmp_path / "trace.pftrace").read_bytes())
    assert peak > LARGE_BYTES
    assert data["peak"]["bytes"] == data["totals"]["peak_bytes"][0] == peak
    assert counters["device awake"] == peak
    assert max(report["phase_peak_bytes"].values()) == report["phase_peak_bytes"]["B"] == peak
    assert data["totals"]["peak_bytes"][1] == stats["mapped"]["peak_bytes"]
    assert counters["device mapped"] == stats["mapped"]["peak_bytes"]
    assert data["peak"]["place"].startswith("phase B")
    assert sum(owner["bytes"] for owner in data["peak"]["owners"]) == peak


WRAPPED = """
import sys
import torch
import dormouse
from dormouse import Prefix
from dormouse._native import Edge, Phase

MIB = 1 << 20
runtime = dormouse.Runtime()
before = torch.empty(900 * MIB, dtype=torch.uint8)  # the peak of the process
del before
with Prefix(runtime, None, layers=1) as node:
    node.enter(Phase.A)
    node.mark(Edge.FORWARD_BEGIN, 0)
    node.mark(Edge.FORWARD_END, 0)
    node.enter(Phase.B)
    # Each of them is a change of the level: the ring of 64 has none from before the phase.
    for _ in range(100):
        torch.empty(40 * MIB, dtype=torch.uint8)
    large = torch.empty(300 * MIB + 12_345, dtype=torch.uint8)
    del large
    node.enter(Phase.C)
    node.mark(Edge.BACKWARD_BEGIN, 0)
    node.mark(Edge.BACKWARD_END, 0)
    report = node.report()
    runtime.dump(sys.argv[1] + "/page.html")
    runtime.dump(sys.argv[1] + "/trace.pftrace")
    print(runtime.stats()["allocated"]["peak_bytes"], report["phase_peak_bytes"]["B"])
"""


def test_what_the_ring_has_lost_is_not_recorded_and_no_peak(tmp_path):
    script = tmp_path / "wrapped.py"
    script.write_text(WRAPPED)
    environment = {**os.environ, "DORMOUSE_TRACE_EVENTS_MAX": "64"}
    command = [sys.executable, script, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    of_process, of_phase = map(int, done.stdout.split())
    assert of_process > 900 * MIB > of_phase > 300 * MIB
    data = page_data(tmp_path / "page.html")
    counters = counter_peaks((tmp_path / "trace.pftrace").read_bytes())
    assert data["levels_from_ns"] > 0
    assert data["peak"]["bytes"] == data["totals"]["peak_bytes"][0] == of_phase
    assert counters["device awake"] == of_phase
    assert data["peak"]["place"].startswith("phase B")
    peaks = {phase["name"][0]: phase["peak_bytes"][0] for phase in data["totals"]["phases"]}
    assert peaks["A"] is None and peaks["B"] == of_phase
    text = (tmp_path / "page.html").read_text()
    assert "Levels of memory are recorded from" in text and "The most so far, " in text
    assert "<td>not recorded</td>" in text
