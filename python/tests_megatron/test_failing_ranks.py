"""A stage or rank that fails in a call of the schedule: every other one gets an error that names
it, and none hangs. Ranks that are about to run different plans all say so.

The process groups have torch's timeout of half an hour, so a wait that is not ended is a failure by
:data:`SECONDS_MAX`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from failing_worker import DIFFERING, FAILING, NO_RANK
from rank_workers import RANKS, run_ranks

WORKER = Path(__file__).with_name("failing_worker.py")
SECONDS_MAX = 300
EXACT = 1e-10
REFUSAL = "UnsupportedTrainerError: data_iterator is None on this rank"
# Errors of the failing rank that are not a WorkError.
WANTED = {
    "stage 0, refusal": REFUSAL,
    "stage 0, before stage 1 arrives": REFUSAL,
    "replica 1, other masks, prompts of both": "UnsupportedTrainerError: tokens, labels, loss_mask "
    "of a batch have the shapes ",
    "stage 1, batches end": "StopIteration: ",
    "stage 1, evaluation in a loss": "UnsupportedTrainerError: the schedule of a pipeline is "
    "called within itself",
}
OF_TWO = [name for name, each in DIFFERING.items() if each.case.ranks == RANKS]


def left_by(directory: Path, ranks: int) -> list[dict]:
    codes = run_ranks(WORKER, directory, "errors", ranks=ranks, seconds_max=SECONDS_MAX)
    assert codes == [0] * ranks
    return [torch.load(directory / f"errors.{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """What each of two ranks left of each case."""
    return left_by(tmp_path_factory.mktemp("errors"), RANKS)


@pytest.fixture(scope="module")
def errors_of_four(tmp_path_factory) -> list[dict]:
    """What each of four ranks left of each case."""
    return left_by(tmp_path_factory.mktemp("errors_of_four"), 4)


@pytest.mark.parametrize("name", [name for name, each in FAILING.items() if each.rank != NO_RANK])
def test_an_error_of_one_rank_is_told(name, errors):
    rank = FAILING[name].rank
    own, other = errors[rank][name], errors[1 - rank][name]
    wanted = WANTED.get(name, "WorkError: of one rank")
    assert own["error"].startswith(wanted) and own["rank"] is None
    assert other["error"] == f"RankFailedError: rank {rank} failed: {own['error']}"
    assert other["rank"] == rank


@pytest.mark.parametrize("name", OF_TWO)
def test_ranks_with_different_plans_all_say_so(name, errors):
    differing = DIFFERING[name]
    own, other = errors[differing.rank][name], errors[1 - differing.rank][name]
    assert own["error"] == other["error"]
    assert own["error"].startswith("RanksDifferError: ")
    found = [
        part.split(":")[0] for part in own["error"].removeprefix("RanksDifferError: ").split("; ")
    ]
    assert found == [f"ranks differ in {each}" for each in differing.names]
    assert "rank 0 has" in own["error"] and "rank 1 has" in own["error"]


def test_one_rank_of_four_with_another_plan_is_named_by_all(errors_of_four):
    found = {each["part 1 of stage 1 of two"]["error"] for each in errors_of_four}
    (error,) = found
    assert error.startswith("RanksDifferError: ranks differ in prompts: ranks 0 1 2 have ")
    assert "rank 3 has" in error


def test_other_replicas_are_told_of_stages_with_different_plans(errors_of_four):
    """Ranks of a model compare; those of another replica hear of the first that says so."""
    found = [each["stage 1 of replica 0 of two"] for each in errors_of_four]
    differ = found[0]["error"]
    assert differ.startswith("RanksDifferError: ranks differ in prompts: rank 0 has ")
    # Stages of a replica are two ranks apart.
    assert found[2]["error"] == differ
    for other in (found[1], found[3]):
        assert other["rank"] in (0, 2)
        assert other["error"] == f"RankFailedError: rank {other['rank']} failed: {differ}"


def test_nothing_is_left_of_four_ranks(errors_of_four):
    for of_rank in errors_of_four:
        for found in of_rank.values():
            assert found["asleep"] == 0
            assert found["distance"] < EXACT


@pytest.mark.parametrize("name", [*FAILING, *OF_TWO])
def test_nothing_is_left_and_the_next_call_is_right(name, errors):
    """In new process groups, in the same processes: each case begins with a call."""
    for of_rank in errors:
        assert of_rank[name]["asleep"] == 0
        assert of_rank[name]["distance"] < EXACT


def test_a_call_in_which_no_rank_fails_raises_nothing(errors):
    found = [each[name]["error"] for each in errors for name in ("no stage", "no part")]
    assert found == [None] * 4


@pytest.mark.parametrize("name, rank", [
    ("stages", 0), ("stages", 1), ("parts", 0), ("experts", 1), ("context", 0)
])
def test_a_rank_that_is_killed_is_told(name, rank, tmp_path):
    codes = run_ranks(WORKER, tmp_path, "killed", name, rank, seconds_max=SECONDS_MAX)
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 1)
    told = (tmp_path / f"error.{1 - rank}").read_text()
    assert told == f"RankFailedError: rank {rank} failed: its process ended"
