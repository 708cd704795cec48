"""What all rows of one run share: who takes part, the churned sizes, and runs that several need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import runs
from contenders import ALL, Contender, Unavailable, build
from rows import Row

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

HOT_BYTES = 64 * KIB
HOT_WARMUP, HOT_PAIRS = 1_000, 10_000
CHURN_LIVE = (100, 1_000, 10_000)
# So many steps per live block before anything is counted: nearly all were replaced several times.
CHURN_WARMUP_PER_LIVE = 10
CHURN_STEPS = 10_000


@dataclass(frozen=True)
class Sizes:
    """Sizes of churned blocks: log-uniform between the two, and which sequence of them."""

    min_bytes: int = 512
    max_bytes: int = 32 * MIB
    seed: int = 0

    def __str__(self) -> str:
        return f"log-uniform {self.min_bytes} B to {self.max_bytes / MIB:g} MiB"


class Setting:
    """One run of the bench."""

    def __init__(self, sizes: Sizes, contenders: tuple[Contender, ...] = ALL) -> None:
        self.sizes = sizes
        self.contenders = contenders
        self.unbuilt: dict[str, str] = {}
        for contender in contenders:
            try:
                build(contender)
            except Unavailable as reason:
                self.unbuilt[contender.name] = str(reason)

    def fill(self, row: Row, figure: Callable[[Contender], float]) -> Row:
        """Asks every contender for its figure; a reason where there is none."""
        for contender in self.contenders:
            try:
                if contender.name in self.unbuilt:
                    raise Unavailable(self.unbuilt[contender.name])
                row.put(contender.name, figure(contender))
            except (Unavailable, MemoryError) as reason:
                row.put(contender.name, None)
                row.note(contender.name, reason)
        return row

    def churn_arguments(self, live: int, steps: int = CHURN_STEPS) -> tuple[object, ...]:
        sizes, warmup = self.sizes, CHURN_WARMUP_PER_LIVE * live
        return ("churn", live, sizes.min_bytes, sizes.max_bytes, sizes.seed, warmup, steps)

    @cache  # noqa: B019 - a setting lives as long as the program
    def churned(self, contender: Contender, live: int) -> runs.Result:
        """The churn that memory and calls are counted in, run once for all rows.

        As long again as the warm-up: a shorter one says more of where it lies than of the churn.
        """
        steps = max(CHURN_STEPS, CHURN_WARMUP_PER_LIVE * live)
        return runs.run(contender, *self.churn_arguments(live, steps))


def hot_arguments(pairs: int = HOT_PAIRS) -> tuple[object, ...]:
    return ("hot", HOT_BYTES, HOT_WARMUP, pairs)
