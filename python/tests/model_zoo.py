"""Small models of the causal architectures of transformers, and a context in which they compute in
FP64 throughout."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from models import VOCAB
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

WINDOW = 9

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Sizes by attribute, for the configurations that have the attribute.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "lru_width")
_INNER = (
    *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "dff"),
    *("ffn_hidden_size", "expert_ffn_hidden_size", "intermediate_size_mlp", "feed_forward_size"),
    *("shared_intermediate_size", "dense_intermediate_size", "block_ffn_dim"),
    "prefix_dense_intermediate_size",
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
# How far a token sees, in tokens.
_LIMITS = (
    *("sliding_window", "attention_chunk_size", "sliding_window_size", "window_size"),
    *("attention_window_size", "local_attention", "keep_window_size", "index_topk"),
    *("local_attention_window_len", "local_attn_chunk_length", "lsh_attn_chunk_length"),
    *("indexer_budget", "swa_window_size"),
)
_SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(_HIDDEN, 64),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_LAYERS, 4),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_ACTIVE, 2),
    **dict.fromkeys(_LIMITS, WINDOW),
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "query_pre_attn_scalar": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 8,
    "state_size": 8,
    # With few heads many scores of an indexer are 0, and which of equal keys is selected is open.
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_block_size": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "moe_shared_expert_intermediate_size": 48,
    "shared_experts_intermediate_size": 48,
    "attention_heads": 4,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "max_source_positions": 512,
    "max_target_positions": 512,
}
_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")

_DOTS3_WINDOWED = {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 24},
    **{"head_dim": 24, "q_lora_rank": 24, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 12},
}
_GEMMA4_WIDE = {1: {"head_dim": 32}, 3: {"head_dim": 32}}
_QWEN4_INDEXER = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 8, "indexer_compress_ratio": 2},
}
# Words in the names of configurations of the language model itself.
_TEXT = ("text", "decoder", "global")
_WINDOWED = ["sliding_attention", "full_attention"] * 2

# By model type: settings beside those above; None: the default of the configuration.
SETTINGS: dict[str, dict] = {
    "gpt_oss": {"rope_parameters": _DEFAULT_ROPE},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "opt": {"word_embed_proj_dim": 64},
    "granite": {
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "cohere": {"logit_scale": 0.3},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"n_groups": 1, "ssm_state_size": 8, "num_hidden_layers": None},
    "qwen2": {"use_sliding_window": True, "layer_types": _WINDOWED},
    "qwen2_moe": {"use_sliding_window": True, "layer_types": _WINDOWED},
    "qwen3": {"use_sliding_window": True, "layer_types": _WINDOWED},
    "dots1": {"layer_types": _WINDOWED},
    "smollm3": {"use_sliding_window": True, "layer_types": _WINDOWED},
    "laguna": {"layer_types": _WINDOWED},
    "mellum": {"layer_types": _WINDOWED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
        "rotary_dim": 8,
    },
    "cohere_compass_text": {
        "layer_types": _WINDOWED,
        "rope_parameters": {
            "full_attention": _DEFAULT_ROPE,
            "sliding_attention": _DEFAULT_ROPE,
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (16, 32),
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh", "local", "lsh"],
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": VOCAB,
        "shape_vocab_size": VOCAB,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "dots3_note_text": {"per_layer_config": {i: _DOTS3_WINDOWED for i in (1, 3)}},
    "dots3_note": {
        "text_config": {"per_layer_config": {i: _DOTS3_WINDOWED for i in (1, 3)}},
        "vision_config": {
            **{"adapter_in_dim": 64, "adapter_out_dim": 64},
            "per_layer_config": {0: {"num_local_experts": 2}},
        },
        "audio_config": {
            **{"adapter_input_size": 64, "adapter_out_dim": 64},
            "downsample_hidden_size": 8,
        },
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "per_layer_config": _GEMMA4_WIDE,
        },
    },
    "gemma4_text": {"per_layer_config": _GEMMA4_WIDE},
    "gemma4_unified_text": {"per_layer_config": _GEMMA4_WIDE},
    "gemma4": {"text_config": {"per_layer_config": _GEMMA4_WIDE}},
    "gemma4_unified": {"text_config": {"per_layer_config": _GEMMA4_WIDE}},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "blt": {
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "encoder_hash_byte_group_vocab": 97,
    },
    "phi4_multimodal": {
        "vision_config": {"image_size": 28, "crop_size": 28, "num_hidden_layers": 2},
        "audio_config": {
            "num_blocks": 1,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 64,
        },
    },
    "longcat_flash": {"zero_expert_num": 2},
}

# Architectures whose gradients the tests compare over several shapes.
EXACT = (
    *("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("gpt_oss", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt2", "opt", "olmo2"),
    *("granite", "starcoder2", "stablelm", "cohere", "cohere2", "glm", "glm4", "smollm3"),
    *("deepseek_v3", "afmoe", "jetmoe", "minicpm3", "phimoe", "llama4_text"),
)

# Words of the refusal.
REFUSED = {
    "openai-gpt": "runs no attention through transformers' AttentionInterface",
    "recurrent_gemma": "runs no attention through transformers' AttentionInterface",
    "rwkv": "runs no attention through transformers' AttentionInterface",
    "minimax": "runs no attention through transformers' AttentionInterface",
    "zaya": "a shared step is not exact for this model",
}


def zoo_config(kind: str, limit: int | None = WINDOW) -> PreTrainedConfig:
    """A small configuration with every kind of layer that the default one has. ``limit``: how far
    a token sees where that is limited; None: no sliding window."""
    own = SETTINGS.get(kind, {})
    defaults = CONFIG_MAPPING[kind]
    try:
        settings = _tiny(defaults(), limit)
    except ValueError:
        # The default of one inside is not accepted by the one around it.
        inner = defaults.sub_configs.items()
        settings = {name: _tiny(each(), limit) for name, each in inner}
    for name, value in own.items():
        inner = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = settings[name] | value if inner else value
    settings = {
        name: value
        for name, value in settings.items()
        if value is not None or name == "sliding_window"
    }
    config = defaults(**settings)
    for each in _with_inner(config):
        for name, value in list(vars(each).items()):
            if ("drop" in name or "pdrop" in name or "jitter" in name) and type(value) is float:
                setattr(each, name, 0.0)
    return config


def _tiny(default: PreTrainedConfig, limit: int | None) -> dict:
    present = vars(default)
    settings = {name: value for name, value in _SIZES.items() if name in present}
    if limit is None and "sliding_window" in settings:
        settings["sliding_window"] = None
    elif limit is not None:
        settings |= {name: limit for name in _LIMITS if name in settings}
    if "kv_lora_rank" in present:
        settings |= {"num_key_value_heads": 4, "head_dim": 8}
        settings = {name: value for name, value in settings.items() if name in present}
    if not getattr(default, "is_decoder", True):
        settings["is_decoder"] = True
    for name in _KINDS_OF_LAYERS:
        if isinstance(present.get(name), (list, tuple)):
            kinds = list(dict.fromkeys(present[name])) or [None]
            settings[name] = [kinds[i % len(kinds)] for i in range(4)]
    for name, value in present.items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = _tiny(value, limit)
            if not any(word in name for word in _TEXT):
                settings[name] |= {each: 2 for each in _LAYERS if each in vars(value)}
    return settings


def _with_inner(config: PreTrainedConfig):
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _with_inner(value)


def zoo_model(
    kind: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    limit: int | None = WINDOW,
    **changes,
) -> torch.nn.Module:
    """A small model whose attention is far from uniform. ``changes``: of its configuration."""
    torch.manual_seed(seed)
    config = zoo_config(kind, limit)
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
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
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _without_fp32():
            yield
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def _without_fp32():
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
