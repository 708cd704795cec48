"""Context-parallel ranks with other rows than those of test_gradients.py, and calls that are
refused: each ends on both ranks, nothing stays asleep, and the next call is right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_workers import RANKS, run_ranks

from context_worker import AFTER_ALL, REFUSED, ROWS
from in_use import STAYS_BYTES_MAX

WORKER = Path(__file__).with_name("context_worker.py")
SECONDS_MAX = 600
EXACT = 1e-10
# Of losses that are logged in FP32 in one of both ways.
LOGGED = 1e-5
# Of each call, the beginning of its error on each rank.
ERRORS = {
    "a prompt of one token": "UnsupportedTrainerError: a row has fewer than 2 tokens up to its "
    "first label with a loss",
    "an odd number of columns": "UnsupportedTrainerError: a batch has 31 columns",
    "fewer columns on one rank": "RanksDifferError: ranks differ in microbatches: rank 0 has '3 of "
    "6 rows, 32 columns",
    "fewer microbatches on one rank": "RanksDifferError: ranks differ in microbatches: rank 0 has "
    "'2 of 4 rows",
    "other options on one rank": "RanksDifferError: ranks differ in options: rank 0 has ",
    "one rank does not train": "RanksDifferError: ranks differ in direction",
    "positions without the context": "UnsupportedTrainerError: position_ids do not count",
    "an evaluation": "UnsupportedTrainerError: the model is evaluated within a call with context",
    "gradients of one rank are wrong": "UnsupportedModelError: a shared step is not exact",
    "one rank has no room for K and V": "UnsupportedTrainerError: K and V of a prompt of ",
    "a pass of one rank's check fails": "UnsupportedModelError: ",
    "one rank's check fails": "WorkError: of one rank",
    "one rank fails": "WorkError: of one rank",
    "one rank fails as K and V pass": "WorkError: of one rank",
    "one rank fails as gradients pass": "WorkError: of one rank",
    "two stages, no room for K and V": "UnsupportedTrainerError: K and V of a prompt have no room",
    "graphs are kept": "UnsupportedTrainerError: graphs is 'kept' with K and V of prompts",
}


@pytest.fixture(scope="module")
def left_by(tmp_path_factory) -> Callable[[int], list[dict]]:
    """Returns a function that returns what each rank of as many left."""

    @functools.cache
    def left(ranks: int) -> list[dict]:
        directory = tmp_path_factory.mktemp("context")
        assert run_ranks(WORKER, directory, ranks=ranks, seconds_max=SECONDS_MAX) == [0] * ranks
        return [torch.load(directory / f"{rank}.pt") for rank in range(ranks)]

    return left


@pytest.fixture
def found(left_by) -> list[dict]:
    return left_by(RANKS)


# Of so few tokens nothing is large enough to sleep.
AWAKE = {
    f"{layout}{rows}"
    for layout in ("", "ring, ", "two stages, ")
    for rows in ("prompts of two tokens", "prompts of four tokens", "no loss")
}


@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_those_of_whole_rows(name, left_by):
    for own in (each[name] for each in left_by(ROWS[name].case.ranks)):
        assert (own["largest"] == 0) == (name in ("no loss", "two stages, no loss"))
        assert own["difference"] <= EXACT * own["largest"]
        assert (own["asleep_peak"] > 0) != (name in AWAKE)
        assert own["asleep"] == 0


@pytest.mark.parametrize("name", ROWS)
def test_losses_of_both_ranks_are_those_of_whole_rows(name, left_by):
    found = [each[name] for each in left_by(ROWS[name].case.ranks)]
    for replica in (found[first : first + RANKS] for first in range(0, len(found), RANKS)):
        # Products of as many rows on each rank may round differently.
        wanted, *others = (each["wanted"] for each in replica)
        assert others == pytest.approx([wanted] * len(others), rel=LOGGED)
        for way in ("loss", "loss_without_gradients"):
            assert sum(each[way] for each in replica) == pytest.approx(wanted, rel=LOGGED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_run_ends_on_all_ranks(name, left_by):
    found = left_by(REFUSED[name].case.ranks)
    own = [each[name]["error"] for each in found]
    told = [f"RankFailedError: rank {rank} failed: {error}" for rank, error in enumerate(own)]
    # A rank whose own error comes later hears of another's.
    assert all(error.startswith(ERRORS[name]) or error in told for error in own)
    assert any(error.startswith(ERRORS[name]) for error in own)
    for each in found:
        # What comes first is refused before any prompt sleeps.
        assert (each[name]["asleep_peak"] > 0) != REFUSED[name].comes_first
        assert each[name]["asleep"] == 0
        assert each[name]["stays"] < STAYS_BYTES_MAX


@pytest.mark.parametrize("name", ROWS)
def test_ranks_take_one_way(name, left_by):
    """Room is that of the rank with the least."""
    for own in (each[name] for each in left_by(ROWS[name].case.ranks)):
        assert own["ways"] == ["ring" if ROWS[name].case.ring else "all_gather"]


@pytest.mark.parametrize("name", AFTER_ALL)
def test_the_call_after_all_is_right(name, found):
    for own in (each[name] for each in found):
        assert own["difference"] <= EXACT * own["largest"]
