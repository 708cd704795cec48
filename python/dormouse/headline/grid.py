"""The published grid: peaks, and times in rounds that alternate both sides, cell by cell.

Cells are ordered by importance. A cell starts only if its minimum, peaks and one round, fits the
remaining time. Every figure is printed when it is known, and again after each round that improves
it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from ..demo.process import WorkerError
from . import arithmetic, bars
from .time_budget import TimeBudget
from .pair import Pair
from .rows import emit
from .shapes import COMPILED, HEADLINE, Cell, Geometry

ROUNDS = 3
# Additional pairs of asleep and awake, whose difference is small.
EXTRA_PAIRS = 4
# Responses of a dense run for its peak: a third would repeat the second.
DENSE_PEAK_RESPONSES = 2
# Seconds to start processes and pin host memory, and to compile both sides.
START_SECONDS = {"llama3-8b": 60.0, "tiny": 0.0}
COMPILE_SECONDS = {"llama3-8b": 180.0, "tiny": 0.0}


@dataclass
class Grid:
    """A run over cells."""

    pair: Pair
    geometry: Geometry
    budget: TimeBudget
    _started: set[str] = field(default_factory=set)

    def run(self, cells: list[Cell]) -> bool:
        """Measures as many cells as time allows. Returns whether all were measured."""
        broken: dict[str, str] = {}
        whole = True
        for cell in cells:
            reason = broken.get(cell.way) or self._no_time(cell)
            if reason is None:
                try:
                    whole &= self._measure(cell)
                    continue
                except WorkerError as error:
                    reason = broken[cell.way] = str(error)
                    for side in ("dense", "ours"):
                        self.pair.end(side)
            whole = False
            emit("row", bars.unmeasured(cell, reason))
        return whole

    def _measure(self, cell: Cell) -> bool:
        """Returns whether a timed run of ours ended."""
        measured = bars.Measured(cell)
        prompt, response = cell.tokens(self.geometry)
        for side in ("ours", "dense"):
            self._request(side, "take", prompt=prompt, response=response, responses=cell.responses)
        self._request("dense", "rest")
        with self._turn("ours"):
            measured.prediction = self._request("ours", "predict")
            self._warm("ours", cell)
            for side, sleep in (("asleep", True), ("awake", False)):
                found = self._request("ours", "run", way=cell.way, sleep=sleep, peaks=True)
                measured.peaks[side] = found
                self._learn("ours", cell, found, 1.0)
        with self._turn("dense"):
            measured.kernels = self._request("dense", "choose")
            self._warm("dense", cell)
            few = min(DENSE_PEAK_RESPONSES, cell.responses)
            found = self._request("dense", "run", way=cell.way, responses=few, peaks=True)
            measured.peaks["dense"] = found
            self._learn("dense", cell, found, few / cell.responses)
        self._started.add(cell.way)
        self._tell(measured)
        for index in range(ROUNDS):
            if index == 0 or self.budget.left() > self._round_seconds(cell):
                self._round(measured)
        if cell in HEADLINE and self.budget.left() > 3 * self._expect("ours", cell):
            self._limited(measured)
        for _ in range(EXTRA_PAIRS):
            if self.budget.left() > 3 * self._expect("ours", cell):
                self._round(measured, dense=False)
        return bars.has_time(measured)

    def _round(self, measured: bars.Measured, dense: bool = True) -> None:
        cell, replies = measured.cell, {}
        if dense:
            with self._turn("dense"):
                self._warm("dense", cell)
                replies["dense"] = self._request("dense", "run", way=cell.way)
                self._learn("dense", cell, replies["dense"], 1.0)
        with self._turn("ours"):
            self._warm("ours", cell)
            order = [("asleep", True), ("awake", False)]
            # The first side of a round runs on the cooler device.
            for side, sleep in order if len(measured.rounds) % 2 == 0 else order[::-1]:
                replies[side] = self._request("ours", "run", way=cell.way, sleep=sleep)
                self._learn("ours", cell, replies[side], 1.0)
        measured.rounds.append(replies)
        self._tell(measured)

    def _limited(self, measured: bars.Measured) -> None:
        """Steps under the device budget that the bar of the whole-step peak asks for."""
        about = self.pair.info["ours"]
        limit = bars.limit_bytes(measured, about["parameter_bytes"])
        if limit is None or about["total_bytes"] is None:
            # Not measured, or on a CPU, whose budget is the whole process's.
            return
        with self._turn("ours"):
            self._request("ours", "budget", device_bytes=limit)
            measured.peaks["limited"] = self._request(
                "ours", "run", way=measured.cell.way, peaks=True
            )
            measured.limited = self._request("ours", "run", way=measured.cell.way)
            self._request("ours", "budget", device_bytes=None)
        self._tell(measured)

    @contextlib.contextmanager
    def _turn(self, side: str):
        """Context in which a side uses the device; afterwards it keeps only its weights there."""
        yield
        self._request(side, "rest")

    def _warm(self, side: str, cell: Cell) -> None:
        """Warms up after a pause: refills caches, and compiles the first time."""
        microbatches = 2 * max(1, self.geometry.microbatch_tokens // cell.tokens(self.geometry)[1])
        responses = 1 if side == "dense" else min(microbatches, cell.responses)
        self._request(side, "run", way=cell.way, responses=responses)

    def _request(self, side: str, name: str, **arguments) -> dict:
        return self.pair.query(side, name, **arguments)

    def _learn(self, side: str, cell: Cell, reply: dict, share: float) -> None:
        if "seconds" in reply:
            self.budget.learn(side, cell.way, share * self._flops(side, cell), reply["seconds"])

    def _flops(self, side: str, cell: Cell) -> float:
        prompt, response = cell.tokens(self.geometry)
        work = arithmetic.work(self.geometry, prompt, response, cell.responses)
        return (work.dense if side == "dense" else work.ours).total

    def _expect(self, side: str, cell: Cell) -> float:
        return self.budget.expect(side, cell.way, self._flops(side, cell))

    def _round_seconds(self, cell: Cell) -> float:
        one = 1.0 + 1.0 / cell.responses
        return one * self._expect("dense", cell) + 3 * self._expect("ours", cell)

    def _no_time(self, cell: Cell) -> str | None:
        """Returns why the cell's minimum does not fit the remaining time, or None."""
        few = (4 + DENSE_PEAK_RESPONSES) / cell.responses
        need = few * self._expect("dense", cell) + 3 * self._expect("ours", cell)
        need += self._round_seconds(cell)
        if cell.way not in self._started:
            name = self.geometry.name
            need += COMPILE_SECONDS[name] if cell.way == COMPILED else START_SECONDS[name]
        left = self.budget.left()
        return None if need <= left else f"it needs about {need:.0f} s, and {left:.0f} s are left"

    def _tell(self, measured: bars.Measured) -> None:
        for each in bars.rows_of(measured, self.geometry):
            emit("row", each)
        emit("detail", {"cell": str(measured.cell), **_short(measured)})


def _short(measured: bars.Measured) -> dict:
    """Returns all measurements without prefix reports."""
    return {
        "peaks": measured.peaks,
        "rounds": [
            {side: {k: v for k, v in reply.items() if k != "prefix"} for side, reply in r.items()}
            for r in measured.rounds
        ],
        "prediction": measured.prediction,
    }
