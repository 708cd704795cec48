"""The figures of a model that the plan's arithmetic needs."""

from __future__ import annotations

import torch

from .. import _native as native
from . import support


def model_shape(view: support.ModelView) -> native.ModelShape:
    """Returns the model figures that the plan's arithmetic needs."""
    hidden = view.config.hidden_size
    # In the last layer phase A runs K and V both ways and Q forward only: a third of its work.
    key_value = 2 * view.kv_heads * view.head_dim * hidden
    # Quantised weights are integers.
    floats = (p.dtype for p in view.layers[0].parameters() if p.is_floating_point())
    dtype = next(floats, torch.get_default_dtype())
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
        head_weights=view.embedding.weight.numel(),
        dtype_bytes=dtype.itemsize,
        saved_bytes_per_token_layer=_saved_bytes(view, dtype),
    )


def _weights(layer: torch.nn.Module, config) -> int:
    """Returns the weights of a layer that multiply a token: matrices, and of the stacked matrices
    of experts those that one token is routed to."""
    total = 0
    for parameter in layer.parameters():
        if parameter.dim() == 3:
            total += parameter[0].numel() * getattr(config, "num_experts_per_tok", 1)
        elif parameter.dim() == 2:
            total += parameter.numel()
    return total


def _saved_bytes(view: support.ModelView, dtype: torch.dtype) -> int:
    """Estimates the bytes a layer saves per token from the shapes of the eager modules.

    Two norms save their input, its square root's scale, and the normalised rows (4 rows of hidden
    size, FP32), q, k, v, the attention output and its sum, and the MLP's five intermediate rows.
    """
    hidden = view.config.hidden_size
    inner = getattr(view.config, "intermediate_size", None) or 4 * hidden
    # Some models have one per layer.
    inner = inner if isinstance(inner, int) else max(inner)
    heads = (2 * view.heads + 2 * view.kv_heads) * view.head_dim
    return 4 * 4 * hidden + dtype.itemsize * (2 * hidden + 2 * heads + 4 * inner)
