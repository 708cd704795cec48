"""FP64 in layers of transformers that compute in FP32 whatever the model's dtype is."""

from __future__ import annotations

import torch
from models import _exact_norm
from transformers.models.llama import modeling_llama


def exact_layers(monkeypatch) -> None:
    """transformers' norms and rotary tables compute in FP32 in an FP64 model too; TRL's rows that
    are padded on the left have other positions."""
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", _exact_norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", _exact_rotary)


def _exact_rotary(self, x, position_ids):
    config = self.config
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = 1.0 / config.rope_parameters["rope_theta"] ** steps
    angles = position_ids[..., None].to(torch.float64) * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
