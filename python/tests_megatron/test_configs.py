"""Parts of a model on a stage with a configuration each: the schedule's is the first one's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from configs_worker import CASES
from rank_workers import RANKS, left_by_each

import cases
import expert_counts
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


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_balanced])
def test_experts_are_balanced_as_in_megatron(name, found):
    of_ranks = found[name]
    # Ranks of a stage follow each other.
    of_stage = len(of_ranks) // CASES[name].stages
    for call in range(cases.CALLS):
        for first in range(0, len(of_ranks), of_stage):
            of_way = (
                [each[way]["balance"][call] for each in of_ranks[first : first + of_stage]]
                for way in ("plain", "shared")
            )
            assert expert_counts.differing(*of_way) == []
