"""Routers whose logits the model returns: the loss of the trainer is the same."""

from __future__ import annotations

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import distance, group, loss_fn, take_gradients
from test_altered_models import dense_backward

from dormouse.hf import SharedPrefix

FP64_BOUND = 1e-10


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_router_logits_returned_too(kind, checkpoints, runtime):
    """The auxiliary loss of transformers is another field of the output, which no loss reads."""
    with in_fp64():
        model = zoo_model(kind).train()
        model.config.output_router_logits = True
        if checkpoints:
            model.activation_checkpointing_enable()
        case = group(21, (5, 1, 9))
        SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=8)
        got = take_gradients(model)
        dense_backward(model, case)
        assert distance(got, take_gradients(model)) <= FP64_BOUND


def test_hooks_of_transformers_are_registered_once(runtime):
    """Not again after each check, and no change of the model."""
    model, case = zoo_model("mixtral", torch.float32), group(9, (3, 4))
    model.config.output_router_logits = True
    shared = SharedPrefix(model, runtime)
    first = shared.backward(case, loss_fn)
    registered = sum(len(module._forward_hooks) for module in model.modules())
    assert shared.backward(case, loss_fn).checked is first.checked
    shared.check(case)
    assert sum(len(module._forward_hooks) for module in model.modules()) == registered
    assert len(model(input_ids=case.prompt[None]).router_logits) == 4
