"""Attention that the model computes by itself, over keys that it reads from a cache.

Layers ask the cache of a generation for the keys and values of all tokens: ``cache.update(key,
value, layer_index)``. Phase A keeps what is passed to it. In phase B the cache returns the prefix's
keys before those of the microbatch, and a mask says which row sees which. The keys of the prefix
are copied once per microbatch and layer, and all scores exist at once.

The mask says nothing about windows and biases that a layer has by itself, so :mod:`.check` compares
such a model up to its own lengths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.cache_utils import DynamicCache

from .attention import Packed, Rules
from .masks import ChunkMask, WindowMask

Update = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
UpdateIndexer = Callable[[torch.Tensor, int], torch.Tensor]


class PassCache(DynamicCache):
    """The cache of one pass: ``update`` returns keys and values of ``before`` tokens and the
    pass's own, ``update_indexer`` keys by which a layer selects others."""

    def __init__(self, before: int, update: Update, update_indexer: UpdateIndexer):
        super().__init__()
        self._before, self._update, self._update_indexer = before, update, update_indexer

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self._update(key_states, value_states, layer_idx)

    def update_indexer(self, indexer_key_states, layer_idx):
        return self._update_indexer(indexer_key_states, layer_idx)

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


class JoinedKeys:
    """The keys that a microbatch reads: of the ``before`` tokens of the prefix, then of its packed
    rows."""

    def __init__(self, packed: Packed, before: int, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._rows = before + packed.offsets
        self.positions = torch.cat([torch.arange(before, device="cpu"), self._rows])
        """Of the keys."""
        rows = torch.arange(packed.rows, device="cpu")
        first = (rows - packed.offsets).unsqueeze(1)
        own = (rows >= first) & (rows <= rows.unsqueeze(1))
        # Each row sees the prefix, and its own response up to itself.
        prefix = torch.ones(packed.rows, before, dtype=torch.bool, device="cpu")
        self._seen = torch.cat([prefix, own], 1)

    def mask(self, limit: WindowMask | ChunkMask | None = None) -> torch.Tensor:
        """Returns the mask that is added to scores, ``[1, 1, rows, keys]``. ``limit``: of what a
        row reads."""
        seen = self._seen
        if limit is not None:
            name = "chunk" if isinstance(limit, ChunkMask) else "window"
            lowest = Rules(1.0, **{name: limit.tokens}).lowest(self._rows)
            seen = seen & (self.positions >= lowest.unsqueeze(1))
        hidden = torch.finfo(self._dtype).min
        mask = torch.zeros(seen.shape, dtype=self._dtype, device="cpu").masked_fill(~seen, hidden)
        return mask[None, None].to(self._device)

    def mask_of(self, built):
        """Returns the mask in place of what :func:`.masks.build` returned."""
        return self.mask(built) if isinstance(built, (WindowMask, ChunkMask)) else built
