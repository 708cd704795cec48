"""How weights are stored: FP16 with a loss scale, quantised, tied."""

from __future__ import annotations

import contextlib

import peft
import pytest
import torch
from models import distance, group, loss_fn, take_gradients, tiny
from test_altered_models import dense_backward
from torch import nn

from dormouse.hf import SharedPrefix

FP64_BOUND = 1e-10
LAYERS = 2
# Of the dense run's own distance (docs/method.md §10).
RATIO_MAX = 1.25
OVERFLOW = 2.0**24


def scaled(scale: float):
    return lambda logits, labels, i: scale * loss_fn(logits.float(), labels, i)


def half(where: str):
    """Returns a model and a context in which it computes in FP16."""
    if where == "weights":
        return tiny(num_hidden_layers=LAYERS, dtype=torch.float16), contextlib.nullcontext()
    model = tiny(num_hidden_layers=LAYERS, dtype=torch.float32)
    return model, torch.autocast("cpu", dtype=torch.float16)


@pytest.mark.parametrize("where", ["weights", "autocast"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_half_precision_with_a_loss_scale(where, scale, runtime):
    (model, context), case = half(where), group(21, (5, 1, 9))
    with context:
        SharedPrefix(model, runtime).backward(case, scaled(scale), microbatch_tokens=8)
        shared = take_gradients(model)
        dense_backward(model, case, scaled(scale))
        dense = take_gradients(model)
    truth = model.double()
    dense_backward(truth, case, loss_fn)
    wanted = {name: scale * gradient for name, gradient in take_gradients(truth).items()}
    assert distance(shared, wanted) <= RATIO_MAX * distance(dense, wanted)


def test_a_loss_scale_that_is_too_large_is_seen(runtime):
    """An overflow is infinite in the gradients, where a scaler looks for it."""
    model, context = half("autocast")
    scaler = torch.amp.GradScaler("cpu", init_scale=OVERFLOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.clone() for parameter in model.parameters()]

    def loss(logits, labels, i):
        return scaler.scale(loss_fn(logits.float(), labels, i))

    with context:
        SharedPrefix(model, runtime).backward(group(21, (5, 1, 9)), loss)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == OVERFLOW / 2
    assert all(map(torch.equal, before, model.parameters()))


class Quantised(nn.Module):
    """A frozen linear layer of 8-bit weights, one scale per row."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        stored = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_quantised_weights_below_adapters(dtype, checkpoints, runtime):
    model = tiny(num_hidden_layers=LAYERS, dtype=dtype)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).to(dtype).train()
    for layer in model.get_base_model().model.layers:
        for module, name in ((layer.self_attn, "k_proj"), (layer.mlp, "up_proj")):
            setattr(module, name, Quantised(getattr(module, name)))
        for adapted in (layer.self_attn.q_proj, layer.mlp.down_proj):
            adapted.base_layer = Quantised(adapted.base_layer)
    if checkpoints:
        model.get_base_model().activation_checkpointing_enable()
    case = group(21, (5, 1, 9))
    report = SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=8)
    got = take_gradients(model)
    dense_backward(model, case)
    error = distance(got, take_gradients(model))
    assert error <= (FP64_BOUND if dtype is torch.float64 else 0.05)
    assert report.checked.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_tied_embeddings(runtime):
    model = tiny(num_hidden_layers=LAYERS, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    case = group(21, (5, 1, 9))
    SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=8)
    got = take_gradients(model)
    dense_backward(model, case)
    assert distance(got, take_gradients(model)) <= FP64_BOUND
