"""What cannot be done exactly is refused by name, before anything ran."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from models import group, loss_fn, tiny
from transformers import (
    LlamaConfig,
    MambaConfig,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from dormouse.hf import SharedPrefix, UnsupportedModelError, support


def test_layers_without_attention_through_the_registry(runtime):
    config = OpenAIGPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=97)
    model = OpenAIGPTLMHeadModel(config).double().eval()
    words = r"layer 0 \(Block\) runs no attention through .*AttentionInterface"
    refused(model, runtime, words)


def test_something_that_is_no_language_model(runtime):
    with pytest.raises(UnsupportedModelError, match="'Linear'"):
        SharedPrefix(torch.nn.Linear(2, 2), runtime)


def test_a_model_with_an_encoder(runtime):
    model = tiny()
    model.config.is_encoder_decoder = True
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has an encoder"):
        SharedPrefix(model, runtime)


ON_CPU = r"Call model.to\('cuda:0'\), or .*: dormouse.install\('cpu'\).runtime$"
ON_ANOTHER = r"Call model.to\('cuda:0'\), or .*: dormouse.install\('cuda:1'\).runtime$"
ON_BOTH = r"cpu, cuda:1 with a runtime of cuda:0 .* one device. Call model.to\('cuda:0'\)$"


@pytest.mark.parametrize(
    ("devices", "message"),
    [(["cpu"], ON_CPU), (["cuda:1", "cuda:1"], ON_ANOTHER), (["cuda:1", "cpu"], ON_BOTH)],
)
def test_parameters_on_another_device(devices, message):
    parameters = [SimpleNamespace(device=torch.device(each)) for each in devices]
    model = SimpleNamespace(training=False, parameters=lambda: parameters)
    view = SimpleNamespace(config=None)
    with pytest.raises(UnsupportedModelError, match=message):
        support.check_step(model, view, torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        (LlamaConfig(hidden_size=60, num_attention_heads=3), True),
        (MambaConfig(hidden_size=60), False),
    ],
)
def test_widths_of_heads_on_a_gpu(config, is_refused):
    """A head is 20 wide; a model of scans alone has none."""
    device = torch.device("cuda:0")
    parameter = SimpleNamespace(device=device, is_floating_point=lambda: False)
    model = SimpleNamespace(training=False, parameters=lambda: [parameter])
    view = support.ModelView(model, (), config)
    refused = pytest.raises(UnsupportedModelError, match="head_dim 20 does not fit torch's kernels")
    with refused if is_refused else contextlib.nullcontext():
        support.check_step(model, view, device)


def test_rotary_scaling_by_total_length(runtime):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="'dynamic'.*default, linear, llama3, yarn"):
        SharedPrefix(model, runtime)


@pytest.mark.parametrize("other", [{"full_attention": None}, {"rope_theta": 10000.0}])
def test_rotary_scaling_by_total_length_of_some_layers(other):
    """Beside layers without a table, or a setting beside the tables."""
    model = tiny("llama")
    model.config.rope_parameters = other | {"sliding_attention": {"rope_type": "longrope"}}
    with pytest.raises(UnsupportedModelError, match="'longrope'.*default, linear, llama3, yarn"):
        support.resolve(model)


def test_rotary_scaling_of_phimoe():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "short_mscale": 1.0,
        "long_mscale": 1.3,
    }
    config = PhimoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    model = PhimoeForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="'yarn' with long_mscale.*accepted: default"):
        support.resolve(model)
    model.config.rope_parameters["rope_type"] = "default"
    support.resolve(model)


def refused(model, runtime, match):
    shared = SharedPrefix(model, runtime)
    with pytest.raises(UnsupportedModelError, match=match):
        shared.backward(group(), loss_fn)
    assert all(p.grad is None for p in model.parameters())
    assert model.config._attn_implementation != "dormouse"


def test_dropout_while_training(runtime):
    model = tiny("llama", attention_dropout=0.1)
    refused(model.train(), runtime, "attention_dropout 0.1")
    SharedPrefix(model.eval(), runtime).backward(group(), loss_fn)


def test_a_dropout_module_while_training(runtime):
    model = tiny()
    model.model.layers[1].extra = torch.nn.Dropout(0.25)
    refused(model.train(), runtime, "dropout 0.25 in 'model.layers.1.extra'")


def test_eight_bits(runtime):
    refused(tiny().to(torch.float8_e4m3fn), runtime, "float8_e4m3fn.*accepted")


def test_inference_mode(runtime):
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        SharedPrefix(tiny(), runtime).backward(group(), loss_fn)


def test_the_registry_entry_outside_a_step():
    model = tiny()
    model.config._attn_implementation = "dormouse"
    with pytest.raises(RuntimeError, match="only inside"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
