"""Updates of Megatron's sharded optimizer with clipped gradients, plain and shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from optimizer_worker import CASES, CLIP, MICROBATCHES, PLAIN, SHARED, UPDATES
from rank_workers import left_by_each

from models import distance

WORKER = Path(__file__).with_name("optimizer_worker.py")
SECONDS_MAX = 400
# Parameters, gradients and the optimizer's state are FP64.
EXACT = 1e-10
# Megatron computes norms in FP32: the norm of each parameter, of each rank and of all ranks.
ROUNDINGS = 3
NORM_TOLERANCE = ROUNDINGS * torch.finfo(torch.float32).eps
# Of each call: rows with a response, and different prompts.
ROWS, PROMPTS = 5, 2


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """What each rank left of each case."""
    numbers = sorted({case.ranks for case in CASES.values()})
    return left_by_each(WORKER, tmp_path_factory.mktemp, numbers, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name", CASES)
def test_five_updates_are_those_of_megatron(name, found):
    for own in found[name]:
        plain, shared = own[PLAIN], own[SHARED]
        assert shared["sharing"] == (ROWS * UPDATES, PROMPTS * UPDATES)
        # All but the last stage log none.
        assert len(plain["losses"]) in (0, MICROBATCHES * UPDATES)
        assert shared["losses"] == pytest.approx(plain["losses"], rel=EXACT)
        assert len(plain["norms"]) == UPDATES and min(plain["norms"]) > CLIP
        assert shared["norms"] == pytest.approx(plain["norms"], rel=NORM_TOLERANCE)
        assert distance(shared["before"], plain["before"]) == 0
        assert distance(plain["after"], plain["before"]) > 0
        assert distance(shared["after"], plain["after"]) < EXACT


@pytest.mark.parametrize("name", CASES)
def test_ranks_of_a_part_agree_on_parameters(name, found):
    """Each updates its shard, and gathers those of the others."""
    norms = {tuple(own[SHARED]["norms"]) for own in found[name]}
    assert len(norms) == 1
    # Replicas of a stage follow each other.
    of_stage = len(found[name]) // CASES[name].stages
    for place in range(0, len(found[name]), of_stage):
        first, *others = (own[SHARED]["after"] for own in found[name][place : place + of_stage])
        assert all(distance(each, first) == 0 for each in others)
