"""A trainer may have set torch's default device: what is made for the host names its own."""

from __future__ import annotations

import pytest
import torch
from models import distance, group, loss_fn, take_gradients, tiny
from test_token_scores import GRAPHS, a_batch

import dormouse
from dormouse.hf import SharedPrefix


@pytest.fixture
def on_meta():
    """Tensors without a device of their own have no values, so no use of them succeeds."""
    with torch.device("meta"):
        yield


def token_losses(logits, labels, i, positions):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def conversations(case):
    """Of the first two responses, with boolean labels."""
    for response in case.responses[:2]:
        tokens = torch.cat([case.prompt, response])
        has_label = torch.arange(len(tokens), device="cpu") >= len(case.prompt)
        yield dormouse.Conversation(tokens, has_label, 1.0)


RUNS = {
    "a group": lambda shared, case: shared.backward(case, loss_fn),
    "a step": lambda shared, case: shared.step(
        [case, case], lambda logits, labels, i, number: loss_fn(logits, labels, i)
    ),
    "a tree": lambda shared, case: shared.backward(list(conversations(case)), token_losses),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_steps_are_the_same(run, runtime, request):
    model, case = tiny(), group()
    run(SharedPrefix(model, runtime), case)
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    request.getfixturevalue("on_meta")
    run(shared, case)
    assert distance(take_gradients(model), wanted) == 0


@pytest.mark.parametrize("graphs", GRAPHS)
def test_scores_are_the_same(graphs, runtime, request):
    model, (ids, mask, keep) = tiny(), a_batch()

    def run():
        shared = SharedPrefix(model, runtime)
        scores = shared.score(ids, mask, keep=keep, graphs=graphs, entropy=True)
        (scores.log_probabilities.sum() + scores.entropies.sum()).backward()
        return take_gradients(model)

    wanted = run()
    request.getfixturevalue("on_meta")
    assert distance(run(), wanted) == 0


def test_speed_is_measured(runtime, on_meta):
    with torch.device("cpu"):
        model = tiny()
    assert SharedPrefix(model, runtime).measure_speed()
