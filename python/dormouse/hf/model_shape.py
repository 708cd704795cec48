"""The figures of a model that the plan's arithmetic needs."""

from __future__ import annotations

import math

import torch

from .. import _native as native
from . import routing, support
from .support import figure, whole_size

# The name of the routed experts' module, in a layer's MLP.
EXPERTS = "experts"
FP32_BYTES = torch.float32.itemsize


def model_shape(view: support.ModelView) -> native.ModelShape:
    """Returns the model figures that the plan's arithmetic needs."""
    hidden = view.config.hidden_size
    # In the last layer phase A runs K and V both ways and Q forward only: a third of its work.
    key_value = 2 * view.kv_heads * view.head_dim * hidden
    dtype = dtype_of(view)
    return native.ModelShape(
        layers=len(view.layers),
        heads=view.heads,
        kv_heads=view.kv_heads,
        head_dim=view.head_dim,
        vocab=view.vocab_size,
        layer_linear_weights=sum(_weights(each, view.config) for each in view.layers)
        // len(view.layers),
        kv_linear_weights=key_value,
        last_layer_prefix_weights=key_value + view.heads * view.head_dim * hidden // 3,
        head_weights=math.prod(whole_size(view.embedding.weight)),
        dtype_bytes=dtype.itemsize,
        saved_bytes_per_token_layer=_saved_bytes(view, dtype),
    )


def dtype_of(view: support.ModelView) -> torch.dtype:
    """Returns the dtype of a layer's weights. Quantised ones are integers, which do not count."""
    floats = (p.dtype for p in view.layers[0].parameters() if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def _weights(layer: torch.nn.Module, config) -> int:
    """Returns the weights of a layer that multiply a token: matrices, and of the stacked matrices
    of experts those that one token is routed to."""
    total = 0
    for parameter in layer.parameters():
        size = whole_size(parameter)
        if len(size) == 3:
            total += math.prod(size[1:]) * (figure(config, "num_experts_per_tok") or 1)
        elif len(size) == 2:
            total += math.prod(size)
    return total


def _saved_bytes(view: support.ModelView, dtype: torch.dtype) -> int:
    """Estimates the bytes a layer saves per token from the shapes of the eager modules: the mean
    of all layers, rounded up. ``dormouse plan`` has the same terms (cli/src/model/config.rs).

    Two norms save their input, its square root's scale, and the normalised rows (4 rows of hidden
    size, FP32), queries, keys and values before and after rotary embedding, and the attention's
    input and output. Latents have norms of their own.
    """
    hidden = view.config.hidden_size
    heads, latents = _attention_elements(view)
    elements = 2 * hidden + latents + 4 * heads
    attention = 4 * 4 * hidden + 2 * FP32_BYTES * latents + dtype.itemsize * elements
    mlps = sum(_mlp_bytes(layer, view, dtype) for layer in view.layers)
    return attention + math.ceil(mlps / len(view.layers))


def _attention_elements(view: support.ModelView) -> tuple[int, int]:
    """Returns the elements of all heads of queries and of keys, and those of latents. Keys and
    values of latents may differ in width; the mean counts."""
    config = view.config
    latent = figure(config, "kv_lora_rank")
    widths = [figure(config, f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v")]
    if latent is None or None in widths:
        return (view.heads + view.kv_heads) * view.head_dim, 0
    return view.heads * sum(widths), latent + (figure(config, "q_lora_rank") or 0)


def _mlp_bytes(layer: torch.nn.Module, view: support.ModelView, dtype: torch.dtype) -> int:
    """Returns the bytes that a layer's MLP saves per token: four inner rows; of experts those that
    a token is routed to and shared ones, a row in and out for each routed one, and the router's
    scores twice in FP32."""
    config, hidden = view.config, view.config.hidden_size
    inner = figure(config, "intermediate_size") or 4 * hidden
    if not any(name.rpartition(".")[2] == EXPERTS for name, _ in layer.named_modules()):
        return dtype.itemsize * 4 * inner
    routed = figure(config, "num_experts_per_tok") or 1
    inner = figure(config, "moe_intermediate_size") or inner
    shared = figure(config, "shared_expert_intermediate_size")
    shared = shared or (figure(config, "n_shared_experts") or 0) * inner
    elements = 4 * (routed * inner + shared) + 2 * hidden * routed
    return dtype.itemsize * elements + 2 * FP32_BYTES * routing.count_experts(view)
