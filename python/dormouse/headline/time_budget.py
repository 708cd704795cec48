"""Expected run times, so that the most important runs fit the available time."""

from __future__ import annotations

import time

# Assumed rate until one is measured. The tiny model's time is overhead.
ASSUMED_FLOPS_PER_S = {"llama3-8b": 3e14, "tiny": 1e12}


class TimeBudget:
    """A deadline ``seconds`` from now, and measured rates in FLOP/s."""

    def __init__(self, seconds: float, geometry_name: str):
        self._deadline = time.monotonic() + seconds
        self._rate: dict[tuple[str, str], float] = {}
        self._assumed = ASSUMED_FLOPS_PER_S[geometry_name]

    def left(self) -> float:
        """Returns the remaining seconds; negative after the deadline."""
        return self._deadline - time.monotonic()

    def learn(self, side: str, way: str, flops: float, seconds: float) -> None:
        """Records the measured time of a run of ``side``."""
        if seconds > 0.0:
            self._rate[side, way] = flops / seconds

    def expect(self, side: str, way: str, flops: float) -> float:
        """Returns the expected seconds of a run, by the other way if this one is unmeasured."""
        known = [rate for (each, _), rate in self._rate.items() if each == side]
        rate = self._rate.get((side, way)) or (min(known) if known else self._assumed)
        return flops / rate
