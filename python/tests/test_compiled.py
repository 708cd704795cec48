"""Compiled models: each step is exact, and the code of a step is not compiled."""

from __future__ import annotations

import pytest
import torch
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny

from dormouse.hf import SharedPrefix, check, support

FP64_BOUND = 1e-10
LAYERS = 2


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model):
    return torch.compile(model, backend="eager")


def layers(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def attention_of_checkpointed_layers(model):
    model.train().activation_checkpointing_enable()
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [whole, layers, attention_of_checkpointed_layers])
def test_gradients_equal_those_of_the_model(compiled, runtime):
    plain = tiny(num_hidden_layers=LAYERS)
    model = compiled(tiny(num_hidden_layers=LAYERS))
    shared = SharedPrefix(model, runtime)
    for case in (group(17, (5, 1, 9)), group(21, (4, 2, 3)), group(9, (2, 12))):
        shared.backward(case, loss_fn, microbatch_tokens=8)
        got = take_gradients(model)
        dense_backward(plain, case)
        got = {name.removeprefix("_orig_mod."): gradient for name, gradient in got.items()}
        assert distance(got, take_gradients(plain)) <= FP64_BOUND


def test_the_code_of_a_step_is_not_compiled(runtime):
    torch._dynamo.utils.counters.clear()
    model = layers(tiny(num_hidden_layers=LAYERS, dtype=torch.float32))
    shared = SharedPrefix(model, runtime)
    shared.backward(group(), loss_fn)
    breaks = list(torch._dynamo.utils.counters["graph_break"])
    assert breaks and all("torch.compiler.disable" in reason for reason in breaks)


def test_a_compiled_forward_is_known_code_if_it_is_its_classs_own():
    model = tiny(num_hidden_layers=LAYERS, dtype=torch.float32)
    layer, mlp = model.model.layers[0], model.model.layers[1].mlp
    layer.forward = torch.compile(layer.forward, backend="eager")
    assert check.unknown_code(support.resolve(model)) is None
    wrapped = whole(model)
    assert check.unknown_code(support.resolve(wrapped)) is None
    wrapped.forward = torch.compile(lambda **inputs: model(**inputs), backend="eager")
    assert "a patched forward of 'the model'" in check.unknown_code(support.resolve(wrapped))
    own = mlp.forward
    mlp.forward = torch.compile(lambda hidden: own(hidden), backend="eager")
    assert "a patched forward of 'model.layers.1.mlp'" in check.unknown_code(support.resolve(model))
    mlp.forward = torch.compile(model.model.layers[0].mlp.forward, backend="eager")
    assert "a patched forward of 'model.layers.1.mlp'" in check.unknown_code(support.resolve(model))
