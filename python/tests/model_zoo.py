"""Small models of many architectures, and a context in which they compute in FP64 throughout."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from models import VOCAB
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

WINDOW = 9

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# By model type: settings beside those of `_config`.
EXACT: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 48, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": _DEFAULT_ROPE,
    },
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"sliding_window": WINDOW},
    "glm": {},
    "glm4": {},
    "smollm3": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        **_EXPERTS,
    },
}

# Words of the refusal.
REFUSED = {
    "falcon": "the shared step fails on a group of random tokens",
    "bloom": "runs no attention through transformers' AttentionInterface",
    "gptj": "runs no attention through transformers' AttentionInterface",
    "mamba2": "runs no attention through transformers' AttentionInterface",
    "qwen3_next": "runs no attention through transformers' AttentionInterface",
}

_OTHER_SETTINGS: dict[str, dict] = {
    "falcon": {"head_dim": None},
    "gptj": {"head_dim": None, "rotary_dim": 8},
    "mamba2": {"num_heads": 8, "expand": 2, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 32, **_EXPERTS},
}

_DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "dropout", "embedding_dropout", "residual_dropout"),
    *("attn_pdrop", "resid_pdrop", "embd_pdrop"),
)


def _config(kind: str):
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 512,
        "sliding_window": None,
    }
    settings |= EXACT.get(kind) or _OTHER_SETTINGS.get(kind) or {}
    if kind == "mamba2":
        settings.pop("num_key_value_heads")
    settings = {name: value for name, value in settings.items() if value is not None}
    config = CONFIG_MAPPING[kind](**settings)
    for name in _DROPOUTS:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    return config


def zoo_model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0):
    """A small model whose attention is far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(kind)).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    # The grouped products of experts have no FP64 kernel.
    with contextlib.suppress(AttributeError, ValueError):
        model.set_experts_implementation("eager")
    return model


@contextlib.contextmanager
def in_fp64():
    """Norms, routers and rotary tables that ask for FP32 compute in FP64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
