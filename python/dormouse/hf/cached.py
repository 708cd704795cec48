"""Attention in the layers' own code, reached through the cache of a generation.

Such layers multiply queries and keys by themselves, and ask a cache for the keys and values of all
tokens: ``cache.update(key, value, layer_index)``. Phase A keeps what is passed to it. In phase B
the cache returns the prefix's keys before those of the microbatch, and a mask says which row sees
which. The keys of the prefix are copied once per microbatch and layer, and all scores exist at
once.

The mask says nothing about windows and biases that a layer has by itself, so :mod:`.check` compares
such a model up to its own lengths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicCache

from .attention import Packed

Update = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class PassCache(DynamicCache):
    """The cache of one pass: ``update`` returns keys and values of ``before`` tokens and the
    pass's own."""

    def __init__(self, before: int, update: Update):
        super().__init__()
        self._before, self._update = before, update

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self._update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._before + query_length, 0


class Joined(torch.autograd.Function):
    """Keys and values of the prefixes on a path before those of a microbatch."""

    @staticmethod
    def forward(ctx, key, value, past, add):
        """``past``, ``add``: see :class:`.attention.PackedAttention`."""
        keys, values = zip(*past, (key, value), strict=True)
        ctx.lengths, ctx.add = [each.shape[2] for each in keys], add
        return torch.cat(keys, 2), torch.cat(values, 2)

    @staticmethod
    def backward(ctx, grad_key, grad_value):
        keys, values = grad_key.split(ctx.lengths, 2), grad_value.split(ctx.lengths, 2)
        for index in range(len(ctx.lengths) - 1):
            ctx.add(index, keys[index], values[index])
        return keys[-1], values[-1], None, None


def mask(packed: Packed, before: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the mask of a microbatch, ``[1, 1, rows, before + rows]``, added to scores: each row
    sees the ``before`` tokens of the prefix, and its own response up to itself."""
    rows = torch.arange(packed.rows)
    first = (rows - packed.offsets).unsqueeze(1)
    own = (rows >= first) & (rows <= rows.unsqueeze(1))
    seen = torch.cat([torch.ones(packed.rows, before, dtype=torch.bool), own], 1)
    hidden = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)[None, None].to(device)
