"""A shared call in DeepSpeed's engine beside the engine on the padded batch, on one and two ranks
over gloo.

The truth is plain torch in FP64 (:func:`deepspeed_cases.truth`). docs/method.md §10: the shared
gradients' distance to it is at most 1.25 times that of the engine's own, plus 1e-6.
"""

from __future__ import annotations

from pathlib import Path

import deepspeed_cases as cases
import pytest
import torch
from models import distance
from rank_workers import run_ranks

WORKER = Path(__file__).with_name("deepspeed_worker.py")
WORKER_SECONDS_MAX = 900
TIMES, MORE = 1.25, 1e-6


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def results(request, tmp_path_factory) -> list[dict]:
    """What each rank left."""
    directory, ranks = tmp_path_factory.mktemp("ranks"), request.param
    codes = run_ranks(WORKER, directory, ranks=ranks, seconds_max=WORKER_SECONDS_MAX)
    assert codes == [0] * ranks
    return [torch.load(directory / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("name", cases.CASES)
def test_gradients_and_updates_are_those_of_the_engine(results, name):
    case = cases.CASES[name]
    true_gradients, true_weights = cases.truth(case, len(results))
    first = dict(cases.true_model_of(case).named_parameters())
    for of_rank in results:
        found = of_rank[name]
        for update in range(cases.UPDATES):
            check(found, "gradients", update, true_gradients[update])
            moved = {k: {"weights": [_moved(w, first) for w in found[k]["weights"]]} for k in found}
            check(moved, "weights", update, _moved(true_weights[update], first))


def check(found: dict, kind: str, update: int, truth: cases.Tensors) -> None:
    if not any(bool(each.any()) for each in truth.values()):
        assert found["shared"][kind][update].keys() == truth.keys()
        assert not any(bool(each.any()) for each in found["shared"][kind][update].values())
        return
    ours, own = (distance(found[way][kind][update], truth) for way in ("shared", "plain"))
    assert own < 0.5, "the engine's own is far from the truth, so that nothing is compared"
    assert ours <= TIMES * own + MORE, (kind, update, ours, own)


def _moved(weights: cases.Tensors, first: cases.Tensors) -> cases.Tensors:
    """How far the weights were moved from the model's first ones; frozen ones are left out."""
    return {n: w - first[n].detach() for n, w in weights.items() if first[n].requires_grad}
