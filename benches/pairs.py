"""Two contenders in turn on a machine that is never the same for long: ratios of neighbours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from math import comb
from statistics import median
from typing import TypeVar

# One-sided: so sure is the lower bound of a median.
CONFIDENCE = 0.95
# Fewer have no lower bound of that confidence worth the name.
PAIRS_MIN = 10

Figure = TypeVar("Figure")


def alternate(
    pairs: int,
    first: Callable[[], Figure],
    second: Callable[[], Figure],
    before: Callable[[], None] = lambda: None,
    seconds_max: float = math.inf,
) -> list[tuple[Figure, Figure]]:
    """Runs both so often; who goes first changes, so that neither always follows the other. No pair but
    the first begins after ``seconds_max``."""
    found = []
    start = time.monotonic()
    for turn in range(pairs):
        if found and time.monotonic() - start > seconds_max:
            break
        before()
        if turn % 2 == 0:
            one = first()
            found.append((one, second()))
        else:
            other = second()
            found.append((first(), other))
    return found


def median_ratio(pairs: list[tuple[float, float]]) -> float:
    return median(one / other for one, other in pairs)


def lower_bound(values: list[float]) -> float:
    """Of the median, by order statistics: no shape of the distribution is assumed."""
    return sorted(values)[rank(len(values))]


def rank(count: int) -> int:
    """The largest k such that the median is below the k-th smallest value (from 0) in no more than
    1 - CONFIDENCE of all cases."""
    if count < PAIRS_MIN:
        raise ValueError(f"{count} values; at least {PAIRS_MIN} are accepted")
    below, k = 0.0, 0
    while True:
        below += comb(count, k) / 2**count
        if below > 1 - CONFIDENCE:
            return k - 1
        k += 1
