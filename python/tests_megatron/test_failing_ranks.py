"""A stage or rank that fails in a call of the schedule: every other one gets an error that names
it, and none hangs.

The process groups have torch's timeout of half an hour, so a wait that is not ended is a failure by
:data:`SECONDS_MAX`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from failing_worker import FAILING, NO_RANK
from rank_workers import RANKS, run_ranks

WORKER = Path(__file__).with_name("failing_worker.py")
SECONDS_MAX = 300
EXACT = 1e-10
REFUSAL = "UnsupportedTrainerError: data_iterator is None on this rank"


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """What each rank left of each case."""
    directory = tmp_path_factory.mktemp("errors")
    assert run_ranks(WORKER, directory, "errors", seconds_max=SECONDS_MAX) == [0] * RANKS
    return [torch.load(directory / f"errors.{rank}") for rank in range(RANKS)]


@pytest.mark.parametrize("name", [name for name, each in FAILING.items() if each.rank != NO_RANK])
def test_an_error_of_one_rank_is_told(name, errors):
    rank = FAILING[name].rank
    own, other = errors[rank][name], errors[1 - rank][name]
    wanted = REFUSAL if "refusal" in name else "WorkError: of one rank"
    assert own["error"].startswith(wanted) and own["rank"] is None
    assert other["error"] == f"RankFailedError: rank {rank} failed: {own['error']}"
    assert other["rank"] == rank


@pytest.mark.parametrize("name", FAILING)
def test_nothing_is_left_and_the_next_call_is_right(name, errors):
    """In new process groups, in the same processes: each case begins with a call."""
    for of_rank in errors:
        assert of_rank[name]["asleep"] == 0
        assert of_rank[name]["distance"] < EXACT


def test_a_call_in_which_no_rank_fails_raises_nothing(errors):
    found = [each[name]["error"] for each in errors for name in ("no stage", "no part")]
    assert found == [None] * 4


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_stage_that_is_killed_is_told(rank, tmp_path):
    codes = run_ranks(WORKER, tmp_path, "killed", rank, seconds_max=SECONDS_MAX)
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 1)
    told = (tmp_path / f"error.{1 - rank}").read_text()
    assert told == f"RankFailedError: rank {rank} failed: its process ended"
