"""Finding the smallest size that is enough."""

from __future__ import annotations

from collections.abc import Callable


def smallest_enough(low: int, high: int, step: int, is_enough: Callable[[int], bool]) -> int | None:
    """The smallest ``low + k * step`` that is enough, or None where ``high`` is not.

    ``is_enough`` is asked of ``low`` first, which often is, and then as in a search of a sorted
    list: a size that is enough is assumed to be enough with more.
    """
    if is_enough(low):
        return low
    last = (high - low) // step
    if last == 0 or not is_enough(low + last * step):
        return None
    too_small, enough = 0, last
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if is_enough(low + middle * step):
            enough = middle
        else:
            too_small = middle
    return low + enough * step
