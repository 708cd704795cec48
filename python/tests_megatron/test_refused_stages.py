"""A pipeline that trains without shared prompts, and whose model or schedule they refuse: the
refusal is of both stages, or the other one is told of it, and none waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_workers import left_by_ranks

from refused_stages_worker import REFUSED

WORKER = Path(__file__).with_name("refused_stages_worker.py")
SECONDS_MAX = 300
EXACT = 1e-10
# From the last rank's call to the last error.
ENDED_S_MAX = 10.0
LAST = 1
SCHEDULE = "UnsupportedTrainerError: the schedule of a pipeline is"
# Of each model, the ranks that refuse it and the beginning of their error.
WANTED = {
    "several tokens are predicted": ((0, 1), "UnsupportedTrainerError: mtp_num_layers is 1: "),
    "a value head": (
        (LAST,),
        "UnsupportedTrainerError: the output layer is a ColumnParallelLinear of 1 numbers for each "
        "token, as of a value head",
    ),
    "a stage without layers": (
        (LAST,), "UnsupportedTrainerError: a pipeline stage has 0 layers, so no keys of a prompt"
    ),
    "a schedule in a partial": ((0, 1), f"{SCHEDULE} a partial that is not Megatron's own"),
    "a schedule in a function": ((0, 1), f"{SCHEDULE} a function that is not Megatron's own"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    directory = tmp_path_factory.mktemp("refused_stages")
    return left_by_ranks(WORKER, directory, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_a_stage_refuses_ends_on_both(name, found):
    refusing, wanted = WANTED[name]
    told = f"RankFailedError: rank {LAST} failed: {found[name][LAST]['error']}"
    for rank, own in enumerate(found[name]):
        assert own["error"].startswith(wanted) if rank in refusing else own["error"] == told
    last_s = max(own["told_s"] for own in found[name])
    assert last_s - max(own["began_s"] for own in found[name]) <= ENDED_S_MAX


@pytest.mark.parametrize("name", [name for name, each in REFUSED.items() if each.is_trained])
def test_megatron_trains_it(name, found):
    assert all(own["is_trained"] for own in found[name])


@pytest.mark.parametrize("name", REFUSED)
def test_the_next_call_is_right(name, found):
    assert all(own["next"] < EXACT for own in found[name])
