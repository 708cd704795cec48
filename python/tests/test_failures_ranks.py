"""A rank that fails in a step: every other rank gets an error that names it, and none hangs.

The process groups have torch's timeout of half an hour, so a collective that is not ended is a
failure by :data:`SECONDS_MAX`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from failures_worker import a_model
from models import distance, take_gradients
from rank_workers import RANKS, run_ranks
from test_score_faults import a_longer_batch, nothing_stays
from test_token_scores import dense

WORKER = Path(__file__).with_name("failures_worker.py")
SECONDS_MAX = 300
LOSS = "LossError: of one rank"


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict]:
    """What each rank left of each case."""
    directory = tmp_path_factory.mktemp("errors")
    assert run_ranks(WORKER, directory, "errors", seconds_max=SECONDS_MAX) == [0] * RANKS
    return [torch.load(directory / f"errors.{rank}") for rank in range(RANKS)]


def mean_gradients() -> dict[str, torch.Tensor]:
    """Of the batch, over ranks."""
    model, (ids, mask, keep) = a_model(), a_longer_batch()
    (dense(model, ids, mask, keep, 1.0)[0].sum() / RANKS).backward()
    return take_gradients(model)


@pytest.mark.parametrize(
    ("name", "rank", "error"),
    [
        ("loss of rank 0", 0, LOSS),
        ("loss of rank 1", 1, LOSS),
        ("pass of the backward", 1, LOSS),
        ("reduction", 1, LOSS),
        ("another group", 1, LOSS),
        ("gathers of shards", 1, LOSS),
        ("while it computes", 1, LOSS),
        ("leaves first", 1, LOSS),
        ("exits", 1, "SystemExit: 3"),
    ],
)
def test_an_error_of_one_rank_is_told(name, rank, error, errors):
    own, other = errors[rank][name], errors[1 - rank][name]
    assert own["error"] == error and own["rank"] is None
    assert other["error"] == f"RankFailedError: rank {rank} failed: {error}"
    assert other["rank"] == rank


def test_a_rank_keeps_its_own_error(errors):
    for rank in range(RANKS):
        assert errors[rank]["each its own"]["error"] == f"LossError: of rank {rank}"


def test_what_is_no_failure(errors):
    assert [each["nothing fails"]["error"] for each in errors] == ["SystemExit: 0"] * RANKS


def test_nothing_is_left(errors):
    """After an interrupted reduction too, when the next case has begun."""
    cases = ("loss of rank 0", "loss of rank 1", "pass of the backward", "another group")
    for own in errors:
        assert all(each["in use"][1] == 0 for each in own.values())
        assert nothing_stays(a_model(), [own[name]["in use"] for name in cases])


def test_the_next_step_is_right(errors):
    """In a new process group, in the same processes."""
    wanted = mean_gradients()
    for own in errors:
        assert distance(own["no group is left"]["gradients"], wanted) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_is_killed_is_told(rank, tmp_path):
    """A child of it holds its sockets open, so that gloo does not notice; and rank 0 is the one
    that tells."""
    try:
        codes = run_ranks(WORKER, tmp_path, "killed", rank, seconds_max=SECONDS_MAX)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 1)
    told = (tmp_path / f"error.{1 - rank}").read_text()
    assert told == f"RankFailedError: rank {rank} failed: its process ended"
