"""What one rank alone sees is decided by all ranks of the model.

Ranks are not told of each other's failures here, so one that decides alone waits for the others
until :data:`SECONDS_MAX`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agreement_worker import DEVIATING
from rank_workers import RANKS, left_by_each

WORKER = Path(__file__).with_name("agreement_worker.py")
SECONDS_MAX = 300
EXACT = 1e-10


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left, of each case."""
    numbers = (RANKS, 4)
    return left_by_each(WORKER, tmp_path_factory.mktemp, numbers, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", [
    "refusal of a stage",
    "refusal of a chunk",
    "refusal of a part",
    "refusal of a replica's part of experts",
    "refusal of a stage's part of experts",
])
def test_a_deviation_on_one_rank_is_refused_by_all(name, found):
    for rank, own in enumerate(found[name]):
        error = own["error"]
        assert error.startswith("UnsupportedModelError: ")
        if "part" not in name:
            # Stages check layers of their own.
            wanted = "not exact" if rank == DEVIATING else "another rank"
            assert wanted in error
        assert own["distance"] < EXACT


@pytest.mark.parametrize("name", [
    "change of a stage",
    "change of a part",
    "change of a replica's part of experts",
    "change of a stage's part of experts",
])
def test_a_change_on_one_rank_is_checked_by_all(name, found):
    for own in found[name]:
        assert own == {"checks": 1, "distance": pytest.approx(0, abs=EXACT)}


@pytest.mark.parametrize("name", [
    "sleep of a stage",
    "sleep of a chunk",
    "sleep of a part",
    "sleep of a replica's part of experts",
    "sleep of a part of a sequence",
    "sleep of a stage's part of experts",
])
def test_what_sleeps_is_the_choice_of_each_rank(name, found):
    probes = {own["probes"] for own in found[name]}
    assert len(probes) == 1 and probes != {0}
    for own in found[name]:
        assert own["distance"] < EXACT


def test_calls_of_interleaved_stages(found):
    """Without shared prompts, an evaluation, and two calls of the same iterators."""
    for calls in found["calls of chunks"]:
        assert calls["unshared"] == 0
        assert calls["distance"] < EXACT
        theirs, ours = calls["evaluated"]
        torch.testing.assert_close(ours, theirs, check_dtype=False)


def test_stages_of_unequal_layers_choose_one_way(found):
    for own in found["uneven stages"]:
        assert own["error"].startswith(
            "UnsupportedTrainerError: K and V of a prompt have no room on a rank"
        )
