"""A stage or rank that fails in a call of the schedule: every other one gets an error that names
it, and none hangs. Ranks that are about to run different plans all say so.

The process groups have torch's timeout of half an hour, so a wait that is not ended is a failure by
:data:`SECONDS_MAX`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from failing_worker import DIFFERING, FAILING, NO_RANK
from rank_workers import RANKS, left_by_each

from in_use import has_last_layer_alone

WORKER = Path(__file__).with_name("failing_worker.py")
SECONDS_MAX = 600
EXACT = 1e-10
# Between a failure and the errors of the other ranks.
TOLD_S_MAX = 10.0
REFUSAL = "UnsupportedTrainerError: data_iterator is None on this rank"
EVALUATED = "UnsupportedTrainerError: the model of a pipeline is evaluated within a call"
# Errors of the failing rank that are not a WorkError.
WANTED = {
    "stage 0, refusal": REFUSAL,
    "stage 0, before stage 1 arrives": REFUSAL,
    "replica 1, other masks, prompts of both": "UnsupportedTrainerError: tokens, labels, loss_mask "
    "of a batch have the shapes ",
    "stage 1, the model is evaluated in a loss": EVALUATED,
    "stage 1 of two chunks, the model is evaluated in a loss": EVALUATED,
    "stage 1, evaluation in a loss": "UnsupportedTrainerError: the schedule of a pipeline is "
    "called within itself",
}
OF_TWO = [name for name, each in DIFFERING.items() if each.case.ranks == RANKS]
FAILS = [name for name, each in FAILING.items() if each.rank != NO_RANK]
NO_FAILURE = [name for name in FAILING if name not in FAILS]
# Those that fail while prompts of the failing rank sleep.
SLEEPING = [
    "stage 0, backward",
    "stage 1, backward",
    "stage 1 of two chunks, backward",
    "part 1, loss of rows",
    "replica 1, loss of rows",
    "replica 1, loss of rows, prompts of both",
    "stage 0 of replica 1",
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left of each case."""
    numbers = (RANKS, 4)
    return left_by_each(WORKER, tmp_path_factory.mktemp, numbers, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", FAILS)
def test_an_error_of_one_rank_is_told(name, errors):
    rank = FAILING[name].rank
    own = errors[name][rank]
    others = [each for each in errors[name] if each is not own]
    wanted = WANTED.get(name, "WorkError: of one rank")
    assert own["error"].startswith(wanted) and own["rank"] is None
    for other in others:
        assert other["error"] == f"RankFailedError: rank {rank} failed: {own['error']}"
        assert other["rank"] == rank
        assert 0 < other["told_s"] - own["raised_s"] <= TOLD_S_MAX


@pytest.mark.parametrize("name", OF_TWO)
def test_ranks_with_different_plans_all_say_so(name, errors):
    differing = DIFFERING[name]
    own, other = errors[name][differing.rank], errors[name][1 - differing.rank]
    assert own["error"] == other["error"]
    assert own["error"].startswith("RanksDifferError: ")
    found = [
        part.split(":")[0] for part in own["error"].removeprefix("RanksDifferError: ").split("; ")
    ]
    assert found == [f"ranks differ in {each}" for each in differing.names]
    assert "rank 0 has" in own["error"] and "rank 1 has" in own["error"]


def test_one_rank_of_four_with_another_plan_is_named_by_all(errors):
    found = {each["error"] for each in errors["part 1 of stage 1 of two"]}
    (error,) = found
    assert error.startswith("RanksDifferError: ranks differ in prompts: ranks 0 1 2 have ")
    assert "rank 3 has" in error


def test_other_replicas_are_told_of_stages_with_different_plans(errors):
    """Ranks of a model compare; those of another replica hear of the first that says so."""
    found = errors["stage 1 of replica 0 of two"]
    differ = found[0]["error"]
    assert differ.startswith("RanksDifferError: ranks differ in prompts: rank 0 has ")
    # Stages of a replica are two ranks apart.
    assert found[2]["error"] == differ
    for other in (found[1], found[3]):
        assert other["rank"] in (0, 2)
        assert other["error"] == f"RankFailedError: rank {other['rank']} failed: {differ}"


@pytest.mark.parametrize("name", [*FAILING, *DIFFERING])
def test_nothing_is_left_and_the_next_call_is_right(name, errors):
    """In new process groups, in the same processes: each case begins with calls, in which prompts
    sleep. What stays awake is less than one set of gradients; the interpreter's own memory changes
    by blocks."""
    case = FAILING.get(name, DIFFERING.get(name)).case
    for rank, own in enumerate(errors[name]):
        assert (own["asleep_before"] > 0) != has_last_layer_alone(case, rank)
        assert own["asleep"] == 0
        assert name in NO_FAILURE or own["stays"] < own["gradient_bytes"]
        assert own["distance"] < EXACT


@pytest.mark.parametrize("name", SLEEPING)
def test_prompts_sleep_when_a_rank_fails(name, errors):
    assert errors[name][FAILING[name].rank]["asleep_at_error"] > 0


def test_a_call_in_which_no_rank_fails_raises_nothing(errors):
    assert {own["error"] for name in NO_FAILURE for own in errors[name]} == {None}
