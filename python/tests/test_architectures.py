"""Architectures of transformers whose shared step is exact: FP64 gradients against the dense ones.

``python/tests/model_zoo.py`` has the configurations.
"""

from __future__ import annotations

import pytest
import torch
from model_zoo import EXACT, REFUSED, in_fp64, zoo_model
from models import distance, group, loss_fn, take_gradients

from dormouse.hf import SharedPrefix, UnsupportedModelError

FP64_BOUND = 1e-10
# Prompts shorter and longer than every window; responses of 1, equal and unequal lengths.
SHAPES = [(2, (1,)), (2, (14, 1, 3)), (37, (5, 1, 9, 3, 14)), (23, (6,) * 3)]


def dense_backward(model, case) -> None:
    """Every response with its whole prompt, through the model's own forward."""
    for i, response in enumerate(case.responses):
        tokens = torch.cat([case.prompt, response[:-1]]).unsqueeze(0)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(case.prompt) - 1 :]
        (case.weights[i] * loss_fn(logits, response, i)).backward()


@pytest.mark.parametrize("kind", EXACT)
def test_gradients_are_the_dense_ones(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            case = group(prompt, lengths)
            dense_backward(model, case)
            dense = take_gradients(model)
            report = shared.backward(case, loss_fn, microbatch_tokens=12)
            assert distance(take_gradients(model), dense) <= FP64_BOUND, (prompt, lengths)
        assert report.checked.error <= FP64_BOUND
        assert report.checked.reason == "the first step", "one check serves all shapes"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_exact_is_refused(kind, runtime):
    model = zoo_model(kind)
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
        SharedPrefix(model, runtime).backward(group(), loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_layers_below_shared_keys_wake_before_their_backward(kind, runtime):
    # The last layers read K and V of earlier ones, so no gradient reaches the earlier layers'
    # outputs: their backward begins at K and V.
    with in_fp64():
        model = zoo_model(kind)
        case = group(300, (5, 9, 3))
        dense_backward(model, case)
        dense = take_gradients(model)
        report = SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=12)
    assert report.prefix["asleep_at_b_bytes"] > 0
    assert distance(take_gradients(model), dense) <= FP64_BOUND
