"""The order of retrieved passages in which prompts share the most."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from ..errors import ArgumentError

Passages = Sequence[Hashable]


def order_for_sharing(
    rows: Sequence[Passages], length: Callable[[Hashable], int] = lambda passage: 1
) -> list[list[Hashable]]:
    """Returns the passages of each row in an order in which rows begin alike for long.

    ``rows``: the passages that each prompt reads, none twice in a row. ``length``: the tokens of a
    passage. Passages that save the most tokens come first: of the rows that are alike so far, those
    with the passages that most tokens of the others have too form a group, and go on together. An
    order that would share less than the given one is not taken. Raises
    :class:`dormouse.ArgumentError` for a passage that a row has twice.
    """
    for index, row in enumerate(rows):
        if len(set(row)) < len(row):
            raise ArgumentError(f"row {index} has a passage twice; accepted: each once")
    given = [list(row) for row in rows]
    ordered: list[list[Hashable]] = [[] for _ in rows]
    groups = [list(range(len(rows)))]
    while groups:
        group = groups.pop()
        left = {row: [p for p in given[row] if p not in ordered[row]] for row in group}
        common, members = _best(left, length)
        if not common:
            for row in group:
                ordered[row] += left[row]
            continue
        for row in members:
            ordered[row] += common
        groups.append(members)
        groups.append([row for row in group if row not in members])
    return min(given, ordered, key=lambda rows: distinct_tokens(rows, length))


def distinct_tokens(
    rows: Sequence[Passages], length: Callable[[Hashable], int] = lambda passage: 1
) -> int:
    """Returns the tokens of passages that are computed once equal beginnings of rows are shared."""
    beginnings = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    return sum(length(beginning[-1]) for beginning in beginnings)


def _best(left: dict[int, list], length) -> tuple[list, list[int]]:
    """Returns the passages to go on with, and the rows that have them all; none if no two rows have
    one in common."""
    best, saved = ([], []), 0
    for passage in dict.fromkeys(p for own in left.values() for p in own):
        members = [row for row, own in left.items() if passage in own]
        if len(members) < 2:
            continue
        first, *others = (left[row] for row in members)
        common = [p for p in first if all(p in own for own in others)]
        own = (len(members) - 1) * sum(length(p) for p in common)
        if own > saved:
            best, saved = (common, members), own
    return best
