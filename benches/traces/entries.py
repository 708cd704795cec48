"""Entries of torch's memory history as calls of an allocator. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable

from builder import Builder

MAIN_THREAD, BACKWARD_THREAD = 0, 1
# What torch's allocator does by itself, or tells about itself. ``free_completed`` is when its own
# polling found other streams done with a block: an allocator is asked at ``free_requested``.
NOT_ASKED = (
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
)


class HistoryError(RuntimeError):
    """A history that is no recording of a whole workload."""


def replay(entries: Iterable[dict], made: Builder) -> None:
    """Makes in ``made`` each call that torch's allocator or the library's was asked for.

    Frees of what was allocated before the recording are left out.
    """
    streams: dict[int, int] = {}
    pointers: dict[int, int] = {}
    accumulators: dict[int, list[int]] = {}
    for entry in entries:
        action, stamp = entry["action"], entry.get("user_metadata", "")
        # The main thread always has a stamp, and autograd's has none.
        thread = MAIN_THREAD if stamp else BACKWARD_THREAD
        if action == "alloc":
            stream = streams.setdefault(entry["stream"], len(streams))
            scope = json.loads(stamp)["scope"] if stamp else 0
            pointers[entry["addr"]] = made.allocate(entry["size"], stream, scope, thread)
        elif action == "free_requested":
            if entry["addr"] in pointers:
                made.free(pointers.pop(entry["addr"]), thread)
        elif action == "annotate":
            _fact(json.loads(stamp), accumulators, made)
        elif action not in NOT_ASKED:
            raise HistoryError(f"entry {action!r}; accepted: what a run with enough memory has")


def _fact(fact: dict, accumulators: dict[int, list[int]], made: Builder) -> None:
    """What the library allocates itself, of which torch knows nothing."""
    if "accumulator" in fact:
        own = accumulators.setdefault(fact["node"], [])
        own.append(made.allocate(fact["accumulator"]))
    else:
        made.free_all(accumulators.pop(fact["end"], []))
