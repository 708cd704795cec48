"""Rows of what a pair costs: instructions, threads, wall time."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import runs
from contenders import NATIVE, OURS, OURS_RECORDING, Contender, Unavailable
from rows import HIGHER, LOWER, Row
from setting import (
    CHURN_STEPS,
    CHURN_WARMUP_PER_LIVE,
    HOT_BYTES,
    HOT_PAIRS,
    HOT_WARMUP,
    KIB,
    Setting,
    hot_arguments,
)

HOT_BAR = 300
CHURN_BAR = 500
HISTORY_FACTOR = 3
SCALING_BAR = 0.93

# Short rounds, and many: on a machine with few processors and others on it, a round counts only if
# the spin loop had two of them.
SCALING_PAIRS, SCALING_ROUNDS = 10_000, 60
SCALING_ROUNDS_MIN, SCALING_ATTEMPTS_MAX = 9, 12
SPIN_SCALING = (1.7, 2.1)
WALL_ROUNDS, WALL_HOT_PAIRS, WALL_LIVE = 7, 200_000, 1_000
COSTS_NS = (0, 2_000, 20_000)


def hot_instructions(setting: Setting, name: str) -> Row:
    how = f"callgrind, all threads, {HOT_PAIRS} pairs of {HOT_BYTES // KIB} KiB behind {HOT_WARMUP}"
    row = Row(name, "instructions/pair", LOWER, how, bar=HOT_BAR)
    return setting.fill(row, lambda one: runs.count_instructions(one, *hot_arguments()))


def history_instructions(setting: Setting, name: str) -> Row:
    how = (
        f"as hot_pair_instructions, with torch's memory history on, without stacks; bar: "
        f"{HISTORY_FACTOR} times without, in the same run"
    )
    row = Row(name, "instructions/pair", LOWER, how)
    without, recording = (
        runs.count_instructions(one, *hot_arguments()) for one in (OURS, OURS_RECORDING)
    )
    row.bar = HISTORY_FACTOR * without
    row.put(OURS.name, recording)
    return row


def churn_instructions(setting: Setting, name: str, live: int) -> Row:
    how = (
        f"callgrind, all threads, {CHURN_STEPS} replacements of a random one of {live} live blocks "
        f"behind {CHURN_WARMUP_PER_LIVE * live}, {setting.sizes}"
    )
    row = Row(name, "instructions/pair", LOWER, how, bar=CHURN_BAR)
    arguments = setting.churn_arguments(live)
    return setting.fill(row, lambda one: runs.count_instructions(one, *arguments))


def two_threads(setting: Setting, name: str) -> Row:
    how = (
        f"pairs of {HOT_BYTES // KIB} KiB per second, two threads over one, divided by the same of "
        f"a spin loop; medians over rounds of all four in turn, at least {SCALING_ROUNDS_MIN}, in "
        f"which the spin loop scaled by {SPIN_SCALING[0]} to {SPIN_SCALING[1]}"
    )
    row = Row(name, "ratio", HIGHER, how, bar=SCALING_BAR)
    return setting.fill(row, lambda one: scaling(row, one))


def scaling(row: Row, contender: Contender) -> float:
    """A machine that had no two processors to give says nothing about a contender."""
    rounds: list[tuple[float, float]] = []
    for _ in range(SCALING_ATTEMPTS_MAX):
        result = runs.run(contender, "scaling", HOT_BYTES, SCALING_PAIRS, SCALING_ROUNDS)
        ratios = [
            (2 * one / two, 2 * spin_one / spin_two)
            for one, two, spin_one, spin_two in result["rounds"]
        ]
        rounds += [
            (pairs, spin) for pairs, spin in ratios if SPIN_SCALING[0] <= spin <= SPIN_SCALING[1]
        ]
        if len(rounds) >= SCALING_ROUNDS_MIN:
            pairs, spin = (median(column) for column in zip(*rounds, strict=True))
            row.how += f"; {contender.name} {pairs:.3f} / {spin:.3f} in {len(rounds)} rounds"
            return pairs / spin
    raise Unavailable(f"the machine was busy: {len(rounds)} such rounds")


def hot_ns(setting: Setting, name: str) -> Row:
    row = Row(name, "ns/pair", LOWER, f"wall time, {interleaved()}")
    return wall(setting, row, lambda one: per_pair(runs.run(one, *hot_arguments(WALL_HOT_PAIRS))))


def churn_ns(setting: Setting, name: str, cost_ns: int) -> Row:
    how = f"wall time of churn_1000's measured part, {cost(cost_ns)}, {interleaved()}"
    row = Row(name, "ns/pair", LOWER, how)
    return wall(setting, row, lambda one: per_pair(churn_timed(setting, one, cost_ns)))


def churn_cold_ns(setting: Setting, name: str) -> Row:
    how = (
        "wall time of churn_1000 from its first block on, warm-up and measured part, "
        f"{cost(COSTS_NS[-1])}, {interleaved()}; bar: {NATIVE.name} of this run"
    )
    pairs = CHURN_WARMUP_PER_LIVE * WALL_LIVE + CHURN_STEPS

    def figure(one: Contender) -> float:
        result = churn_timed(setting, one, COSTS_NS[-1])
        return (result["ns"] + result["warmup_ns"]) / pairs

    row = wall(setting, Row(name, "ns/pair", LOWER, how), figure)
    row.bar = row.figure(NATIVE.name)
    return row


def churn_timed(setting: Setting, contender: Contender, cost_ns: int) -> runs.Result:
    arguments = setting.churn_arguments(WALL_LIVE)
    return runs.run(contender, *arguments, STANDIN_CUDA_COST_NS=cost_ns)


def wall(setting: Setting, row: Row, figure: Callable[[Contender], float]) -> Row:
    """Medians of rounds in which every contender has its turn: the machine drifts."""
    rounds = [
        setting.fill(Row(row.name, row.unit, row.better, ""), figure) for _ in range(WALL_ROUNDS)
    ]
    row.how += rounds[0].how
    for contender in setting.contenders:
        figures = [one.figure(contender.name) for one in rounds]
        known = [figure for figure in figures if figure is not None]
        row.put(contender.name, median(known) if known else None)
    return row


def per_pair(result: runs.Result) -> float:
    return result["ns"] / result["pairs"]


def interleaved() -> str:
    return f"median of {WALL_ROUNDS} runs, contenders in turn"


def cost(cost_ns: int) -> str:
    return f"cuMemCreate, Map, Unmap, Release, Alloc and Free {cost_ns / 1000:g} us each"
