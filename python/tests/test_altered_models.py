"""Altered models: each step is exact or refused by name, never silently wrong or stale.

The cases are in ``altered_models.py``, ``altered_tokens.py`` and ``altered_attention.py``. Each
runs twice: altered before the first step, and between two steps. The truth is the dense run through
the model's own forward.
"""

from __future__ import annotations

import altered_attention  # noqa: F401  registers its cases
import altered_tokens  # noqa: F401
import pytest
import torch
from altered_models import CASES
from models import distance, group, loss_fn, take_gradients, tiny
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dormouse.hf import SharedPrefix, UnsupportedModelError, check, support
from dormouse.hf.fingerprint import Fingerprint

FP64_BOUND = 1e-9
FP32_BOUND = 1e-4
LAYERS = 3


def small_model():
    return tiny(num_hidden_layers=LAYERS)


def long_enough():
    """Longer than every threshold of the cases; two responses of equal length."""
    drawn = group(61, (5, 1, 9, 5))
    for tokens in (drawn.prompt, *drawn.responses):
        # Tokens 95 and 96 are padding of the vocabulary in one case.
        tokens.clamp_(max=94)
    # Token 0 is padding in one case.
    drawn.prompt[2] = 0
    return drawn


def dense_backward(model, case, loss=loss_fn) -> None:
    for i, response in enumerate(case.responses):
        tokens = torch.cat([case.prompt, response[:-1]]).unsqueeze(0)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(case.prompt) - 1 :]
        total = case.weights[i] * loss(logits, response, i)
        if total.requires_grad:
            total.backward()


def error(model, shared, loss=loss_fn) -> float:
    """Distance of the shared gradients from the dense ones; a missing one counts as zeros."""
    case = long_enough()
    model.zero_grad(set_to_none=True)
    shared.backward(case, loss, microbatch_tokens=12)
    got = take_gradients(model)
    dense_backward(model, case, loss)
    wanted = take_gradients(model)
    for name in got.keys() ^ wanted.keys():
        present = got.get(name, wanted.get(name))
        (got if name in wanted else wanted)[name] = torch.zeros_like(present)
    return distance(got, wanted) if wanted else 0.0


def hold(model, shared, refusal: str | None, loss=loss_fn) -> None:
    """Asserts that the step is exact, or refused with ``refusal`` before any gradient."""
    if refusal is None:
        assert error(model, shared, loss) <= FP64_BOUND
        return
    with pytest.raises(UnsupportedModelError, match=f"(?s){refusal}"):
        shared.backward(long_enough(), loss, microbatch_tokens=12)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_altered_before_the_first_step(name, runtime, monkeypatch):
    model = small_model()
    CASES[name].alter(model, monkeypatch)
    hold_from_the_start(model, runtime, CASES[name].refusal)


def hold_from_the_start(model, runtime, refusal):
    """As :func:`hold`; a refusal may come from the constructor."""
    try:
        shared = SharedPrefix(model, runtime)
    except UnsupportedModelError:
        assert refusal is not None
        with pytest.raises(UnsupportedModelError, match=f"(?s){refusal}"):
            SharedPrefix(model, runtime)
        return
    hold(model, shared, refusal)


@pytest.mark.parametrize("name", CASES)
def test_altered_between_two_steps(name, runtime, monkeypatch):
    model = small_model()
    shared = SharedPrefix(model, runtime)
    shared.backward(group(6, (3, 2)), loss_fn)
    model.zero_grad(set_to_none=True)
    CASES[name].alter(model, monkeypatch)
    hold(model, shared, CASES[name].refusal)


INTERFACES = {
    "assigned_attention": "'sdpa' of AttentionInterface",
    "assigned_attention_of_the_file": "'sdpa' of AttentionInterface",
    "assigned_mask": "'sdpa' of AttentionMaskInterface",
    "registered_mask": "'sdpa' of AttentionMaskInterface",
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", INTERFACES)
def test_functions_of_interfaces_in_a_model_of_known_code(name, is_first, runtime, monkeypatch):
    """Lengths matter because of them alone."""
    model = tiny(dtype=torch.float32, num_hidden_layers=LAYERS)
    view = support.resolve(model)
    assert check.unknown_code(view) is None
    shared = SharedPrefix(model, runtime)
    if not is_first:
        shared.backward(group(6, (3, 2)), loss_fn)
    CASES[name].alter(model, monkeypatch)
    if CASES[name].refusal is None:
        assert error(model, shared) <= FP32_BOUND
    else:
        model.zero_grad()
        hold(model, shared, CASES[name].refusal)
    assert INTERFACES[name] in check.unknown_code(view)


def test_experts_in_own_code_are_unknown_code(monkeypatch):
    model = tiny("qwen3_moe", dtype=torch.float32)
    view, before = support.resolve(model), Fingerprint(model)
    assert check.unknown_code(view) is None and before.matches()
    name = model.config._experts_implementation
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, name, lambda *arguments: None)
    assert check.unknown_code(view) == f"the function {name!r} of ExpertsInterface"
    assert before.difference() == f"ExpertsInterface.{name} changed"
