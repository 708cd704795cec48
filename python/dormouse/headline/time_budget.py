"""How long things will take, so that what matters most is done within the time there is."""

from __future__ import annotations

import time

# What a first step is taken to reach until one was measured. The tiny model's time is overhead.
ASSUMED_FLOPS_PER_S = {"llama3-8b": 3e14, "tiny": 1e12}


class TimeBudget:
    """A deadline, and operations per second learnt from what was run. ``seconds``: until it."""

    def __init__(self, seconds: float, geometry_name: str):
        self._deadline = time.monotonic() + seconds
        self._rate: dict[tuple[str, str], float] = {}
        self._assumed = ASSUMED_FLOPS_PER_S[geometry_name]

    def left(self) -> float:
        """Seconds that are left; negative past the deadline."""
        return self._deadline - time.monotonic()

    def learn(self, side: str, way: str, flops: float, seconds: float) -> None:
        """A run of ``side`` took so long."""
        if seconds > 0.0:
            self._rate[side, way] = flops / seconds

    def expect(self, side: str, way: str, flops: float) -> float:
        """Seconds that a run will take; an unmeasured way goes like the side's other one."""
        known = [rate for (each, _), rate in self._rate.items() if each == side]
        rate = self._rate.get((side, way)) or (min(known) if known else self._assumed)
        return flops / rate
