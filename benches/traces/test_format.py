"""The format: what is written is read back, and what is not a trace is refused with its line."""

from __future__ import annotations

import io
import lzma
import random
from pathlib import Path

import pytest
from builder import Builder
from format import (
    ALLOCATE,
    COLUMNS,
    EVENTS_MAX,
    FAILURE,
    FREE,
    HEADER_LINES_MAX,
    LINE_BYTES_MAX,
    RMM_COLUMNS,
    SCOPES_MAX,
    SIZE_BYTES_MAX,
    STREAMS_MAX,
    THREADS_MAX,
    Event,
    Trace,
    TraceFormatError,
    read,
    read_lines,
    to_rmm,
    write,
)

HEADER = ["# dormouse-trace: 1", "# about: a test", "# command: none"]
HEAD = ",".join(COLUMNS)
RMM_HEAD = ",".join(RMM_COLUMNS)
ABOUT = {"about": "a test", "command": "none"}


def parsed(*lines: str, end: str = "\n") -> Trace:
    return read_lines(io.BytesIO(("\n".join(lines) + end).encode()))


def random_trace(seed: int, events: int = 300) -> Trace:
    """Any trace at all, within the limits."""
    chance, made, live = random.Random(seed), Builder(), []
    while len(made.events) < events:
        if live and chance.random() < 0.4:
            made.free(live.pop(chance.randrange(len(live))), chance.randrange(THREADS_MAX))
        elif chance.random() < 0.05:
            made.events.append(Event(0, FAILURE, 0, chance.randint(1, SIZE_BYTES_MAX), 1))
        else:
            size = min(SIZE_BYTES_MAX, int(2 ** (48 * chance.random())) + chance.randrange(2))
            stream, scope = chance.randrange(STREAMS_MAX), chance.randint(0, SCOPES_MAX)
            live.append(made.allocate(size, stream, scope, chance.randrange(THREADS_MAX)))
    return Trace(dict(ABOUT), made.events)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.xz"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_is_read_back(tmp_path, name, seed):
    trace, path = random_trace(seed), tmp_path / name
    write(path, trace)
    assert read(path) == trace
    first = path.read_bytes()
    write(path, read(path))
    assert path.read_bytes() == first
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_line_says_what_it_says():
    trace = parsed(*HEADER, HEAD, "1,0,allocate,0xff00,4096,2,7", "0,1,free,0xff00,4096,2,7")
    allocated = Event(thread=1, action=ALLOCATE, pointer=0xFF00, size=4096, stream=2, scope=7)
    assert trace.events == [allocated, allocated._replace(thread=0, action=FREE)]
    assert trace.about == ABOUT


def test_a_trace_of_nothing_is_a_trace():
    assert parsed(*HEADER, HEAD).events == []


A = "0,0,allocate,0x100,512,0,3"
BAD_EVENTS = {
    "few fields": ("0,0,allocate,0x100,512,0", "6 fields"),
    "many fields": (A + ",0", "8 fields"),
    "empty": ("", "1 fields"),
    "comment below the head": ("# late: 1", "1 fields"),
    "thread sign": ("+1,0,allocate,0x100,512,0,0", "Thread '+1'"),
    "thread limit": (f"{THREADS_MAX},0,allocate,0x100,512,0,0", f"Thread '{THREADS_MAX}'"),
    "time": ("0,1,allocate,0x100,512,0,0", "Time '1'"),
    "clock": ("0,10:00:00.000001,allocate,0x100,512,0,0", "Time '10:00"),
    "action": ("0,0,malloc,0x100,512,0,0", "Action 'malloc'"),
    "action case": ("0,0,Allocate,0x100,512,0,0", "Action 'Allocate'"),
    "pointer decimal": ("0,0,allocate,256,512,0,0", "Pointer '256'"),
    "pointer upper case": ("0,0,allocate,0xFF,512,0,0", "Pointer '0xFF'"),
    "pointer padded": ("0,0,allocate,0x0100,512,0,0", "Pointer '0x0100'"),
    "pointer long": ("0,0,allocate,0x10000000000000000,512,0,0", "Pointer '0x1000"),
    "pointer nil": ("0,0,allocate,(nil),512,0,0", "Pointer '(nil)'"),
    "pointer none": ("0,0,allocate,0x0,512,0,0", "Pointer 0x0 of 'allocate'"),
    "pointer of failure": ("0,0,allocate failure,0x100,512,0,0", "Pointer 0x100 of"),
    "size none": ("0,0,allocate,0x100,0,0,0", "Size '0'"),
    "size negative": ("0,0,allocate,0x100,-512,0,0", "Size '-512'"),
    "size fraction": ("0,0,allocate,0x100,512.0,0,0", "Size '512.0'"),
    "size padded": ("0,0,allocate,0x100,0512,0,0", "Size '0512'"),
    "size limit": (f"0,0,allocate,0x100,{SIZE_BYTES_MAX + 1},0,0", "Size '281474976710657'"),
    "size digits": ("0,0,allocate,0x100," + "9" * 200 + ",0,0", "Size '999"),
    "stream": ("0,0,allocate,0x100,512,0x0,0", "Stream '0x0'"),
    "stream limit": (f"0,0,allocate,0x100,512,{STREAMS_MAX},0", f"Stream '{STREAMS_MAX}'"),
    "scope": ("0,0,allocate,0x100,512,0,", "Scope ''"),
    "scope limit": (f"0,0,allocate,0x100,512,0,{SCOPES_MAX + 1}", f"Scope '{SCOPES_MAX + 1}'"),
    "space": ("0,0,allocate,0x100,512,0, 0", "Scope ' 0'"),
    "carriage return": (A + "\r", "Scope '3\\r'"),
    "free of nothing": ("0,0,free,0x100,512,0,0", "a free of 0x100, which is not live"),
    "not ASCII": ("0,0,alloc\u00e9,0x100,512,0,0", "alloc"),
    "long": ("0" * (LINE_BYTES_MAX + 1), "without an end of line"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_EVENTS)
def test_a_line_that_is_no_event_is_refused(case):
    line, seen = BAD_EVENTS[case]
    with pytest.raises(TraceFormatError) as refused:
        parsed(*HEADER, HEAD, line)
    assert refused.value.line == len(HEADER) + 2
    assert seen in str(refused.value.seen)
    assert refused.value.accepted in str(refused.value)


BAD_SECONDS = {
    "0,1,allocate,0x100,64,0,0": "an allocation at 0x100, where 512 bytes are live",
    "0,1,free,0x200,512,0,3": "a free of 0x200, which is not live",
    "0,1,free,0x100,511,0,3": "Size 511 of a free of 0x100",
    "0,1,free,0x100,512,0,0": "Scope 0 of a free of 0x100",
}


@pytest.mark.parametrize("line", BAD_SECONDS)
def test_an_event_that_cannot_follow_is_refused(line):
    with pytest.raises(TraceFormatError) as refused:
        parsed(*HEADER, HEAD, A, line)
    assert (refused.value.line, refused.value.seen) == (6, BAD_SECONDS[line])


def test_a_free_twice_is_refused():
    with pytest.raises(TraceFormatError, match=":7: a free of 0x100, which is not live"):
        parsed(*HEADER, HEAD, A, "0,1,free,0x100,512,0,3", "0,2,free,0x100,512,0,3")


BAD_HEADS = {
    "nothing": ([], 0, "no line of column names"),
    "header alone": (HEADER, 3, "no line of column names"),
    "columns": ([*HEADER, "Thread,Time"], 4, "columns 'Thread,Time'"),
    "RMM's columns under our header": ([*HEADER, RMM_HEAD], 4, "columns 'Thread,"),
    "our columns without header": ([HEAD], 1, "columns 'Thread,"),
    "version first": (["# about: x", *HEADER, HEAD], 1, "first header line '# about: x'"),
    "version": (["# dormouse-trace: 2"], 1, "first header line '# dormouse-trace: 2'"),
    "version again": ([*HEADER, HEADER[0], HEAD], 4, "header key 'dormouse-trace' again"),
    "key again": ([*HEADER, "# about: x", HEAD], 4, "header key 'about' again"),
    "no key": ([HEADER[0], "# just words", HEAD], 2, "header line '# just words'"),
    "no value": ([HEADER[0], "# about:  ", HEAD], 2, "header line '# about:  '"),
    "key's case": ([HEADER[0], "# About: x", HEAD], 2, "header line '# About: x'"),
    "no space": ([HEADER[0], "#about: x", HEAD], 2, "header line '#about: x'"),
    "no about": ([HEADER[0], HEADER[2], HEAD], 3, "a header without 'about'"),
    "no command": ([*HEADER[:2], HEAD], 3, "a header without 'command'"),
    "lines": ([HEADER[0], *(f"# k{i}: x" for i in range(HEADER_LINES_MAX))], 65, "header line 65"),
    "parts without events": ([*HEADER, "# parts: a 0", HEAD], 0, "part 'a 0'"),
    "parts out of order": ([*HEADER, "# parts: a 0, b 0", HEAD, A], 0, "part 'b 0'"),
    "parts' numbers": ([*HEADER, "# parts: a", HEAD, A], 0, "part 'a'"),
    "parts' names": ([*HEADER, "# parts: A 0", HEAD, A], 0, "part name 'A'"),
}


@pytest.mark.parametrize("case", BAD_HEADS)
def test_a_head_that_is_none_is_refused(case):
    lines, line, seen = BAD_HEADS[case]
    with pytest.raises(TraceFormatError) as refused:
        parsed(*lines, end="\n" if lines else "")
    assert (refused.value.line, seen in str(refused.value.seen)) == (line, True), refused.value


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    with pytest.raises(TraceFormatError, match="without an end of line"):
        parsed(*HEADER, HEAD, A, end="")
    path = tmp_path / "t.csv.xz"
    write(path, random_trace(0))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceFormatError, match="damaged xz"):
        read(path)
    path.write_bytes(b"Thread,Time")
    with pytest.raises(TraceFormatError, match="damaged xz"):
        read(path)


def test_a_name_says_what_a_file_is(tmp_path):
    for name in ("t.txt", "t.xz", "t.csv.gz", "t"):
        with pytest.raises(TraceFormatError, match="accepted: .csv, .csv.xz"):
            read(tmp_path / name)


def test_limits_hold(monkeypatch):
    import format as traces

    lines = [*HEADER, HEAD, A, "0,1,allocate,0x200,1,0,0"]
    monkeypatch.setattr(traces, "EVENTS_MAX", 1)
    with pytest.raises(TraceFormatError, match="6: event 2; accepted: at most 1 events"):
        parsed(*lines)
    monkeypatch.setattr(traces, "EVENTS_MAX", EVENTS_MAX)
    monkeypatch.setattr(traces, "FILE_BYTES_MAX", 100)
    with pytest.raises(TraceFormatError, match="over 100 bytes"):
        parsed(*lines)


def test_a_small_file_that_unpacks_to_very_much_is_refused(tmp_path, monkeypatch):
    import format as traces

    monkeypatch.setattr(traces, "FILE_BYTES_MAX", 1 << 16)
    path = tmp_path / "t.csv.xz"
    key = "# k: " + "x" * 400 + "\n"
    path.write_bytes(lzma.compress((HEADER[0] + "\n" + key * 10_000).encode()))
    with pytest.raises(TraceFormatError):
        read(path)


def test_nothing_is_written_that_would_not_be_read(tmp_path):
    path = tmp_path / "t.csv"
    write(path, random_trace(1))
    before = path.read_bytes()
    live = Event(0, ALLOCATE, 0x100, 1, 0)
    for trace in (
        Trace({}, []),
        Trace(ABOUT | {"more": "a\nb"}, []),
        Trace(ABOUT | {"more": "caf\u00e9"}, []),
        Trace(ABOUT | {"More": "x"}, []),
        Trace(ABOUT, [live, live]),
        Trace(ABOUT, [live._replace(size=0)]),
        Trace(ABOUT, [live._replace(action="malloc")]),
    ):
        with pytest.raises(TraceFormatError):
            write(path, trace)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["t.csv"]


RMM_LOG = """Thread,Time,Action,Pointer,Size,Stream
140213,10:21:43.129387,allocate,0x7fe4b0000000,1048576,0
140213,10:21:43.129400,allocate,0x7fe4b0100000,64,0x55d0c8
140777,10:21:43.129401,allocate failure,(nil),1099511627776,0
140777,10:21:43.129402,allocate,(nil),0,2
140777,10:21:43.129403,free,0x7fe4b0000000,1048576,2
140777,10:21:43.129404,allocate,0x7fe4b0000000,8,0
"""


def test_the_log_of_rmm_is_read():
    trace = read_lines(io.BytesIO(RMM_LOG.encode()))
    assert trace.about == {}
    assert trace.events == [
        Event(0, ALLOCATE, 0x7FE4B0000000, 1 << 20, 0),
        Event(0, ALLOCATE, 0x7FE4B0100000, 64, 1),
        Event(1, FAILURE, 0, 1 << 40, 0),
        Event(1, FREE, 0x7FE4B0000000, 1 << 20, 2),
        Event(1, ALLOCATE, 0x7FE4B0000000, 8, 0),
    ]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("1,now,allocate,0x1,1,0", "Time 'now'"),
        ("1,10:00:00.000001,allocate,(nil),1,0", "Pointer (nil)"),
        ("1,10:00:00.000001,free,0x1,1,0", "a free of 0x1"),
        ("1,10:00:00.000001,allocate,0x1,1,0,0", "7 fields"),
        ("-1,10:00:00.000001,allocate,0x1,1,0", "Thread '-1'"),
        ("1,10:00:00.000001,allocate,0x1,1,stream", "Stream 'stream'"),
    ],
)
def test_a_log_of_rmm_that_is_none_is_refused(line, seen):
    with pytest.raises(TraceFormatError) as refused:
        parsed(RMM_HEAD, line)
    assert (refused.value.line, seen in str(refused.value)) == (2, True)


def test_what_is_written_for_rmm_is_read_as_its_own():
    trace = random_trace(3)
    lines = list(to_rmm(trace.events))
    assert lines[0] == RMM_HEAD + "\n"
    again = read_lines(io.BytesIO("".join(lines).encode()))
    assert [e[1:4] for e in again.events] == [e[1:4] for e in trace.events]
    assert len({e.stream for e in again.events}) == len({e.stream for e in trace.events})


def test_the_example_in_the_documentation_is_a_trace():
    page = Path(__file__).resolve().parents[2] / "docs" / "traces.md"
    examples = [part for part in page.read_text().split("```") if part.startswith("csv\n")]
    assert len(examples) == 1
    trace = read_lines(io.BytesIO(examples[0].removeprefix("csv\n").encode()))
    assert {e.action for e in trace.events} == {ALLOCATE, FREE, FAILURE}
    assert any(e.scope for e in trace.events)
