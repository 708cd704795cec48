"""Allocation traces as text: RMM's log, and one more column. docs/traces.md has the grammar.

Reading is strict: a trace that a benchmark misreads gives figures that look right. Needs the
standard library alone.
"""

from __future__ import annotations

import io
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ledger import Ledger, Refused

VERSION = 1
VERSION_KEY = "dormouse-trace"
REQUIRED_KEYS = ("about", "command")
PARTS_KEY = "parts"

RMM_COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
COLUMNS = (*RMM_COLUMNS, "Scope")
ALLOCATE, FREE, FAILURE = ACTIONS = ("allocate", "free", "allocate failure")

FILE_BYTES_MAX = 256 << 20  # decompressed
LINE_BYTES_MAX = 512
HEADER_LINES_MAX = 64
EVENTS_MAX = 4_000_000
THREADS_MAX = 4096
STREAMS_MAX = 4096
SCOPES_MAX = 1 << 20
SIZE_BYTES_MAX = 1 << 48
NUMBER_MAX = (1 << 64) - 1  # what RMM writes a thread or stream as

_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
_POINTER = re.compile(r"0x(0|[1-9a-f][0-9a-f]{0,15})")
_CLOCK = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}[.:][0-9]{1,9}")
_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
_NIL = "(nil)"  # how C's printf spells no pointer


class TraceFormatError(ValueError):
    """A file that is no trace. ``line`` counts from 1; 0 means the file as a whole."""

    def __init__(self, where: str, line: int, seen: object, accepted: str):
        super().__init__(f"{where}:{line}: {seen}; accepted: {accepted}")
        self.line = line
        self.seen = seen
        self.accepted = accepted


class Event(NamedTuple):
    """One call of an allocator: a line of a trace."""

    thread: int
    action: str
    pointer: int
    """A name that is unique among live blocks, in no other sense an address."""
    size: int
    stream: int
    scope: int = 0
    """Window the block was allocated in, 0 for none. A free repeats its allocation's."""


@dataclass
class Trace:
    """Events in the order they happened; an event's place in the list is its Time."""

    about: dict[str, str] = field(default_factory=dict)
    """The header's keys and values, :data:`VERSION_KEY` apart. Empty for an RMM log."""
    events: list[Event] = field(default_factory=list)

    def parts(self) -> dict[str, list[Event]]:
        """Events by part where the header has ``parts``, ``name first_event, ...``; else none.

        Raises :class:`ValueError` for anything else under that key.
        """
        starts: dict[str, int] = {}
        for piece in filter(None, self.about.get(PARTS_KEY, "").split(", ")):
            name, _, first = piece.partition(" ")
            before = max(starts.values(), default=-1)
            if not _NUMBER.fullmatch(first) or not before < int(first) < len(self.events):
                raise ValueError(f"part {piece!r}; accepted: 'name first_event', in order")
            if name in starts or not _KEY.fullmatch(name):
                raise ValueError(f"part name {name!r}; accepted: other lower-case names")
            starts[name] = int(first)
        ends = [*starts.values(), len(self.events)][1:]
        return {
            name: self.events[first:end]
            for (name, first), end in zip(starts.items(), ends, strict=True)
        }


def read(path: Path) -> Trace:
    """The trace in ``path``, ``.csv`` or ``.csv.xz``. Raises :class:`TraceFormatError`."""
    opener = lzma.open if _is_compressed(path) else open
    try:
        with opener(path, "rb") as file:
            return read_lines(file, path.name)
    except (lzma.LZMAError, EOFError) as error:
        raise TraceFormatError(path.name, 0, f"damaged xz data ({error})", "whole files") from None


def read_lines(file: BinaryIO, name: str = "trace") -> Trace:
    """The trace in an open binary file."""
    reader = _Reader(name)
    for line, text in enumerate(_lines(file, name), start=1):
        reader.take(line, text)
    return reader.finish()


def write(path: Path, trace: Trace) -> None:
    """Writes ``trace`` whole or not at all; the same trace gives the same bytes.

    Raises :class:`TraceFormatError` with its line for what no reader would take.
    """
    text = b"".join(line.encode("ascii") for line in _written(path.name, trace))
    # Read back before it replaces anything: reader and writer cannot drift apart.
    read_lines(io.BytesIO(text), path.name)
    data = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME) if _is_compressed(path) else text
    aside = path.with_name(path.name + ".part")
    aside.write_bytes(data)
    aside.replace(path)


def to_rmm(events: Iterable[Event]) -> Iterator[str]:
    """Lines of the same events as RMM's own replay reads them: no header keys, six columns."""
    yield ",".join(RMM_COLUMNS) + "\n"
    for time, event in enumerate(events):
        yield _row(time, event).rpartition(",")[0] + "\n"


def _written(name: str, trace: Trace) -> Iterator[str]:
    yield f"# {VERSION_KEY}: {VERSION}\n"
    for key, value in trace.about.items():
        if not value.isascii() or "\n" in value:
            raise TraceFormatError(name, 0, f"{key} {value!r}", "one line of ASCII")
        yield f"# {key}: {value}\n"
    yield ",".join(COLUMNS) + "\n"
    for time, event in enumerate(trace.events):
        yield _row(time, event) + "\n"


def _row(time: int, e: Event) -> str:
    return f"{e.thread},{time},{e.action},{e.pointer:#x},{e.size},{e.stream},{e.scope}"


def _is_compressed(path: Path) -> bool:
    if path.suffixes[-2:] == [".csv", ".xz"]:
        return True
    if path.suffix == ".csv":
        return False
    raise TraceFormatError(path.name, 0, f"a name that ends in {path.suffix!r}", ".csv, .csv.xz")


def _lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Lines without their ends, each no longer than any trace needs."""
    line = total = 0
    while raw := file.readline(LINE_BYTES_MAX + 1):
        line += 1
        total += len(raw)
        if total > FILE_BYTES_MAX:
            raise TraceFormatError(name, line, f"over {FILE_BYTES_MAX} bytes", "no more than that")
        if not raw.endswith(b"\n"):
            seen = f"{len(raw)} bytes without an end of line"
            accepted = f"whole lines of at most {LINE_BYTES_MAX} bytes; the file may be cut short"
            raise TraceFormatError(name, line, seen, accepted)
        if not raw.isascii():
            raise TraceFormatError(name, line, repr(raw[:40]), "ASCII")
        yield raw[:-1].decode("ascii")


class _Reader:
    """What was read so far."""

    def __init__(self, name: str):
        self._name = name
        self._line = 0
        self._version: str | None = None
        self._columns: tuple[str, ...] | None = None
        self._trace = Trace()
        self._ledger = Ledger()
        # RMM names threads and streams by the system's numbers: here they are counted.
        self._threads: dict[int, int] = {}
        self._streams: dict[int, int] = {}

    def take(self, line: int, text: str) -> None:
        self._line = line
        if self._columns is not None:
            self._event(text)
        elif text.startswith("#"):
            self._key(text)
        else:
            self._head(text)

    def finish(self) -> Trace:
        if self._columns is None:
            raise self._error("no line of column names", ",".join(COLUMNS))
        try:
            self._trace.parts()
        except ValueError as error:
            seen, _, accepted = str(error).partition("; accepted: ")
            raise TraceFormatError(self._name, 0, seen, accepted) from None
        return self._trace

    def _error(self, seen: object, accepted: str) -> TraceFormatError:
        return TraceFormatError(self._name, self._line, seen, accepted)

    def _key(self, text: str) -> None:
        key, colon, value = text.removeprefix("# ").partition(": ")
        if not text.startswith("# ") or not colon or not _KEY.fullmatch(key) or not value.strip():
            raise self._error(f"header line {text!r}", "'# key: value'")
        if self._line > HEADER_LINES_MAX:
            raise self._error(f"header line {self._line}", f"at most {HEADER_LINES_MAX}")
        if self._version is None:
            if (key, value) != (VERSION_KEY, str(VERSION)):
                raise self._error(f"first header line {text!r}", f"'# {VERSION_KEY}: {VERSION}'")
            self._version = value
        elif key in self._trace.about or key == VERSION_KEY:
            raise self._error(f"header key {key!r} again", "each key once")
        else:
            self._trace.about[key] = value

    def _head(self, text: str) -> None:
        columns = tuple(text.split(","))
        # Without the first header line it is RMM's own log, and has nothing to say of scopes.
        wanted = RMM_COLUMNS if self._version is None else COLUMNS
        if columns != wanted:
            raise self._error(f"columns {text!r}", ",".join(wanted))
        missing = [key for key in REQUIRED_KEYS if key not in self._trace.about]
        if missing and self._version is not None:
            accepted = f"one with {' and '.join(REQUIRED_KEYS)}"
            raise self._error(f"a header without {missing[0]!r}", accepted)
        self._columns = columns

    def _event(self, text: str) -> None:
        fields = text.split(",")
        if len(fields) != len(self._columns):
            raise self._error(f"{len(fields)} fields in {text!r}", f"{len(self._columns)} fields")
        if len(self._trace.events) >= EVENTS_MAX:
            raise self._error(f"event {EVENTS_MAX + 1}", f"at most {EVENTS_MAX} events")
        event = self._own(fields) if self._columns == COLUMNS else self._of_rmm(fields)
        if event is None:
            return
        if event.action != FAILURE:
            try:
                self._ledger.take(event.action == ALLOCATE, event)
            except Refused as refused:
                raise self._error(refused.seen, refused.accepted) from None
        self._trace.events.append(event)

    def _own(self, fields: list[str]) -> Event:
        thread, time, action, pointer, size, stream, scope = fields
        now = len(self._trace.events)
        if time != str(now):
            raise self._error(f"Time {time!r}", f"{now}, the number of the event")
        event = Event(
            self._number("Thread", thread, THREADS_MAX - 1),
            self._action(action),
            self._pointer(pointer),
            self._number("Size", size, SIZE_BYTES_MAX, least=1),
            self._number("Stream", stream, STREAMS_MAX - 1),
            self._number("Scope", scope, SCOPES_MAX),
        )
        if (event.pointer == 0) != (event.action == FAILURE):
            raise self._error(f"Pointer {pointer} of {action!r}", "0x0 for failures alone")
        return event

    def _of_rmm(self, fields: list[str]) -> Event | None:
        thread, time, action, pointer, size, stream = fields
        if not _CLOCK.fullmatch(time) and not _NUMBER.fullmatch(time):
            raise self._error(f"Time {time!r}", "HH:MM:SS.microseconds, or a number")
        action = self._action(action)
        where = 0 if pointer == _NIL else self._pointer(pointer)
        nbytes = self._number("Size", size, SIZE_BYTES_MAX)
        thread = self._counted("Thread", self._threads, thread, THREADS_MAX)
        stream = self._counted("Stream", self._streams, stream, STREAMS_MAX)
        if action == FAILURE:
            return Event(thread, action, 0, max(nbytes, 1), stream)
        if nbytes == 0:
            return None  # RMM logs these as well; they take no memory
        if where == 0:
            raise self._error(f"Pointer {pointer} of {size} bytes", "0x1 and above")
        return Event(thread, action, where, nbytes, stream)

    def _action(self, text: str) -> str:
        if text not in ACTIONS:
            raise self._error(f"Action {text!r}", ", ".join(ACTIONS))
        return text

    def _pointer(self, text: str) -> int:
        if not _POINTER.fullmatch(text):
            raise self._error(f"Pointer {text!r}", "0x and 1 to 16 of 0-9a-f, no zeros first")
        return int(text, 16)

    def _number(self, name: str, text: str, most: int, least: int = 0) -> int:
        if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
            raise self._error(f"{name} {text!r}", f"{least} to {most}, in decimal digits")
        return int(text)

    def _counted(self, name: str, known: dict[int, int], text: str, most: int) -> int:
        is_hex = name == "Stream" and _POINTER.fullmatch(text)
        number = int(text, 16) if is_hex else self._number(name, text, NUMBER_MAX)
        if number not in known and len(known) == most:
            raise self._error(f"{name} {text!r}, one more", f"at most {most} different ones")
        return known.setdefault(number, len(known))
