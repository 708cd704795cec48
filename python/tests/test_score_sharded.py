"""Differentiable calls under ``fully_shard`` on two ranks over gloo, in FP64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import distance, take_gradients
from rank_workers import run_ranks
from score_sharded_cases import CASES, RANKS, REFUSED, batch_of, model_of, own_loss

WORKER = Path(__file__).with_name("score_sharded_worker.py")
WORKER_SECONDS_MAX = 300


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    assert run_ranks(WORKER, directory, seconds_max=WORKER_SECONDS_MAX) == [0] * RANKS
    return directory


def left_by_ranks(directory: Path, name: str) -> list[dict]:
    return [torch.load(directory / f"{name}.{rank}") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_padded_batch(name, directory):
    case = CASES[name]
    model = model_of(case)
    for rank in range(RANKS):
        ids, mask, keep = batch_of(case, rank)
        if mask[:, -keep:].any():
            (case.times * own_loss(model, ids, mask, keep) / RANKS).backward()
    wanted = take_gradients(model)
    for left in left_by_ranks(directory, name):
        assert left["kinds"] == {"DTensor"}
        assert distance(left["gradients"], wanted) < 1e-10


@pytest.mark.parametrize("name", ["kept", "twice", "a window", "two calls, one backward"])
def test_hooks_see_one_gradient_of_each_call(name, directory):
    calls = 2 if name.startswith("two") else 1
    for left in left_by_ranks(directory, name):
        names = set(left["handed"])
        assert len(names) > 20
        assert all(left["handed"].count(each) in (1, calls) for each in names)


MESSAGES = {
    "weights change": "weights were changed between the call and its backward",
    "a weight left out": "'model.norm.weight' is on no mesh",
    "a split weight left out": "'model.norm.weight' is a DTensor that fully_shard leaves out",
    "policies that differ": "policies with param_dtype None, torch.float32",
    "a hook of the reduction": "set_all_reduce_hook was called",
    "gradients that wait": "wait for a reduction, which score() does not do",
    "flattened": "is in FullyShardedDataParallel, which flattens parameters",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, directory):
    for left in left_by_ranks(directory, name):
        (message,) = (text for start, text in MESSAGES.items() if name.startswith(start))
        assert left["error"].startswith("UnsupportedModelError") and message in left["error"]
