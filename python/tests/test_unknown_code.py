"""Code of the trainer's own that changes at some length, in a model of torch's and transformers'
code: the check runs up to the step's lengths, whatever the code is and wherever it is."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import transformers.integrations.sdpa_attention as sdpa
import transformers.modeling_flash_attention_utils as flash
import transformers.models.llama.modeling_llama as llama
from altered_models import NOT_EXACT, mlp
from models import distance, group, loss_fn, take_gradients, tiny
from test_altered_models import FP32_BOUND, dense_backward
from torch import nn
from torch._jit_internal import boolean_dispatch
from torch.nn import functional
from transformers import AttentionInterface

from dormouse.hf import SharedPrefix, UnsupportedModelError
from dormouse.hf.check import unknown_code
from dormouse.hf.support import resolve

# Rows of the dense run: more than a short check has, fewer than the step's.
TOKENS = 64
FACTORS = {"long": 1.2, "never": 1.0}


def small_model():
    model = tiny(dtype=torch.float32, num_hidden_layers=2)
    assert model.config._attn_implementation == "sdpa"
    return model


def changed(function: Callable, factor: float, dim: int = 1) -> Callable:
    """Returns ``function`` with its first argument multiplied where that is longer than TOKENS."""

    def own(x, *arguments, **options):
        return function(x * (factor if x.shape[dim] > TOKENS else 1), *arguments, **options)

    return own


class Called:
    def __init__(self, function: Callable):
        self._function = function

    def __call__(self, *arguments, **options):
        return self._function(*arguments, **options)


def use_act(model, act) -> None:
    del mlp(model).act_fn
    mlp(model).act_fn = act


def torchs_attention(model, patch, factor):
    own = changed(functional.scaled_dot_product_attention, factor, 2)
    patch.setattr(functional, "scaled_dot_product_attention", own)


def torchs_activation(model, patch, factor):
    own = functools.wraps(functional.silu)(changed(functional.silu, factor))
    patch.setattr(functional, "silu", own)


def name_in_the_file_of_attention(model, patch, factor):
    patch.setattr(sdpa, "use_gqa_in_sdpa", lambda *arguments: False)
    patch.setattr(sdpa, "repeat_kv", changed(sdpa.repeat_kv, factor, 2))


def function_in_a_module(model, patch, factor):
    use_act(model, changed(functional.silu, factor))


def partial_in_a_module(model, patch, factor):
    use_act(model, functools.partial(changed(functional.silu, factor), inplace=False))


def decorated_function_in_a_module(model, patch, factor):
    own = changed(functional.silu, factor)
    use_act(model, boolean_dispatch("inplace", 1, False, own, own, "torch.nn.functional", "silu"))


def object_in_a_module(model, patch, factor):
    use_act(model, Called(changed(functional.silu, factor)))


def property_of_a_class(model, patch, factor):
    own = changed(functional.silu, factor)
    patch.setattr(llama.LlamaMLP, "act_fn", property(lambda self: own), raising=False)


def static_method_of_a_class(model, patch, factor):
    own = staticmethod(changed(functional.silu, factor))
    patch.setattr(llama.LlamaMLP, "act_fn", own, raising=False)
    for layer in model.model.layers:
        del layer.mlp.act_fn


def partial_method_of_a_class(model, patch, factor):
    inner = llama.LlamaMLP.forward

    def forward(self, x, scale):
        return inner(self, x * (scale if x.shape[1] > TOKENS else 1))

    patch.setattr(llama.LlamaMLP, "forward", functools.partialmethod(forward, scale=factor))


def object_in_the_file_of_the_model(model, patch, factor):
    own = Called(changed(llama.apply_rotary_pos_emb, factor, 2))
    patch.setattr(llama, "apply_rotary_pos_emb", own)


def partial_in_the_file_of_the_model(model, patch, factor):
    own = functools.partial(changed(llama.apply_rotary_pos_emb, factor, 2))
    patch.setattr(llama, "apply_rotary_pos_emb", own)


PLACES = {
    each.__name__: each
    for each in (
        *(torchs_attention, torchs_activation, name_in_the_file_of_attention),
        *(function_in_a_module, partial_in_a_module, decorated_function_in_a_module),
        *(object_in_a_module, property_of_a_class, static_method_of_a_class),
        *(partial_method_of_a_class, object_in_the_file_of_the_model),
        partial_in_the_file_of_the_model,
    )
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", FACTORS)
def test_lengths_matter_for_code_of_the_trainers_own(when, place, runtime, monkeypatch):
    model, case = small_model(), group(61, (10, 1, 10))
    assert unknown_code(resolve(model)) is None
    shared = SharedPrefix(model, runtime)
    shared.backward(group(6, (3, 2)), loss_fn)
    model.zero_grad(set_to_none=True)
    PLACES[place](model, monkeypatch, FACTORS[when])
    assert unknown_code(resolve(model)) is not None
    if when == "long":
        with pytest.raises(UnsupportedModelError, match=f"(?s){NOT_EXACT}.*the model contains"):
            shared.backward(case, loss_fn)
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    assert shared.backward(case, loss_fn).checked.tokens >= TOKENS
    got = take_gradients(model)
    dense_backward(model, case)
    assert distance(got, take_gradients(model)) <= FP32_BOUND


def test_names_that_the_function_of_attention_imports(monkeypatch):
    model = small_model()
    model.config._attn_implementation = "flash_attention_2"
    assert unknown_code(resolve(model)) is None
    monkeypatch.setattr(flash, "_upad_input", lambda *arguments: arguments)
    assert "modeling_flash_attention_utils._upad_input" in unknown_code(resolve(model))


def test_kernels_that_transformers_loads_are_known(monkeypatch):
    model = small_model()
    model.config._attn_implementation = "flash_attention_2"

    def kernel(*arguments):
        return arguments

    kernel.__module__ = "flash_attn.flash_attn_interface"
    kernel = type(kernel)(kernel.__code__, {"__name__": kernel.__module__})
    monkeypatch.setattr(flash, "_flash_fn", kernel)
    assert unknown_code(resolve(model)) is None


def test_what_modules_hold_beside_code_is_known():
    model = small_model()
    model.note = {"texts": ["a"], "numbers": (1, 2.0), "module": nn.Linear(2, 2)}
    model.act = [functional.silu, functools.partial(functional.gelu, approximate="tanh")]
    assert unknown_code(resolve(model)) is None
    model.act.append(lambda x: x)
    assert unknown_code(resolve(model)) == "code of the trainer's own in LlamaForCausalLM.act"


def test_an_attention_function_of_torchs_is_known(monkeypatch):
    model = small_model()
    function = AttentionInterface._global_mapping["sdpa"]
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", functools.partial(function))
    assert unknown_code(resolve(model)) is None
