"""The order of retrieved passages in which prompts share the most."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence

from ..errors import ArgumentError

Passages = Sequence[Hashable]

# Comparisons of rows in one call: a few seconds. Rows that have more keep their given order.
COMPARISONS_MAX = 1 << 28
# What looking at a passage costs besides: sets compare many rows in the time of one Python step.
PASSAGE_COMPARISONS = 16


def order_for_sharing(
    rows: Sequence[Passages], length: Callable[[Hashable], int] = lambda passage: 1
) -> list[list[Hashable]]:
    """Returns the passages of each row in an order in which rows begin alike for long.

    ``rows``: the passages that each prompt reads, none twice in a row. ``length``: the tokens of a
    passage. Passages that save the most tokens come first: of the rows that are alike so far, those
    with the passages that most tokens of the others have too form a group, and go on together. An
    order that would share less than the given one is not taken, nor one that takes more than
    ``COMPARISONS_MAX`` comparisons of rows: for these the given order is returned. Raises
    :class:`dormouse.ArgumentError` for a passage that a row has twice.
    """
    for index, row in enumerate(rows):
        if len(set(row)) < len(row):
            raise ArgumentError(f"row {index} has a passage twice; accepted: each once")
    given = [list(row) for row in rows]
    try:
        ordered = _ordered(given, length)
    except _TooManyError:
        return given
    return min(given, ordered, key=lambda rows: distinct_tokens(rows, length))


def distinct_tokens(
    rows: Sequence[Passages], length: Callable[[Hashable], int] = lambda passage: 1
) -> int:
    """Returns the tokens of passages that are computed once equal beginnings of rows are shared."""
    beginnings = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    return sum(length(beginning[-1]) for beginning in beginnings)


class _TooManyError(Exception):
    """More than ``COMPARISONS_MAX``."""


class _Budget:
    """Comparisons of one call."""

    def __init__(self) -> None:
        self.left = COMPARISONS_MAX

    def spend(self, comparisons: int) -> None:
        self.left -= comparisons
        if self.left < 0:
            raise _TooManyError


def _ordered(given: list[list], length) -> list[list]:
    lengths = {passage: length(passage) for row in given for passage in row}
    ordered: list[list[Hashable]] = [[] for _ in given]
    budget = _Budget()
    groups = [_Group(dict(enumerate(given)), lengths, budget)]
    while groups:
        group = groups.pop()
        while best := group.best():
            common, members = best
            taken = set(common)
            left = {row: [p for p in group.left[row] if p not in taken] for row in members}
            group.remove(members)
            for row in members:
                ordered[row] += common
            groups.append(_Group(left, lengths, budget))
        for row, own in group.left.items():
            ordered[row] += own
    return ordered


class _Group:
    """Rows that are alike so far, ascending, and the passages that each has left."""

    def __init__(self, left: dict[int, list], lengths: dict, budget: _Budget) -> None:
        self.left = left
        self._lengths, self._budget = lengths, budget
        # The rows that have a passage.
        self._rows: dict[Hashable, set[int]] = {}
        for row, own in left.items():
            budget.spend(PASSAGE_COMPARISONS * len(own))
            for passage in own:
                self._rows.setdefault(passage, set()).add(row)
        # Passages, the most saved tokens first. An entry is out of date unless its number is the
        # passage's.
        self._heap: list[tuple] = []
        self._numbers: dict[Hashable, int] = {}
        self._count = 0
        self._weigh(self._rows)

    def best(self) -> tuple[list, list[int]] | None:
        """Returns the passages to go on with, and the rows that have them all. None if no two rows
        have one in common."""
        while self._heap:
            *_, number, passage = self._heap[0]
            if self._numbers.get(passage) == number:
                members = sorted(self._rows[passage])
                return self._common(passage, members[0]), members
            heapq.heappop(self._heap)
        return None

    def remove(self, members: Iterable[int]) -> None:
        """Removes rows, and weighs anew what they have."""
        # In the order of rows: a set has another in each process.
        touched: dict[Hashable, None] = {}
        for row in members:
            for passage in self.left.pop(row):
                self._rows[passage].discard(row)
                touched[passage] = None
        self._weigh(touched)

    def _common(self, passage: Hashable, first: int) -> list:
        """Returns the passages that all rows with ``passage`` have, ``first`` the first of them."""
        members = self._rows[passage]
        common = []
        for other in self.left[first]:
            rows = self._rows[other]
            compared = len(members) if len(rows) >= len(members) else 0
            self._budget.spend(PASSAGE_COMPARISONS + compared)
            if members <= rows:
                common.append(other)
        return common

    def _weigh(self, passages: Iterable[Hashable]) -> None:
        for passage in passages:
            members = self._rows[passage]
            self._numbers.pop(passage, None)
            if len(members) < 2:
                continue
            self._budget.spend(len(members))
            first = min(members)
            common = self._common(passage, first)
            saved = (len(members) - 1) * sum(self._lengths[p] for p in common)
            if saved > 0:
                # Of passages that save as much, the one that comes first in the first row.
                place = first, self.left[first].index(passage)
                self._count += 1
                self._numbers[passage] = self._count
                heapq.heappush(self._heap, (-saved, *place, self._count, passage))
