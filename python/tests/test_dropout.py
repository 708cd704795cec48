"""Dropout in the rows of responses alone: exact given the masks that were drawn."""

from __future__ import annotations

import pytest
import torch
from models import distance, group, loss_fn, take_gradients, tiny
from test_altered_models import dense_backward
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dormouse.hf import SharedPrefix, UnsupportedModelError

FP64_BOUND = 1e-10
LAYERS = 3
ALL_ROWS = 64
RATE = 0.3


class LowRank(nn.Module):
    """A linear layer with an adapter, whose input drops."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.drop = nn.Dropout(RATE)
        generator = torch.Generator().manual_seed(base.out_features)
        like = {"dtype": base.weight.dtype, "generator": generator}
        self.down = nn.Parameter(0.1 * torch.randn(base.in_features, 4, **like))
        self.up = nn.Parameter(0.1 * torch.randn(4, base.out_features, **like))

    def forward(self, x):
        return self.base(x) + self.drop(x) @ self.down @ self.up


def adapted():
    """Drops before adapters of keys and values, and in a function after every MLP."""
    model = tiny(num_hidden_layers=LAYERS).train()
    for layer in model.model.layers:
        layer.self_attn.k_proj = LowRank(layer.self_attn.k_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x, inner=inner: functional.dropout(inner(x), RATE)
    return model


class Recording(TorchFunctionMode):
    """Records the mask of every dropout, per forward of the model."""

    def __init__(self, model):
        super().__init__()
        self.forwards: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, module, args, kwargs):
        if "position_ids" in kwargs:
            row = kwargs["input_ids"][0], kwargs["position_ids"][0]
            self.forwards.append((*row, []))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not functional.dropout:
            return func(*args, **(kwargs or {}))
        mask = func(torch.ones_like(args[0]), *args[1:], **(kwargs or {}))
        self.forwards[-1][2].append(mask[0])
        return args[0] * mask


class Replaying(TorchFunctionMode):
    """Injects masks in the order of the calls."""

    def __init__(self, masks: list[torch.Tensor]):
        super().__init__()
        self._masks = iter(masks)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.dropout:
            return args[0] * next(self._masks)
        return func(*args, **(kwargs or {}))


def masks_of(forwards, prompt, response) -> list[torch.Tensor]:
    """Returns the masks of a response's rows, with ones for the prompt's."""
    tokens = torch.cat([prompt[-1:], response[:-1]])
    for packed, positions, masks in forwards:
        starts = (positions == len(prompt) - 1).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], len(packed)], strict=True):
            rows = slice(start, end)
            if torch.equal(packed[rows], tokens) and masks:
                ones = [m.new_ones(len(prompt) - 1, m.shape[1]) for m in masks]
                return [torch.cat([one, m[rows]]) for one, m in zip(ones, masks, strict=True)]
    raise AssertionError("a response did not run")


@pytest.mark.parametrize("microbatch_tokens", [6, ALL_ROWS])
def test_the_dense_run_with_the_same_masks(microbatch_tokens, runtime):
    model, case = adapted(), group(21, (5, 1, 9, 3))
    shared = SharedPrefix(model, runtime, prompt_dropout=False)
    with Recording(model) as recording:
        recording.forwards.clear()
        shared.backward(case, loss_fn, microbatch_tokens=microbatch_tokens)
        model.zero_grad(set_to_none=True)
        recording.forwards.clear()
        shared.backward(case, loss_fn, microbatch_tokens=microbatch_tokens)
    got = take_gradients(model)
    prefix, *microbatches = recording.forwards
    assert prefix[2] == [] and len(prefix[0]) == len(case.prompt) - 1
    assert all(len(masks) == 3 * LAYERS for *_, masks in microbatches)
    dropped = torch.cat([m.flatten() for *_, masks in microbatches for m in masks]) == 0
    assert abs(float(dropped.double().mean()) - RATE) < 0.05
    for i, response in enumerate(case.responses):
        tokens = torch.cat([case.prompt, response[:-1]]).unsqueeze(0)
        with Replaying(masks_of(microbatches, case.prompt, response)):
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(case.prompt) - 1 :]
        (case.weights[i] * loss_fn(logits, response, i)).backward()
    assert distance(got, take_gradients(model)) <= FP64_BOUND


def test_checkpointed_layers_meet_their_masks_again(runtime):
    model, case, gradients = adapted(), group(), []
    for switch in (model.activation_checkpointing_disable, model.activation_checkpointing_enable):
        switch()
        shared = SharedPrefix(model, runtime, prompt_dropout=False)
        shared.backward(case, loss_fn)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        shared.backward(case, loss_fn)
        gradients.append(take_gradients(model))
    assert distance(*gradients) <= FP64_BOUND


def test_evaluation_draws_nothing(runtime):
    model, case = adapted().eval(), group()
    for layer in model.model.layers:
        del layer.mlp.forward
    SharedPrefix(model, runtime).backward(case, loss_fn)
    got = take_gradients(model)
    SharedPrefix(model, runtime, prompt_dropout=False).backward(case, loss_fn)
    assert distance(take_gradients(model), got) == 0


def refused(model, runtime, match, **options):
    shared = SharedPrefix(model, runtime, **options)
    with pytest.raises(UnsupportedModelError, match=match):
        shared.backward(group(), loss_fn)
    assert all(p.grad is None for p in model.parameters())


def test_dropout_of_shared_rows(runtime):
    refused(adapted(), runtime, r"dropout 0\.3 in .*k_proj\.drop.*prompt_dropout=False")


def test_masks_that_follow_from_the_row(runtime, monkeypatch):
    """The check finds that they are the same in the dense run; those of real dropout are not."""
    model = adapted()
    own = functional.dropout
    rows = []

    def begin(module, args, named):
        tokens = named["input_ids"][0]
        positions = named.get("position_ids", torch.arange(len(tokens)).unsqueeze(0))[0]
        rows[:] = [(tokens * 7 + positions * 13) % 5 > 0]

    def by_row(x, p=0.5, training=True, inplace=False):
        return x * rows[0].to(x.dtype).view(1, -1, 1) / (1 - p)

    model.register_forward_pre_hook(begin, with_kwargs=True)
    monkeypatch.setattr(functional, "dropout", by_row)
    shared, case = SharedPrefix(model, runtime), group()
    shared.backward(case, loss_fn)
    got = take_gradients(model)
    dense_backward(model, case)
    assert distance(got, take_gradients(model)) <= FP64_BOUND
    monkeypatch.setattr(functional, "dropout", own)
    with pytest.raises(UnsupportedModelError, match=r"dropout 0\.3 in .*k_proj\.drop"):
        shared.backward(case, loss_fn)


def test_dropout_of_attention(runtime):
    model = tiny(attention_dropout=0.1).train()
    refused(model, runtime, r"attention_dropout 0\.1", prompt_dropout=False)


def test_dropout_of_a_weight(runtime):
    model = tiny(num_hidden_layers=LAYERS).train()
    linear = model.model.layers[1].mlp.up_proj
    linear.forward = lambda x: functional.linear(x, functional.dropout(linear.weight, 0.1))
    refused(model, runtime, r"dropout 0\.1 of a tensor of shape \[160, 96\]", prompt_dropout=False)


def test_randomness_that_is_no_dropout(runtime):
    model = tiny(num_hidden_layers=LAYERS).train()
    model.model.layers[1].layerdrop = 0.01
    refused(model, runtime, r"layerdrop 0\.01 in 'model\.layers\.1'", prompt_dropout=False)
    model.model.layers[1].layerdrop = 0.0
    SharedPrefix(model, runtime).backward(group(), loss_fn)


NOISES = {
    "of each row": lambda out: out + 0.05 * torch.rand_like(out),
    "of each forward": lambda out: out * (1 + 0.05 * torch.rand(())),
}


@pytest.mark.parametrize("noise", NOISES)
def test_noise_beside_dropout(noise, runtime):
    model = adapted()
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: NOISES[noise](out))
    refused(model, runtime, "it is random or keeps state", prompt_dropout=False)
