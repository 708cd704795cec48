"""Attention outside transformers' registry: by torch's function, and in the layers' own code."""

from __future__ import annotations

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import group, loss_fn
from test_recurrent import error

from dormouse.hf import SharedPrefix, UnsupportedModelError, direct

FP64_BOUND = 1e-10
SHAPES = [(2, (1,)), (2, (14, 1, 3)), (37, (5, 1, 9, 3, 14)), (23, (1,) * 33)]

# By torch's function.
FALCONS = {
    "multi-query": {},
    "many heads": {"multi_query": False, "num_kv_heads": 4},
    "new decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "not parallel": {"parallel_attn": False, "bias": True},
    "own attention eager": {"_attn_implementation": "eager"},
}
# In their own code.
OWN = ("gptj", "codegen", "xglm", "gpt_neox_japanese", "rembert")


@pytest.mark.parametrize("name", FALCONS)
def test_falcon(name, runtime):
    with in_fp64():
        model = zoo_model("falcon", **FALCONS[name])
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


def refused(model, runtime, match: str, case=None) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        SharedPrefix(model, runtime).backward(case or group(), loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_biases_in_a_mask(runtime):
    refused(zoo_model("falcon", alibi=True), runtime, "FalconDecoderLayer passes a mask.*causal")


class _Layer(torch.nn.Module):
    """One attention layer that passes ``mask`` to torch's function."""

    def forward(self, x, mask, **others):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask, **others)


LOWEST = torch.finfo(torch.float64).min
SEEN = torch.ones(5, 5, dtype=torch.bool).tril()
ADDED = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~SEEN, LOWEST)
MASKS = {
    "booleans": (SEEN[None, None], True),
    "numbers": (ADDED, True),
    "infinities": (ADDED.masked_fill(~SEEN, -torch.inf), True),
    "a window": (SEEN & SEEN.triu(-2).bool(), False),
    "all": (torch.ones(5, 5, dtype=torch.bool), False),
    "padding": (SEEN & (torch.arange(5) > 0), False),
    "a bias": (ADDED + 0.5 * SEEN, False),
    "more keys": (torch.ones(5, 6, dtype=torch.bool).tril(), False),
    "none": (None, False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """A mask is accepted if it is causal and nothing else, and each is looked at anew."""
    mask, is_accepted = MASKS[name]
    layer, calls, x = _Layer(), [], torch.randn(1, 2, 5, 4, dtype=torch.float64)

    def attend(call):
        calls.append(call)
        return call.value

    with direct.use([layer], attend):
        layer(x, SEEN)
        layer(x, None, is_causal=True, scale=0.3)
        assert [call.rules.scale for call in calls] == [0.5, 0.3]
        assert all(call.module is layer for call in calls)
        if is_accepted:
            layer(x, mask)
            assert len(calls) == 3
        else:
            with pytest.raises(UnsupportedModelError, match="mask to its attention"):
                layer(x, mask)
        changed = SEEN.clone()
        layer(x, changed)
        changed[4, 1] = False
        with pytest.raises(UnsupportedModelError, match="mask to its attention"):
            layer(x, changed)
        with pytest.raises(UnsupportedModelError, match=r"dropout 0.1"):
            layer(x, SEEN, dropout_p=0.1)
        outside = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert outside.shape == x.shape and len(calls) == (4 if is_accepted else 3)


@pytest.mark.parametrize("kind", OWN)
def test_attention_in_own_code(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


def test_a_window_in_own_code(runtime):
    """Exact while no sequence is longer than the window, refused after."""
    with in_fp64():
        model = zoo_model("gpt_neo", window_size=40)
        shared = SharedPrefix(model, runtime)
        assert error(model, shared, group(17, (5, 1, 9))) <= FP64_BOUND
        with pytest.raises(UnsupportedModelError, match="outside transformers'"):
            shared.backward(group(37, (5, 1, 9)), loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["bloom", "mpt", "roformer"])
def test_positions_that_only_the_dense_run_knows(kind, runtime):
    refused(zoo_model(kind), runtime, "not exact|fails on a group")


def test_layers_sleep(runtime):
    with in_fp64():
        model = zoo_model("falcon")
        shared = SharedPrefix(model, runtime)
        shared.backward(group(9, (3,)), loss_fn)
        model.zero_grad(set_to_none=True)
        case = group(300, (5, 9, 3))
        report = shared.backward(case, loss_fn, microbatch_tokens=20)
        assert report.prefix["asleep_at_b_bytes"] > 0 and not report.notes
        model.zero_grad(set_to_none=True)
        assert error(model, shared, case) <= FP64_BOUND
