"""Makes a trace call by call, as an allocator would be called."""

from __future__ import annotations

import heapq

from format import ALLOCATE, FREE, Event

POINTER_STEP = 0x100  # of RMM's simulated memory: what its pointers are multiples of


class Builder:
    """Events so far. Names of blocks are the lowest that are not in use: short, and the same on
    every machine."""

    def __init__(self):
        self.events: list[Event] = []
        self._live: dict[int, Event] = {}
        self._names: list[int] = []
        self._names_made = 0

    def allocate(self, size: int, stream: int = 0, scope: int = 0, thread: int = 0) -> int:
        """Returns the block's pointer."""
        if self._names:
            name = heapq.heappop(self._names)
        else:
            self._names_made += 1
            name = self._names_made
        event = Event(thread, ALLOCATE, name * POINTER_STEP, size, stream, scope)
        self._live[event.pointer] = event
        self.events.append(event)
        return event.pointer

    def free(self, pointer: int, thread: int = 0) -> None:
        """On the stream it was allocated for."""
        block = self._live.pop(pointer)
        self.events.append(block._replace(thread=thread, action=FREE))
        heapq.heappush(self._names, pointer // POINTER_STEP)

    def free_all(self, pointers) -> None:
        """Each in turn."""
        for pointer in pointers:
            self.free(pointer)

    @property
    def live(self) -> list[int]:
        """Pointers of live blocks, oldest first."""
        return list(self._live)
