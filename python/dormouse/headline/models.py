"""Models of a given geometry with random weights, created on their device without downloads."""

from __future__ import annotations

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from .shapes import Geometry

WEIGHT_SPREAD = 0.02
SEED = 8
PLAIN_ATTENTION = "dormouse_plain"


def _plain_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """torch's causal attention. No mask function is registered, so no mask is built, with which
    torch would not select flash attention."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(PLAIN_ATTENTION, _plain_attention)


def config_of(g: Geometry) -> LlamaConfig:
    """Returns transformers' configuration of the geometry."""
    return LlamaConfig(
        hidden_size=g.hidden,
        intermediate_size=g.inner,
        num_hidden_layers=g.layers,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        vocab_size=g.vocab,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        attn_implementation=PLAIN_ATTENTION,
    )


def build(
    config: LlamaConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> LlamaForCausalLM:
    """Returns the model in training mode. Weights are reproducible per device type."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    # The rotary table is computed, not loaded; a model on the meta device has none.
    rotary = model.model.rotary_emb
    with torch.device(device):
        model.model.rotary_emb = type(rotary)(config=config)
    fill(model)
    return model.train()


@torch.no_grad()
def fill(model: LlamaForCausalLM) -> None:
    """Writes the model's random weights, each time the same."""
    parameters = list(model.parameters())
    generator = torch.Generator(parameters[0].device).manual_seed(SEED)
    for parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, WEIGHT_SPREAD, generator=generator)
