"""Parts of a model on a stage with a configuration each: the schedule's is the first one's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from configs_worker import CASES
from rank_workers import RANKS, left_by_each

import cases
from models import distance

WORKER = Path(__file__).with_name("configs_worker.py")
SECONDS_MAX = 600
EXACT = 1e-10


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    numbers = (RANKS, 4)
    return left_by_each(WORKER, tmp_path_factory.mktemp, numbers, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_megatron(name, found):
    for own in found[name]:
        calls = list(zip(own["plain"]["gradients"], own["shared"]["gradients"], strict=True))
        assert len(calls) == cases.CALLS
        assert all(distance(theirs, ours) < EXACT for theirs, ours in calls)


@pytest.mark.parametrize("name", CASES)
def test_what_is_logged_is_that_of_megatron(name, found):
    for own in found[name]:
        theirs, ours = own["plain"]["losses"], own["shared"]["losses"]
        torch.testing.assert_close(ours, theirs, check_dtype=False)
