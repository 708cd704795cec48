"""Recorded traces: what is committed, and how torch's entries become events. Needs no torch."""

from __future__ import annotations

import json

import pytest
import record
import summary
from builder import Builder
from command import HERE
from entries import HistoryError, replay
from format import ALLOCATE, FREE, Event, read
from interleaved import CHUNKS, MICROBATCHES, OWN, STAGES, order

TRACES = {name: read(HERE / f"{name}.csv.xz") for name in record.NAMES}
MAIN = json.dumps({"scope": 0})


@pytest.mark.parametrize("name", record.NAMES)
def test_the_peak_is_the_one_torch_counted(name):
    about, s = TRACES[name].about, summary.summarise(TRACES[name].events)
    if name == "demo_update":
        # The library's accumulators are not torch's.
        assert s.peak_bytes > int(about["torch-peak-requested-bytes"])
    else:
        assert s.peak_bytes == int(about["torch-peak-requested-bytes"])
    assert about["command"].endswith(f"record.py {name}")
    assert s.failures == 0
    assert s.end_bytes == 0
    assert s.threads == 2, "backward has a thread of its own"


def test_windows_are_those_of_phase_a_alone():
    for name, trace in TRACES.items():
        s = summary.summarise(trace.events)
        assert s.windows == (32 if name == "demo_update" else 0)
    events = TRACES["demo_update"].events
    made = [e for e in events if e.action == ALLOCATE and e.scope]
    assert {e.thread for e in made} == {0}
    assert [e.scope for e in made] == sorted(e.scope for e in made), "one window after the other"


def test_every_step_of_variable_length_is_another():
    sizes = {e.size for e in TRACES["variable_length"].events if e.action == ALLOCATE}
    assert len(sizes) > 30 * 5


def test_every_traces_streams_are_numbered_as_they_come():
    for trace in TRACES.values():
        seen = list(dict.fromkeys(e.stream for e in trace.events))
        assert seen == list(range(len(seen)))


def entry(action: str, addr: int, size: int, stream: int = 0, stamp: str = MAIN) -> dict:
    said = {"user_metadata": stamp} if stamp else {}
    return {"action": action, "addr": addr, "size": size, "stream": stream} | said


def replayed(*entries: dict) -> list[Event]:
    made = Builder()
    replay(entries, made)
    return made.events


def test_a_free_is_where_torch_was_asked_for_it():
    events = replayed(
        entry("free_requested", 1, 10),  # from before
        entry("segment_alloc", 512, 2 << 20),
        entry("alloc", 512, 100, stream=77, stamp=json.dumps({"scope": 3})),
        entry("alloc", 1024, 200, stream=0, stamp=""),
        entry("free_requested", 512, 100, stream=77, stamp=""),
        entry("alloc", 2048, 300, stream=77),
        entry("free_completed", 512, 100, stream=77),
    )
    assert events == [
        Event(0, ALLOCATE, 0x100, 100, 0, 3),
        Event(1, ALLOCATE, 0x200, 200, 1),
        Event(1, FREE, 0x100, 100, 0, 3),
        Event(0, ALLOCATE, 0x100, 300, 0),
    ]


def test_the_librarys_own_memory_lives_as_long_as_its_node():
    def said(**fact):
        return entry("annotate", 0, 0, stamp=json.dumps(fact))

    events = replayed(
        said(accumulator=64, node=5),
        said(accumulator=32, node=6),
        said(accumulator=16, node=5),
        said(end=5),
        said(end=4),
    )
    assert [(e.action, e.size) for e in events] == [
        (ALLOCATE, 64),
        (ALLOCATE, 32),
        (ALLOCATE, 16),
        (FREE, 64),
        (FREE, 16),
    ]


def test_a_history_without_enough_memory_is_refused():
    with pytest.raises(HistoryError, match="'oom'"):
        replayed(entry("oom", 0, 1))


def test_the_schedule_is_interleaved_1f1b():
    ops = order()
    per_chunk = {(kind, chunk): 0 for kind in ("forward", "backward") for chunk in range(CHUNKS)}
    in_flight = []
    for kind, chunk in ops:
        per_chunk[kind, chunk] += 1
        assert per_chunk["backward", chunk] <= per_chunk["forward", chunk]
        in_flight.append(sum(n if k == "forward" else -n for (k, _), n in per_chunk.items()))
    assert set(per_chunk.values()) == {MICROBATCHES}
    warmup = (STAGES - OWN - 1) * 2 + (CHUNKS - 1) * STAGES
    assert in_flight[warmup] == max(in_flight) == warmup + 1
    assert ops[warmup + 1][0] == "backward"
    assert in_flight[-1] == 0
