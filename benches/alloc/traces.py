"""Traces: RMM's CSV log with a column more, packed for the drivers.

Columns are ``Thread,Time,Action,Pointer,Size,Stream,Scope``, the last one optional. Lines that
begin with ``#`` say where a trace is from. Events are replayed in the order of the file.
"""

from __future__ import annotations

import csv
import lzma
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ALLOCATE = "allocate"
FREE = "free"
# A failed request had no effect: nothing of it can be replayed.
IGNORED = "allocate failure"
# workload.h reads these: kind, slot, bytes, stream, scope.
RECORD = struct.Struct("<IIQII")
KIND_ALLOCATE, KIND_FREE, KIND_END_SCOPES = range(3)
# So many events without a scope, and the prefix forward is over: within one there are dozens.
SCOPE_GAP_EVENTS = 1_000
DEFAULT_STREAMS = ("", "0", "0x0", "(nil)")


class Event(NamedTuple):
    is_free: bool
    pointer: str
    bytes: int
    stream: str
    scope: int


class TraceError(Exception):
    """A line that cannot be replayed, with its number."""


def stem(path: Path) -> str:
    return path.name.split(".csv")[0]


def find(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.csv"), *directory.glob("*.csv.xz")], key=stem)


def pack_file(path: Path) -> bytes:
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    return b"".join(pack(line for line in text.splitlines() if not line.startswith("#")))


def has_scopes(records: bytes) -> bool:
    return any(kind == KIND_END_SCOPES for kind, *_ in RECORD.iter_unpack(records))


def pack(lines: Iterable[str]) -> Iterator[bytes]:
    """One record per event. Slots are used again, so that there are as few as live blocks."""
    events = list(read(lines))
    ends = scope_ends(events)
    live: dict[str, tuple[int, Event]] = {}
    free_slots: list[int] = []
    streams = dict.fromkeys(DEFAULT_STREAMS, 0)
    slots = 0
    for index, event in enumerate(events):
        if event.is_free:
            slot, asked = live.pop(event.pointer)
            free_slots.append(slot)
            # On the stream it was allocated for, as torch does.
            yield RECORD.pack(KIND_FREE, slot, asked.bytes, streams[asked.stream], 0)
        else:
            stream = streams.setdefault(event.stream, max(streams.values()) + 1)
            if free_slots:
                slot = free_slots.pop()
            else:
                slot, slots = slots, slots + 1
            live[event.pointer] = (slot, event)
            yield RECORD.pack(KIND_ALLOCATE, slot, event.bytes, stream, event.scope)
        if index in ends:
            yield RECORD.pack(KIND_END_SCOPES, 0, 0, 0, 0)


def scope_ends(events: list[Event]) -> set[int]:
    """Behind which events a run of scopes is over: a trace does not say whose they are."""
    scoped = [index for index, event in enumerate(events) if event.scope and not event.is_free]
    gaps = {index for index, later in pairwise(scoped) if later - index >= SCOPE_GAP_EVENTS}
    return gaps | set(scoped[-1:])


def read(lines: Iterable[str]) -> Iterator[Event]:
    """The events that have an effect, checked: each block is allocated once and freed once."""
    live: set[str] = set()
    # No bytes, no memory: torch may be asked for them, and gives a null.
    empty: set[str] = set()
    # A header of its own, then one line per event.
    for number, row in enumerate(csv.DictReader(lines), start=2):
        action, pointer = row["Action"], row["Pointer"]
        if action == ALLOCATE and int(row["Size"]) == 0:
            empty.add(pointer)
        elif action == FREE and pointer in empty and pointer not in live:
            empty.remove(pointer)
        elif action == ALLOCATE:
            if pointer in live:
                raise TraceError(f"line {number}: {pointer} is allocated twice")
            live.add(pointer)
            yield Event(False, pointer, int(row["Size"]), row["Stream"], int(row.get("Scope") or 0))
        elif action == FREE:
            if pointer not in live:
                raise TraceError(f"line {number}: {pointer} is freed and was not allocated")
            live.remove(pointer)
            yield Event(True, pointer, 0, row["Stream"], 0)
        elif action != IGNORED:
            raise TraceError(f"line {number}: action {action!r}; accepted: {ALLOCATE}, {FREE}")
