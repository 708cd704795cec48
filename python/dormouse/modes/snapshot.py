"""Snapshots of memory in the format of ``torch.cuda.memory._snapshot``, from the library's history.

What is mapped and the events before are read in one call per GPU, of one moment: the events, undone
from the newest on, lead from the segments of the snapshot to those of the oldest event. A piece of
mapped memory is a segment; a sleeping block is in none, and its bytes are a segment of the device
that stands for its tier.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator

import torch

from .. import _native as native
from ..errors import ArgumentError, MemoryTierError, StateError

# Extra capacity for what other threads do between two calls, by attempt.
_SPARE = (64, 4096, 1 << 18)
# Devices behind the GPUs: what a tier holds of sleeping memory. Addresses of a file are offsets in
# it, made unlike those of other GPUs' files; viewers want numbers below 2**53.
TIERS = {"host": 1, "nvme": 2}
_FILE_BASE, _FILE_BYTES_MAX = 1 << 44, 1 << 42
# Limit of the frames of all stacks, the library's.
FRAMES_MAX = 1 << 18
_LAYER_BITS = 32
_UNKNOWN = "unknown"
_STATES = ("inactive", "active_allocated", "active_pending_free")
# As torch says where nothing was compiled.
_NO_COMPILATION = "N/A"

# torch's names of the events of each of ours, and what ours adds to the metadata.
_ENTRIES = {
    "allocated": (("alloc",), None),
    "freed": (("free_requested", "free_completed"), None),
    "free_requested": (("free_requested",), None),
    "free_completed": (("free_completed",), None),
    "mapped": (("segment_map",), None),
    "unmapped": (("segment_unmap",), None),
    "fell_asleep": (("free_requested", "free_completed"), "fell asleep"),
    "awoke": (("alloc",), "awoke"),
    "out_of_memory": (("oom",), None),
    "read": (("snapshot",), None),
    "annotated": (("annotate",), None),
}
# In a tier each piece is a segment of its own.
_TIER_NAMES = {"segment_map": "segment_alloc", "segment_unmap": "segment_free"}
TORCH_ACTIONS = sorted(
    {name for names, _ in _ENTRIES.values() for name in names} | set(_TIER_NAMES.values())
)


def skipped_actions(names: set[str]) -> int:
    """Returns the bits of the actions that torch's ``names`` leave nothing of."""
    return sum(
        1 << number
        for number, action in enumerate(native.ACTIONS)
        if set(_ENTRIES[action][0]) <= names
    )


class Reading:
    """What one call of the library returned: figures, ranges and events as tuples of fields."""

    def __init__(self, ordinal: int, tier: int = 0, *, with_events: bool = True):
        self.figures = native.MemoryHistory()
        self.ranges: list[tuple] = []
        self.events: list[tuple] = []
        try:
            self._read(ordinal, tier, with_events)
        except ArgumentError:
            # Nothing was allocated there yet.
            return

    def _read(self, ordinal: int, tier: int, with_events: bool) -> None:
        figures = ctypes.byref(self.figures)
        native.call("torch_get_history", ordinal, tier, figures, None, 0, None, 0)
        for spare in _SPARE:
            ranges = (native.Range * (self.figures.range_count + spare))()
            count = self.figures.event_count + spare if with_events else 0
            events = (native.MemoryEvent * count)()
            pointers = (ranges, len(ranges), events if with_events else None, count)
            try:
                native.call("torch_get_history", ordinal, tier, figures, *pointers)
            except MemoryTierError:
                continue
            self.ranges = list(_rows(ranges, self.figures.range_count))
            if with_events:
                self.events = list(_rows(events, self.figures.event_count))
            return
        raise StateError(
            f"CUDA device {ordinal}: other threads allocated more than {_SPARE[-1]} blocks during "
            "the listing; accepted: a snapshot while fewer allocations are under way"
        )


def _rows(array: ctypes.Array, count: int) -> Iterator[tuple]:
    """Yields the first ``count`` structs of an array as tuples, without an object for each."""
    kind = array._type_
    letters = {
        ctypes.c_uint64: "Q",
        ctypes.c_void_p: "Q",
        ctypes.c_int32: "i",
        ctypes.c_uint32: "I",
    }
    layout = "=" + "".join(letters[field] for _, field in kind._fields_)
    return struct.iter_unpack(layout, memoryview(array).cast("B")[: count * ctypes.sizeof(kind)])


class Stacks:
    """The Python stacks of a reading, by number."""

    def __init__(self):
        frames, count = (native.Frame * FRAMES_MAX)(), ctypes.c_uint64()
        native.call("torch_get_frames", frames, len(frames), ctypes.byref(count))
        self._table = list(_rows(frames, count.value))
        # Shared between entries: pickle writes each once.
        self._stacks: dict[int, list[dict]] = {0: []}
        self._frames: dict[int, dict] = {}

    def __getitem__(self, number: int) -> list[dict]:
        """Returns the stack of this number as torch's frames, innermost first."""
        if number not in self._stacks:
            found, at = [], number
            while 0 < at <= len(self._table):
                found.append(self._frame(at))
                at = self._table[at - 1][2]
            self._stacks[number] = found
        return self._stacks[number]

    def _frame(self, number: int) -> dict:
        if number not in self._frames:
            address, offset, _ = self._table[number - 1]
            code = ctypes.cast(address, ctypes.py_object).value
            line = ctypes.pythonapi.PyCode_Addr2Line(ctypes.py_object(code), offset)
            frame = {"name": code.co_name, "filename": code.co_filename, "line": line}
            self._frames[number] = frame
        return self._frames[number]


class Writer:
    """Turns readings into torch's dictionaries.

    ``texts``: the user's metadata by number. ``with_event_frames``: whether events have the stack
    they were recorded with. ``skipped``: torch's names of events to leave out.
    """

    def __init__(self, texts: list[str], *, with_event_frames: bool, skipped: set[str]):
        self._texts = texts
        self._with_event_frames = with_event_frames
        self._skipped = frozenset(skipped)
        self._stacks = Stacks()
        self._tag_names: dict[tuple[int, int], str] = {}

    def segments(self, ordinal: int, ranges: list[tuple], *, base: int = 0) -> list[dict]:
        """Returns the segments of device ``ordinal``: its mapped ranges, neighbours joined."""
        found: list[dict] = []
        last = None
        for row in ranges:
            address, count, requested, stream, _, first, second = row[:7]
            usage, segment, _, stack, _, is_small = row[7:]
            address += base
            if (segment, address) != last:
                found.append(_segment(ordinal, address, stream, (first, second), is_small))
            piece = found[-1]
            is_active, is_allocated = usage != 0, native.USES[usage] == "allocated"
            piece["total_size"] += count
            piece["allocated_size"] += count if is_allocated else 0
            piece["active_size"] += count if is_active else 0
            piece["requested_size"] += requested if is_active else 0
            block = {
                "address": address,
                "size": count,
                "requested_size": requested,
                "state": _STATES[usage],
                "frames": self._stacks[stack],
            }
            if block["state"] == "inactive" and piece["blocks"]:
                before = piece["blocks"][-1]
                if before["state"] == "inactive":
                    before["size"] += count
                    block = None
            if block is not None:
                piece["blocks"].append(block)
            last = (segment, address + count)
        return found

    def entries(self, ordinal: int, events: list[tuple], *, tier: str | None = None) -> list[dict]:
        """Returns the events of device ``ordinal``, oldest first. What entries have in common is
        one object, which pickle writes once."""
        plans = [self._plan(action, ordinal, tier) for action in native.ACTIONS]
        said: dict[tuple, tuple] = {}
        found = []
        for event in events:
            unix_ns, address, count, stream, scope, first, second = event[:7]
            action, tag, stack, metadata = event[7:]
            names, place, base, remark = plans[action]
            key = (metadata, remark, tag, scope, first, second)
            if key not in said:
                said[key] = self._said(ordinal, *key)
            text, category, pool = said[key]
            frames = self._stacks[stack if self._with_event_frames else 0]
            for name in names:
                entry = {
                    "action": name,
                    place: address + base,
                    "size": count,
                    "stream": stream,
                    "time_us": unix_ns // 1000,
                    "compile_context": _NO_COMPILATION,
                    "user_metadata": text,
                    "pool_id": pool,
                    "category": category,
                    "frames": frames,
                }
                found.append(entry)
        return found

    def _plan(self, action: str, ordinal: int, tier: str | None) -> tuple:
        """Returns torch's names for an action, the key of its address, what is added to that, and
        a remark."""
        names, remark = _ENTRIES[action]
        if tier is not None:
            names = tuple(_TIER_NAMES.get(name, name) for name in names)
        kept = tuple(name for name in names if name not in self._skipped)
        place = "device_free" if action == "out_of_memory" else "addr"
        return kept, place, 0 if action == "read" else _base(ordinal, tier), remark

    def _said(
        self,
        ordinal: int,
        metadata: int,
        remark: str | None,
        tag: int,
        scope: int,
        first: int,
        second: int,
    ) -> tuple[str | dict, str, tuple[int, int]]:
        """Returns what entries have in common: the metadata, the category and the pool."""
        name = self._tag_name(ordinal, tag) if tag else None
        category = name or ("activations" if scope else _UNKNOWN)
        return _metadata(self._texts[metadata], remark, name, scope), category, (first, second)

    def _tag_name(self, ordinal: int, tag: int) -> str:
        known = self._tag_names.get((ordinal, tag))
        if known is None:
            text, count = ctypes.create_string_buffer(native.NAME_BYTES + 1), ctypes.c_uint64()
            arguments = (ordinal, tag, text, len(text), ctypes.byref(count))
            native.call("torch_get_tag_name", *arguments)
            known = text.value.decode() or f"tag {tag}"
            self._tag_names[ordinal, tag] = known
        return known


def _segment(ordinal: int, address: int, stream: int, pool: tuple, is_small: int) -> dict:
    return {
        "device": ordinal,
        "address": address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": pool,
        "is_expandable": ordinal < torch.cuda.device_count(),
        "frames": [],
        "blocks": [],
    }


def _base(ordinal: int, tier: str | None) -> int:
    return _FILE_BASE + ordinal * _FILE_BYTES_MAX if tier == "nvme" else 0


def _metadata(text: str, remark: str | None, tag: str | None, scope: int) -> str | dict:
    """Returns the user's text, or a dictionary with what dormouse knows beside it."""
    layer = {"prefix": scope >> _LAYER_BITS, "layer": scope & (1 << _LAYER_BITS) - 1}
    known = ({"dormouse": remark} if remark else {}) | ({"tag": tag} if tag else {})
    known |= layer if scope else {}
    if not known:
        return text
    return known | ({"metadata": text} if text else {})


def read_all(
    write: Writer, figures: Callable[[native.MemoryHistory], None], *, with_events: bool = True
) -> tuple[list, list]:
    """Returns the segments and the events by device of all GPUs and of the tiers behind them."""
    count = torch.cuda.device_count()
    segments, traces = [], [[] for _ in range(count)]
    tiers = {name: ([], []) for name in TIERS}
    for ordinal in range(count):
        reading = Reading(ordinal, with_events=with_events)
        figures(reading.figures)
        segments += write.segments(ordinal, reading.ranges)
        traces[ordinal] = write.entries(ordinal, reading.events)
        for name, tier in TIERS.items():
            of_tier = Reading(ordinal, tier, with_events=with_events)
            device = count + tier - 1
            base = _base(ordinal, name)
            tiers[name][0].extend(write.segments(device, of_tier.ranges, base=base))
            tiers[name][1].extend(write.entries(ordinal, of_tier.events, tier=name))
    for held, events in tiers.values():
        segments += held
        traces.append(sorted(events, key=lambda entry: entry["time_us"]))
    return segments, traces
