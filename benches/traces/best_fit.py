"""The naive allocator that traces are tried on: best fit in one range, coalesced at once."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from format import ALLOCATE, FREE, Event


def span_bytes(events: Iterable[Event]) -> int:
    """How far the range had to grow. Streams are ignored: what is freed is free for all."""
    heap, at, size_at = _Heap(), {}, {}
    for event in events:
        if event.action == ALLOCATE:
            at[event.pointer] = heap.take(event.size)
            size_at[event.pointer] = event.size
        elif event.action == FREE:
            heap.give(at.pop(event.pointer), size_at.pop(event.pointer))
    return heap.end


class _Heap:
    """Holes by size and by both of their ends."""

    def __init__(self):
        self.end = 0
        self._by_size: list[tuple[int, int]] = []
        self._size_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def take(self, size: int) -> int:
        index = bisect.bisect_left(self._by_size, (size, 0))
        if index < len(self._by_size):
            hole, start = self._by_size[index]
            self._remove(start)
            if hole > size:
                self._add(start + size, hole - size)
            return start
        # The range grows by what its last hole lacks.
        start = self._start_of.get(self.end, self.end)
        if start != self.end:
            self._remove(start)
        self.end = start + size
        return start

    def give(self, start: int, size: int) -> None:
        end = start + size
        if end in self._size_of:
            end += self._remove(end)
        before = self._start_of.get(start)
        if before is not None:
            self._remove(before)
            start = before
        self._add(start, end - start)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._by_size, (size, start))
        self._size_of[start] = size
        self._start_of[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._size_of.pop(start)
        del self._start_of[start + size]
        self._by_size.pop(bisect.bisect_left(self._by_size, (size, start)))
        return size
