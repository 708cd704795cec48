"""What torch's viewers expect of a snapshot, as they read it.

``torch/cuda/_memory_viz.py`` sums blocks per segment. The page at pytorch.org/memory_viz undoes the
events of a device from the newest on (``simulate_memory``), looks every block up in the segments of
that moment, and reads pickles of few opcodes. :func:`check` does the same and fails where they
would, or would draw something that was not.
"""

from __future__ import annotations

import pickletools

STATES = {"active_allocated", "active_pending_free", "inactive"}
# Pairs of the page's own: what undoes what.
MAPS, UNMAPS = {"segment_map", "segment_alloc"}, {"segment_unmap", "segment_free"}
ACTIONS = {
    *("alloc", "free_requested", "free_completed", "oom", "snapshot", "annotate"),
    *MAPS,
    *UNMAPS,
}
ADDRESS_MAX = 1 << 53
OPCODES = {
    *("PROTO", "FRAME", "MARK", "STOP", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"),
    *("DICT", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM"),
    *("SETITEMS", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINPUT", "LONG_BINPUT", "BINGET"),
    *("LONG_BINGET", "MEMOIZE"),
}
YEAR_2020_US = 1_577_836_800_000_000


def check(snapshot: dict) -> None:
    """Fails unless viewers can draw the snapshot."""
    for segment in snapshot["segments"]:
        check_segment(segment)
    categories = {
        event["category"]
        for trace in snapshot["device_traces"]
        for event in trace
        if "category" in event
    }
    assert not categories or "unknown" in categories, categories
    for device, events in enumerate(snapshot["device_traces"]):
        check_events(events)
        segments = [each for each in snapshot["segments"] if each["device"] == device]
        undo(segments, events)
    devices = {each["device"] for each in snapshot["segments"]}
    assert devices <= set(range(len(snapshot["device_traces"])))


def check_segment(segment: dict) -> None:
    at = segment["address"]
    assert 0 < at < ADDRESS_MAX
    for block in segment["blocks"]:
        assert block["address"] == at and block["size"] > 0, segment
        assert block["state"] in STATES
        assert block["requested_size"] <= block["size"]
        assert (block["state"] == "inactive") == (block["requested_size"] == 0)
        at += block["size"]
    assert at == segment["address"] + segment["total_size"], segment
    sums = {"allocated_size": {"active_allocated"}, "active_size": STATES - {"inactive"}}
    for name, states in sums.items():
        of_blocks = [each["size"] for each in segment["blocks"] if each["state"] in states]
        assert segment[name] == sum(of_blocks), (name, segment)
    inactive = [each["state"] == "inactive" for each in segment["blocks"]]
    assert not any(a and b for a, b in zip(inactive, inactive[1:], strict=False)), "not one"


def check_events(events: list[dict]) -> None:
    times = [event["time_us"] for event in events]
    assert times == sorted(times) and all(time > YEAR_2020_US for time in times)
    for event in events:
        assert event["action"] in ACTIONS
        assert ("device_free" if event["action"] == "oom" else "addr") in event
        for frame in event["frames"]:
            assert frame.keys() == {"name", "filename", "line"}


def undo(segments: list[dict], events: list[dict]) -> tuple[dict, dict]:
    """Undoes the events as the page does. Returns the memory before the first: the ends and streams
    of pieces by address, and the blocks."""
    pieces = {}
    for each in sorted(segments, key=lambda each: each["address"]):
        map_piece(pieces, each["address"], each["total_size"], each["stream"])
    blocks = {
        block["address"]: [block["requested_size"], block["state"] == "active_pending_free"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    for event in reversed(events):
        action, at, size = event["action"], event.get("addr"), event["size"]
        if action == "free_requested":
            assert blocks[at] == [size, True], event
            blocks[at][1] = False
        elif action == "free_completed":
            assert at not in blocks, event
            blocks[at] = [size, True]
            assert piece_of(pieces, at, size), event
        elif action == "alloc":
            assert piece_of(pieces, at, size), event
            assert blocks.pop(at) == [size, False], event
        elif action in UNMAPS:
            map_piece(pieces, at, size, event["stream"])
        elif action in MAPS:
            inside = [block for block in blocks if at <= block < at + size]
            assert not inside, (event, inside)
            unmap_piece(pieces, at, size, event["stream"])
    return pieces, blocks


def map_piece(pieces: dict, at: int, size: int, stream: int) -> None:
    assert not any(
        at < start + length and start < at + size for start, (length, _) in pieces.items()
    )
    for start, (length, other) in list(pieces.items()):
        if other == stream and start + length == at:
            del pieces[start]
            at, size = start, length + size
        elif other == stream and start == at + size:
            del pieces[start]
            size += length
    pieces[at] = (size, stream)


def unmap_piece(pieces: dict, at: int, size: int, stream: int) -> None:
    start = piece_of(pieces, at, size)
    assert start, (hex(at), size)
    length, other = pieces.pop(start)
    assert other == stream
    if start < at:
        pieces[start] = (at - start, stream)
    if at + size < start + length:
        pieces[at + size] = (start + length - at - size, stream)


def piece_of(pieces: dict, at: int, size: int) -> int | None:
    around = [
        start
        for start, (length, _) in pieces.items()
        if start <= at and at + size <= start + length
    ]
    return around[0] if around else None


def check_pickle(data: bytes) -> None:
    """Fails unless the page can read the pickle."""
    for opcode, argument, _ in pickletools.genops(data):
        assert opcode.name in OPCODES, opcode.name
        if opcode.name == "PROTO":
            assert 2 <= argument <= 4


def active_bytes(events: list[dict], start: int = 0) -> list[int]:
    """The bytes after each event that the page's "Active Memory Timeline" stacks."""
    total, found = start, []
    for event in events:
        total += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        found.append(total)
    return found
