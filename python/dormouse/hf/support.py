"""Models for which the shared-prefix step is exact; all others are refused.

Every check raises :class:`UnsupportedModelError` with the value seen and what is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Decoders whose attention goes through transformers' registry with K after rotary embedding, and
# whose other parts act on one row at a time.
ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Rotary tables that depend on positions alone. Dynamic NTK and longrope depend on the total
# length of each trajectory, which a shared prefix does not have.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Head dimensions that flash attention accepts on a GPU.
HEAD_DIM_STEP = 8
HEAD_DIM_MAX = 256

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class UnsupportedModelError(ValueError):
    """The model cannot share a prefix exactly; says what was seen and what is accepted."""


@dataclass(frozen=True)
class ModelView:
    """The parts of a causal language model that a shared-prefix step drives."""

    decoder: torch.nn.Module
    layers: tuple[torch.nn.Module, ...]
    head: torch.nn.Module
    config: object

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.config.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a layer."""
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below this."""
        return self.decoder.get_input_embeddings().weight.shape[0]


def resolve(model: torch.nn.Module) -> ModelView:
    """Returns the decoder, its layers and its head. Raises :class:`UnsupportedModelError`."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {kind or type(model).__name__!r} is not supported; "
            f"accepted: {', '.join(ARCHITECTURES)}"
        )
    decoder = getattr(base, "model", None)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if decoder is None or head is None or not hasattr(decoder, "layers"):
        raise UnsupportedModelError(
            f"{type(base).__name__} has no decoder layers under a language-model head; "
            f"accepted: the causal language models of {', '.join(ARCHITECTURES)}"
        )
    view = ModelView(decoder, tuple(decoder.layers), head, config)
    _check_config(view)
    return view


def _check_config(view: ModelView) -> None:
    rope = getattr(view.config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rotary scaling {rope_type!r} depends on each trajectory's length; "
            f"accepted: {', '.join(ROPE_TYPES)}"
        )
    kinds = set(getattr(view.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(
            f"layer types {sorted(kinds - {'full_attention'})} are not supported; "
            "accepted: full_attention in every layer"
        )
    indices = [getattr(layer.self_attn, "layer_idx", None) for layer in view.layers]
    if indices != list(range(len(view.layers))):
        raise UnsupportedModelError(
            f"layer indices {indices} are not 0..{len(view.layers) - 1} in order, "
            "so keys and values cannot be assigned to layers"
        )


def check_step(model: torch.nn.Module, view: ModelView, device: torch.device) -> None:
    """Checks what may change between steps: dropout, checkpointing, dtype, device.

    ``device``: the runtime's.
    """
    if model.training:
        for name, module in model.named_modules():
            rate = getattr(module, "p", 0.0) if isinstance(module, torch.nn.Dropout) else 0.0
            if rate > 0.0:
                raise UnsupportedModelError(
                    f"dropout {rate} in {name!r}: a shared prefix would share its mask; accepted: 0"
                )
        rate = getattr(view.config, "attention_dropout", 0.0) or 0.0
        if rate > 0.0:
            raise UnsupportedModelError(
                f"attention_dropout {rate}: a shared prefix would share its mask; accepted: 0"
            )
        if getattr(view.decoder, "gradient_checkpointing", False) or any(
            getattr(layer, "gradient_checkpointing", False) for layer in view.layers
        ):
            raise UnsupportedModelError(
                "gradient checkpointing drops tensors the prefix backward needs; accepted: off "
                "(the prefix sleeps instead)"
            )
    devices = {str(p.device) for p in model.parameters()}
    if devices != {str(device)}:
        raise UnsupportedModelError(
            f"parameters on {', '.join(sorted(devices))} with a runtime of {device} are not "
            f"supported; accepted: every parameter on {device}"
        )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes <= set(DTYPES):
        names = ", ".join(sorted(str(d) for d in dtypes - set(DTYPES)))
        raise UnsupportedModelError(
            f"parameters in {names} are not supported; accepted: {', '.join(map(str, DTYPES))}"
        )
    width = view.head_dim
    if device.type == "cuda" and not (width % HEAD_DIM_STEP == 0 and width <= HEAD_DIM_MAX):
        raise UnsupportedModelError(
            f"head_dim {width} does not fit torch's kernels on a GPU; "
            f"accepted: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        )
