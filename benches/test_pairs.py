"""Pairs, their ratio and its lower bound."""

from __future__ import annotations

import random

import pytest
from pairs import alternate, lower_bound, median_ratio, rank


def test_both_run_in_turn_and_each_goes_first_as_often() -> None:
    ran: list[str] = []

    def run(name: str) -> str:
        ran.append(name)
        return name

    found = alternate(4, lambda: run("a"), lambda: run("b"))
    assert found == [("a", "b")] * 4
    assert ran == ["a", "b", "b", "a"] * 2


def test_no_pair_but_the_first_begins_after_the_limit(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("pairs.time.monotonic", lambda: now[0])

    def run() -> float:
        now[0] += 4
        return now[0]

    assert alternate(9, run, run, seconds_max=20) == [(4, 8), (16, 12), (20, 24)]
    assert len(alternate(9, run, run, seconds_max=0)) == 1


def test_the_ratio_is_of_neighbours() -> None:
    assert median_ratio([(1, 2), (30, 10), (4, 4)]) == 1


@pytest.mark.parametrize(("count", "expected"), [(10, 1), (12, 2), (20, 5), (30, 10)])
def test_ranks_are_those_of_the_tables(count: int, expected: int) -> None:
    assert rank(count) == expected


def test_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="9 values; at least 10"):
        lower_bound([1.0] * 9)


def test_the_bound_is_above_the_median_as_seldom_as_it_says() -> None:
    draw = random.Random(1)
    too_high = sum(lower_bound([draw.gauss(0, 1) for _ in range(20)]) > 0 for _ in range(4000))
    assert too_high / 4000 < 0.06
