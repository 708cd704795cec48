"""Attention of models whose rows are on several context-parallel ranks."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from ..trainers.refusals import UnsupportedTrainerError
from .context import CHUNKS_OF_RANK, positions_of


class ContextAttention(DotProductAttention):
    """Core attention of a model with context parallelism, in the place of Megatron's
    DotProductAttention, which refuses it::

        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = ContextAttention

    It runs in shared passes alone: a call of the model outside them raises
    :class:`UnsupportedTrainerError`. Without context parallelism it is Megatron's.
    """

    def __init__(self, config: TransformerConfig, *args, **named):
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **named)
        self.config = config

    def forward(self, *args, **named):
        """See Megatron's. Raises :class:`UnsupportedTrainerError` with context parallelism."""
        if self.config.context_parallel_size > 1:
            raise UnsupportedTrainerError(
                "the model is called outside shared passes with context_parallel_size "
                f"{self.config.context_parallel_size}, and its attention sees the keys of this "
                "rank's tokens alone; accepted: calls for the batches of a shared schedule, with "
                "gradients"
            )
        return super().forward(*args, **named)


@dataclass(frozen=True)
class Shard:
    """A rank's rows of a prompt, padded to as many on each rank."""

    tokens: int
    """Of the prompt."""
    group: dist.ProcessGroup
    unit: int
    """What divides the rows of a chunk."""

    @property
    def _chunk(self) -> int:
        """Rows of a chunk, padding included."""
        units = CHUNKS_OF_RANK * self.group.size() * self.unit
        return -(-self.tokens // units) * self.unit

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Of the rows, in host memory. Those of padding come last, from :attr:`tokens` on."""
        return positions_of(self._chunk, self.group.size(), self.group.rank())

    @property
    def ranges(self) -> tuple[range, ...]:
        """The rows without padding, among those of the prompt."""
        starts = self.positions[:: self._chunk].tolist()
        found = (range(start, min(start + self._chunk, self.tokens)) for start in starts)
        return tuple(filter(len, found))

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a tensor ``[tokens]``; 0 in padding."""
        room = CHUNKS_OF_RANK * self.group.size() * self._chunk - self.tokens
        return torch.nn.functional.pad(whole, (0, room))[self.positions.to(whole.device)]

    def gathered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the prompt, from those of each rank's rows, differentiable: shapes
        ``[tokens, ...]``, ``[rows with padding, ...]``. The gradients of a rank's rows are the sums
        of all ranks'. Collective, and so is the backward."""
        return _Gathered.apply(key, value, self)

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """Where each token of the prompt is among the rows of all ranks."""
        ways = self.group.size()
        of_ranks = torch.cat([positions_of(self._chunk, ways, rank) for rank in range(ways)])
        return of_ranks.argsort()[: self.tokens]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, value, shard):
        ctx.shard = shard
        own = torch.stack((key, value))
        parts = [torch.empty_like(own) for _ in range(shard.group.size())]
        dist.all_gather(parts, own, group=shard.group)
        rows, places = torch.cat(parts, 1), shard.places.to(own.device)
        # Each in memory of its own: boundary tensors.
        return tuple(each.index_select(0, places) for each in rows)

    @staticmethod
    def backward(ctx, *gradients):
        shard, ways = ctx.shard, ctx.shard.group.size()
        whole = torch.stack(gradients)
        wide = torch.promote_types(whole.dtype, torch.float32)
        own_rows = len(shard.positions)
        shape = (len(gradients), ways * own_rows, *whole.shape[2:])
        summed = torch.zeros(shape, dtype=wide, device=whole.device)
        summed[:, shard.places.to(whole.device)] = whole.to(wide)
        dist.all_reduce(summed, group=shard.group)
        first = shard.group.rank() * own_rows
        own = summed[:, first : first + own_rows].to(whole.dtype)
        return *own, None
