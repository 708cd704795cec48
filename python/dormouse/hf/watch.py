"""Which of many containers may have changed since they were read?

CPython numbers the changes of all dicts in ascending order: a dict whose number is the same holds
the same entries. Other containers, few and short, are compared entry by entry.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from .sources import Source

try:
    # The guards of torch.compile rely on it.
    from torch._C._dynamo.guards import dict_version
except ImportError:
    # A number that was never seen: every dict is compared entry by entry.
    _numbers = itertools.count()

    def dict_version(container: dict) -> int:
        return next(_numbers)

# Less than every number.
_NEVER = -1


class Watch:
    """Must be created before the entries are read, so that no change in between is missed."""

    def __init__(self, sources: Sequence[Source]):
        self._filled: list[int] = []
        self._empty: list[int] = []
        self._others: list[int] = []
        for index, source in enumerate(sources):
            if not isinstance(source.container, dict):
                self._others.append(index)
            elif source.container:
                self._filled.append(index)
            else:
                self._empty.append(index)
        self._dicts = [sources[index].container for index in self._filled]
        self._empty_dicts = [sources[index].container for index in self._empty]
        self._views = [sources[index].view() for index in self._others]
        self._versions = self._seen = list(map(dict_version, self._dicts))
        self._sum = sum(self._versions)
        self._objects = self._seen_objects = self._current_objects()

    def suspects(self) -> list[int]:
        """Returns the indices of the sources that may have changed."""
        if any(self._empty_dicts):
            self._number_filled()
        found = []
        self._seen = self._versions
        # Numbers only ascend, so an equal sum is of equal numbers. It needs no list.
        if sum(map(dict_version, self._dicts)) != self._sum:
            self._seen = list(map(dict_version, self._dicts))
            versions = zip(self._filled, self._seen, self._versions, strict=True)
            found += [index for index, now, before in versions if now != before]
        self._seen_objects = self._current_objects()
        if not _are_identical(self._seen_objects, self._objects):
            found += self._others
        return found

    def settle(self) -> None:
        """Takes what the last :meth:`suspects` saw for unchanged."""
        self._versions = self._seen
        self._sum = sum(self._versions)
        self._objects = self._seen_objects

    def _number_filled(self) -> None:
        """Counts dicts that were empty among those with numbers, as changed."""
        is_filled = list(map(bool, self._empty_dicts))
        self._filled += itertools.compress(self._empty, is_filled)
        self._dicts += itertools.compress(self._empty_dicts, is_filled)
        self._versions = self._versions + [_NEVER] * sum(is_filled)
        self._sum = sum(self._versions)
        is_empty = [not each for each in is_filled]
        self._empty = list(itertools.compress(self._empty, is_empty))
        self._empty_dicts = list(itertools.compress(self._empty_dicts, is_empty))

    def _current_objects(self) -> list:
        """Returns the entries of the other containers, and their lengths before them."""
        return [*map(len, self._views), *itertools.chain.from_iterable(self._views)]


def _are_identical(now: list, before: list) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))
