"""Megatron's timers in calls of the schedule: their barriers are of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_workers import left_by_ranks
from timers_worker import CASES

WORKER = Path(__file__).with_name("timers_worker.py")
SECONDS_MAX = 120
EXACT = 1e-10


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    return left_by_ranks(WORKER, tmp_path_factory.mktemp("timers"), seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_times_the_call(name, found):
    for own in found[name]:
        assert own["seconds"] > 0
        assert own["distance"] < EXACT
