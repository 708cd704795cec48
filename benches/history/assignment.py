#!/usr/bin/env python3
"""How long simulated rollout workers take with dormouse's assignment, a random one, and others.

    python benches/history/assignment.py                       # all rows
    python benches/history/assignment.py --only '*_heavy_*'    # some rows

Ten steps of new prompts, each with the lengths of three earlier steps. Of two responses to one
prompt, the lengths before the law have the row's correlation, in one step or in two. A worker goes
on to the next step when it has ended its own, at most one step ahead (rollout_engine.py). Figures
are means over seeds of a random deal's time over the contender's; the random deal gives each worker
as many prompts. """

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import NormalDist, mean, median, stdev

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benches"), str(HERE)]

from rollout_engine import Engine, Response
from rows import HIGHER, Row, measure

from dormouse.rollouts import Prompt, Rollouts

OUT = ROOT / "target" / "bench" / "assignment.json"

WORKERS, PROMPTS, RESPONSES, STEPS = 16, 128, 4, 10
PROMPT_TOKENS, EARLIER_STEPS = 200, 3
CORRELATIONS = (0.0, 0.5, 0.75, 0.9, 1.0)
SEEDS, MIGRATION_SEEDS = 32, 8
# Random deals of a seed, whose mean time counts.
DEALS = 2
TOKENS_MAX = 8192
# A worker's tokens per second: bound by memory in small batches, by arithmetic in large ones.
CURVE = {"batches": [1, 4, 16, 64, 256], "tokens_per_s": [100.0, 350.0, 1000.0, 2200.0, 3000.0]}
NORMAL = NormalDist()


def heavy(z: float) -> int:
    return min(TOKENS_MAX, 1 + int(1500 * math.exp(1.1 * z)))


def uniform(z: float) -> int:
    return 100 + int(7900 * NORMAL.cdf(z))


def bimodal(z: float) -> int:
    share = NORMAL.cdf(z)
    return 300 + int(625 * share) if share < 0.8 else 6000 + int(10_000 * (share - 0.8))


LAWS: dict[str, Callable[[float], int]] = {
    "heavy": heavy,
    "uniform": uniform,
    "bimodal": bimodal,
}


@dataclass
class Case:
    """``lengths[step][prompt]`` and, of its earlier steps, ``earlier[step][prompt][back]``."""

    lengths: list[list[list[int]]]
    earlier: list[list[list[list[int]]]]

    @classmethod
    def drawn(cls, law: str, correlation: float, seed: int) -> Case:
        dice = random.Random(f"{law} {correlation} {seed}")
        own, shared = math.sqrt(1 - correlation), math.sqrt(correlation)

        def prompt() -> list[list[int]]:
            level = shared * dice.gauss()
            draw = partial(dice.gauss, level, own) if own else lambda: level
            return [[LAWS[law](draw()) for _ in range(RESPONSES)] for _ in range(EARLIER_STEPS + 1)]

        drawn = [[prompt() for _ in range(PROMPTS)] for _ in range(STEPS)]
        return cls(
            [[each[-1] for each in step] for step in drawn],
            [[each[:-1] for each in step] for step in drawn],
        )


def seconds_of_deals(case: Case, deals: list[list[int]], curve: dict | None) -> float:
    """Time of prompts whose worker is given: ``deals[step][prompt]``."""

    def take(step: int, worker: int) -> list[Response]:
        mine = [number for number, its in enumerate(deals[step]) if its == worker]
        took = case.lengths[step]
        return [Response((n, r), length) for n in mine for r, length in enumerate(took[n])]

    return Engine(WORKERS, take, curve=curve).run(STEPS)


def random_seconds(case: Case, seed: int, curve: dict | None) -> float:
    dice = random.Random(seed)
    even = [number % WORKERS for number in range(PROMPTS)]
    runs = [
        seconds_of_deals(case, [dice.sample(even, PROMPTS) for _ in range(STEPS)], curve)
        for _ in range(DEALS)
    ]
    return mean(runs)


def sorted_seconds(case: Case, curve: dict | None) -> float:
    """Groups by length, each on the same worker in each step."""
    deals = []
    for step in case.earlier:
        length = [median(it for back in each for it in back) for each in step]
        ranked = sorted(range(PROMPTS), key=length.__getitem__)
        deal = [0] * PROMPTS
        for rank, number in enumerate(ranked):
            deal[number] = rank * WORKERS // PROMPTS
        deals.append(deal)
    return seconds_of_deals(case, deals, curve)


def longest_first_seconds(case: Case, curve: dict | None) -> float:
    """The prompt with the most tokens to the worker with the fewest, lengths known."""
    deals = []
    for step in case.lengths:
        load, deal = [0] * WORKERS, [0] * PROMPTS
        for number in sorted(range(PROMPTS), key=lambda it: -sum(step[it])):
            worker = min(range(WORKERS), key=load.__getitem__)
            deal[number] = worker
            load[worker] += sum(step[number])
        deals.append(deal)
    return seconds_of_deals(case, deals, curve)


class Driven:
    """A trainer that drives :class:`dormouse.rollouts.Rollouts` on simulated workers."""

    def __init__(self, case: Case, curve: dict | None, *, perfect: bool = False, **options):
        self.case, self.numbers = case, {}
        steps = zip(case.earlier, case.lengths, strict=True)
        history = [
            {"prompt": at * PROMPTS + number, "steps": [took] * 2 if perfect else earlier}
            for at, (before, after) in enumerate(steps)
            for number, (earlier, took) in enumerate(zip(before, after, strict=True))
        ]
        if perfect:
            options["quantile_permille"] = 1000
        self.rollouts = Rollouts(WORKERS, curve=curve, history=history, **options)
        moves = options.get("tail_permille") != 0
        poll = self.poll if moves else None
        self.engine = Engine(WORKERS, self.take, curve=curve, poll=poll)
        # Rollouts that wait for the next step, by where they are from.
        self.waiting: dict[tuple[int, int, int], Response] = {}
        self.origins: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def run(self) -> float:
        seconds = self.engine.run(STEPS)
        # What the last steps deferred is generated before the end counts.
        token_s = self.engine.seconds[1]
        rest = [it.length - it.tokens + it.recompute_tokens * 0.01 for it in self.waiting.values()]
        return seconds + token_s * max(rest, default=0)

    def take(self, step: int, worker: int) -> list[Response]:
        if step not in self.numbers:
            first = step * PROMPTS
            prompts = [
                Prompt(first + number, PROMPT_TOKENS, RESPONSES) for number in range(PROMPTS)
            ]
            self.numbers[step] = self.rollouts.assign(prompts)
        share = []
        for piece in self.rollouts.take(self.numbers[step], worker):
            if piece.deferred is not None:
                mine = [self.waiting.pop(piece.deferred)]
                mine[0].name = (piece.request, 0)
            else:
                lengths = self.case.lengths[step][piece.prompt - step * PROMPTS]
                mine = [Response((piece.request, r), it) for r, it in enumerate(lengths)]
            for response in mine:
                place = (self.numbers[step], *response.name)
                self.origins[place] = piece.deferred or place
            share += mine
        return share

    def poll(self, step: int, engine: Engine) -> None:
        number = self.numbers[step]
        states = engine.states(step)
        self.rollouts.progress(number, [(*name, tokens, done) for name, tokens, done in states])
        for move in self.rollouts.migrate(number):
            name = (move.request, move.response)
            response = engine.move(name, move.from_worker, move.to_worker, move.recompute_tokens)
            if move.to_worker is None:
                self.waiting[self.origins[(number, *name)]] = response


def ratios(law: str, correlation: float, measured: bool, seed: int) -> dict[str, float]:
    """A random deal's time over each contender's."""
    case, curve = Case.drawn(law, correlation, seed), CURVE if measured else None
    seconds = {
        "ours": Driven(case, curve, tail_permille=0).run(),
        "sorted": sorted_seconds(case, curve),
        "longest_first_perfect": longest_first_seconds(case, curve),
        "ours_perfect": Driven(case, curve, perfect=True, tail_permille=0).run(),
    }
    dealt = random_seconds(case, seed, curve)
    return {name: dealt / each for name, each in seconds.items()}


def migration(law: str, correlation: float, measured: bool, seed: int) -> tuple[float, float]:
    """Time without migrations over time with them, and the share of rollouts that migrated."""
    case, curve = Case.drawn(law, correlation, seed), CURVE if measured else None
    still = Driven(case, curve, tail_permille=0).run()
    driven = Driven(case, curve)
    # Polls cut time in pieces, whose sum has the rounding of floats.
    return round(still / driven.run(), 6), driven.engine.moved / (STEPS * PROMPTS * RESPONSES)


@cache
def pool() -> ProcessPoolExecutor:
    # Not forked: other rows have loaded the library.
    return ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))


def over_seeds(figure: Callable[[int], object], seeds: int) -> list:
    return list(pool().map(figure, range(seeds)))


def spread(ratios: list[float]) -> str:
    """The least and the greatest ratio, and the standard error of their mean."""
    error = stdev(ratios) / math.sqrt(len(ratios))
    return f"{min(ratios):.3f} to {max(ratios):.3f}, standard error {error:.4f}"


def assignment_row(name: str, law: str, correlation: float, measured: bool) -> Row:
    row = Row(name, "ratio", HIGHER, f"{SEEDS} seeds of {STEPS} steps, {WORKERS} workers")
    every = over_seeds(partial(ratios, law, correlation, measured), SEEDS)
    for contender in every[0]:
        row.put(contender, mean(each[contender] for each in every))
    row.bar = max(1.0, 0.95 * row.peers["longest_first_perfect"])
    if law == "heavy" and correlation >= 0.75 and not measured:
        row.bar = 1.5
    ours = [each["ours"] for each in every]
    row.how += f"; {spread(ours)}"
    return row


def migration_row(name: str, law: str, correlation: float, measured: bool) -> Row:
    how = f"{MIGRATION_SEEDS} seeds of {STEPS} steps, {WORKERS} workers"
    row = Row(name, "ratio", HIGHER, how, bar=1.0)
    every = over_seeds(partial(migration, law, correlation, measured), MIGRATION_SEEDS)
    ours = [ratio for ratio, _ in every]
    row.ours = mean(ours)
    moved = mean(share for _, share in every)
    row.how += f"; {spread(ours)}; {moved:.1%} of rollouts migrated"
    return row


def makers() -> Iterator[tuple[tuple[str, ...], Callable[[], list[Row]]]]:
    """Names of rows, and what measures them."""
    subjects = {"assignment_over_random": assignment_row, "migration_over_none": migration_row}
    for subject, row in subjects.items():
        for suffix, measured in (("", False), ("_curve", True)):
            for law in LAWS:
                for correlation in CORRELATIONS:
                    name = f"{subject}{suffix}_{law}_{correlation:g}"
                    yield (
                        (name,),
                        lambda args=(name, law, correlation, measured), row=row: [row(*args)],
                    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="patterns of row names, separated by commas")
    return measure(makers(), parser.parse_args().only, OUT)


if __name__ == "__main__":
    raise SystemExit(main())
