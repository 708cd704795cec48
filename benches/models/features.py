"""What is particular about a model: notes beside its verdict, and reasons in few words."""

from __future__ import annotations

import re

import torch
from transformers import AttentionInterface

from dormouse.hf import UnsupportedModelError, registry

REASON_CHARS = 160
PROBE_TOKENS = 12

# Words in the kinds of layers, or in names of attributes, of layers that carry a state.
_RECURRENT = ("linear", "conv", "mamba", "recurrent", "hybrid", "ssm_", "state_size", "lru_")
_NOT_RECURRENT = ("linear_bias", "use_conv_bias")


class Recorder:
    """Records what the layers ask of their attention."""

    def __init__(self):
        self._seen: dict[str, None] = {}

    def __enter__(self):
        AttentionInterface.register(registry.NAME, self._attention)
        return self

    def __exit__(self, *exc):
        AttentionInterface.register(registry.NAME, registry.attention)

    def _attention(self, module, query, key, value, attention_mask, *args, **others):
        seen = {
            "windows": others.get("sliding_window") is not None,
            "soft caps": others.get("softcap") is not None,
            "sinks": others.get("s_aux") is not None,
            "keys and values of different width": key.shape[-1] != value.shape[-1],
        }
        self._seen |= {name: None for name, is_seen in seen.items() if is_seen}
        return registry.attention(module, query, key, value, attention_mask, *args, **others)

    def notes(self) -> list[str]:
        return list(self._seen)


def notes_of(model: torch.nn.Module, verdict) -> list[str]:
    """Returns what its configuration says, and for a model that is not exact what may be why."""
    config = model.config.get_text_config()
    present = vars(config)
    kinds = set(present.get("layer_types") or ()) | set(present.get("layers_block_type") or ())
    notes = {
        "latent attention": present.get("kv_lora_rank"),
        "experts": any("experts" in name for name, _ in model.named_parameters()),
        "recurrent or convolutional layers": any(
            word in name
            for name in (*kinds, *present)
            for word in _RECURRENT
            if name not in _NOT_RECURRENT
        ),
        "keys selected by an indexer": any(name.startswith("index") for name in present),
        "chunks": present.get("attention_chunk_size"),
        "K and V shared between layers": present.get("num_kv_shared_layers"),
        "heads differ between layers": getattr(config, "per_layer_attributes", None),
    }
    if "not exact" in verdict.reason:
        notes |= _of_positions(model)
    return [name for name, is_so in notes.items() if is_so]


def _of_positions(model: torch.nn.Module) -> dict[str, bool]:
    tokens = torch.arange(3, 3 + PROBE_TOKENS).unsqueeze(0)
    positions = torch.arange(PROBE_TOKENS).unsqueeze(0)

    def logits(**others) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens, use_cache=False, **others).logits

    try:
        own, given, doubled = (
            logits(),
            logits(position_ids=positions),
            logits(position_ids=2 * positions),
        )
    except Exception:
        return {}
    return {
        "its own positions are not 0, 1, 2, …": not torch.allclose(own, given),
        "ignores position_ids": torch.equal(given, doubled),
    }


def short(error: Exception) -> str:
    """Returns an error in few words."""
    text = " ".join(str(error).split())
    if match := re.search(r"the first module whose output differs is (\S+ \(\w+), by", text):
        text = f"not exact: the first difference is in {match[1]})"
    else:
        text = text.replace("a shared step is not exact for this model", "not exact")
        text = text.split("; accepted")[0].split(" with a prompt of")[0]
    if not isinstance(error, UnsupportedModelError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"
