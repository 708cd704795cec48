"""The figures of a model, as the program counts them from its configuration."""

from __future__ import annotations

import json
import os
import subprocess
import types

import pytest
import torch
import transformers
from model_zoo import zoo_model
from models import VOCAB, tiny

from dormouse import Group
from dormouse import _native as native
from dormouse.hf import SharedPrefix, support
from dormouse.hf import model_shape as shapes
from dormouse.hf.model_shape import model_shape

PROGRAM = native.library_path().with_name("dormouse")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
# Routed experts have another width than dense MLPs.
NARROW = {"moe_intermediate_size": 40}
LATENTS = NARROW | {
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 3},
    **{"first_k_dense_replace": 2, "n_group": 2, "topk_group": 1},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 24},
    "olmoe": {"num_experts": 8},
    "qwen2_moe": NARROW
    | {"num_experts": 8, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2},
    "qwen3_moe": NARROW | {"num_experts": 8, "head_dim": 24, "mlp_only_layers": [1]},
    "deepseek_v2": LATENTS | {"q_lora_rank": None},
    "deepseek_v3": LATENTS | {"q_lora_rank": 24},
}


def shape_of_program(folder, config) -> dict:
    """The figures that the program takes from ``config.json``."""
    fields = json.loads(config.to_json_string(use_diff=False)) | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "batch.jsonl").write_text('{"ids": [1, 2, 3]}\n')
    command = [PROGRAM, "plan", "batch.jsonl", "--model", "config.json", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    told = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)["model"]["shape"]


def test_saved_bytes_are_those_of_the_program(tmp_path):
    if not PROGRAM.is_file():
        pytest.skip(f"{PROGRAM} is not built: make cli")
    found, wanted = {}, {}
    for family, own in FAMILIES.items():
        config = transformers.AutoConfig.for_model(family, **SIZES | own)
        model = transformers.AutoModelForCausalLM.from_config(config)
        shape, of_program = model_shape(support.resolve(model)), shape_of_program(tmp_path, config)
        assert shape.dtype_bytes == of_program["dtype_bytes"] == 4, family
        found[family] = shape.saved_bytes_per_token_layer
        wanted[family] = of_program["saved_bytes_per_token_layer"]
    assert found == wanted


@pytest.mark.parametrize("kind", ["dots3_note_text", "gemma4_text"])
def test_layers_with_configurations_of_their_own(kind):
    view = support.resolve(zoo_model(kind))
    widths = [each.head_dim for each in view.config.per_layer_config]
    assert view.head_dim == max(widths) > min(widths)
    assert model_shape(view).layers == len(widths)


def test_a_number_per_layer():
    config = types.SimpleNamespace(intermediate_size=[48, None, 96], hidden_size=64)
    assert support.figure(config, "intermediate_size") == 96
    assert support.figure(config, "hidden_size") == 64
    assert support.figure(config, "kv_lora_rank") is None


def test_a_number_by_another_name():
    experts = {"per_layer_config": {0: {"num_local_experts": 4}}, "num_local_experts": 8}
    config = transformers.GptOssConfig(num_hidden_layers=2, **experts)
    assert support.figure(config, "num_experts") == support.figure(config, "num_local_experts") == 8


def test_a_model_is_looked_at_once(runtime, monkeypatch):
    own, looks = shapes._saved_bytes, []

    def counted(*arguments):
        looks.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(shapes, "_saved_bytes", counted)
    shared = SharedPrefix(tiny(), runtime)
    groups = [Group([1, 2, number], [[4, 5], [6]]) for number in range(4)]
    shared.score(groups[0])
    looks.clear()
    for group in groups:
        shared.score(group)
    assert looks == []
    shared._model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB, dtype=torch.float64))
    shared.score(groups[0])
    assert len(looks) == 1
