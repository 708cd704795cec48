"""Attention of a GPTModel's layers during a pass, and its rotary embedding by position."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention

from ..hf import registry, substitutes
from ..hf.attention import Packed, Rules
from ..hf.mixers import Handlers, Route
from .balancing import Balancing
from .context import is_context_parallel
from .context_ring import ShardRing
from .context_shards import Shard, Shards
from .hidden import Hidden
from .routers import PrefixEnd, Routers


class _WithPadding(torch.autograd.Function):
    """Padding behind the rows of attention, or none: one node in either case, since a prompt whose
    graph is not the probed one stays awake. Shapes ``[tokens, ...]``."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, room: int) -> torch.Tensor:
        ctx.tokens = len(out)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, room)) if room else out.view_as(out)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad[: ctx.tokens], None


class GPTMixers:
    """What mixes tokens in the layers of a GPTModel. Their core attention is replaced for the
    thread of a pass; Megatron's own returns no log-sum-exp."""

    route = Route.OWN
    are_recurrent = False

    def __init__(self, gpt: GPTModel, routers: Routers, shards: Shards, hidden: Hidden):
        """``shards``: of prompts, with context parallelism."""
        self._gpt, self.routers, self._shards, self._hidden = gpt, routers, shards, hidden
        # Of the prompt that a microbatch follows.
        self._ring: ShardRing | None = None
        self._cores = [layer.self_attention.core_attention for layer in gpt.decoder.layers]
        self.sequence_ways = gpt.pg_collection.tp.size() if gpt.config.sequence_parallel else 1
        """Number of ranks that have a part of the rows each, by sequence parallelism."""
        self._rows = 0
        self._is_sharded = False
        self._shard: Shard | None = None

    @property
    def ends_at_keys(self) -> bool:
        """See :class:`dormouse.hf.mixers.Mixers`."""
        # A later stage reads the hidden states of this one.
        return self._gpt.post_process and not self.routers.end_prefixes

    def rows_of_prefix(self) -> PrefixEnd | None:
        """See :class:`dormouse.hf.mixers.Mixers`."""
        if self._gpt.post_process:
            return self.routers.last
        returned = self._hidden.returned
        return PrefixEnd(returned) if returned.requires_grad else None

    def are_recurrent_in(self, layer: torch.nn.Module) -> bool:
        """Returns False: every layer is attention."""
        return False

    def select_keys_in(self, layer: torch.nn.Module) -> bool:
        """Returns False: every key is read."""
        return False

    def padded(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        """Returns 1-D tensors with as many rows as the ranks of sequence parallelism divide; of a
        prompt with context parallelism, this rank's. Padding is 0, and attention of the pass leaves
        it out."""
        if self._is_sharded:
            self._shard = self._shards.of(len(rows[0]))
            return list(map(self._shard.own, rows))
        self._rows = len(rows[0])
        room = -self._rows % self.sequence_ways
        return [torch.nn.functional.pad(each, (0, room)) for each in rows]

    def rows_of_prompt(self, tokens: int) -> int:
        """Returns the rows of a prompt's pass on the ranks of a tensor-parallel group."""
        return self._shards.of(tokens).rows if is_context_parallel(self._gpt) else tokens

    def own_part(self, padded: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this rank, by sequence parallelism."""
        ways = self.sequence_ways
        return padded.chunk(ways)[self._gpt.pg_collection.tp.rank() % ways]

    def _owners(self, balancing: Balancing) -> torch.Tensor:
        """Returns the owners of this rank's rows of the pass that runs."""
        rows = self._rows if self._shard is None else self._shard.tokens
        (padded,) = self.padded(balancing.owners(rows))
        return self.own_part(padded)

    @contextlib.contextmanager
    def taken_over(
        self,
        handlers: Handlers,
        packed: Packed | None = None,
        prefix_tokens: int = 0,
        experts: None = None,
    ) -> Iterator[dict]:
        """See :meth:`dormouse.hf.mixers.Mixers.taken_over`."""
        with contextlib.ExitStack() as stack:
            is_prefix = handlers.is_prefix
            routers = self.routers.in_pass(is_prefix=is_prefix, owners_of=self._owners)
            stack.enter_context(routers)
            for core in self._cores:
                forward = self._attention(core, handlers.attend)
                stack.enter_context(substitutes.forward(core, forward))
            if packed is not None:
                stack.enter_context(self._rotary(lambda: prefix_tokens + packed.offsets))
                stack.enter_context(self._behind(prefix_tokens))
            elif is_context_parallel(self._gpt):
                stack.enter_context(self._sharded())
            # Otherwise Megatron's own positions, from 0 on, are right.
            yield {}

    @contextlib.contextmanager
    def dense(self) -> Iterator[None]:
        """Context of a forward of Megatron's own over whole rows, without losses and counts of
        routers."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.routers.quiet())
            if is_context_parallel(self._gpt):
                stack.enter_context(self._rotary(lambda: torch.arange(self._rows)))
                for core in self._cores:
                    own = functools.partial(DotProductAttention.forward, core)
                    stack.enter_context(substitutes.forward(core, own))
            yield

    @contextlib.contextmanager
    def _sharded(self) -> Iterator[None]:
        """Context of a prompt's pass of which each context-parallel rank has rows."""
        self._is_sharded = True
        try:
            with self._rotary(lambda: self._shard.positions):
                yield
        finally:
            self._is_sharded, self._shard = False, None

    @contextlib.contextmanager
    def _behind(self, prefix_tokens: int) -> Iterator[None]:
        """Context of a microbatch's pass, which reads the K and V of a prompt."""
        if is_context_parallel(self._gpt):
            self._ring = self._shards.of(prefix_tokens).ring
        try:
            yield
        finally:
            self._ring = None

    def _attention(self, core: torch.nn.Module, attend: registry.Attend) -> Callable:
        rules = Rules(core.softmax_scale * (core.scale_mask_softmax.scale or 1.0))

        def forward(query, key, value, attention_mask, **named):
            """Shapes are Megatron's: ``[tokens, 1, heads, head_dim]``."""
            room, ranges, ring = query.shape[0] - self._rows, None, self._ring
            if self._shard is not None:
                # Padding is part of that attention.
                room, ranges, ring = 0, self._shard.ranges, self._shard.ring
                key, value = self._shard.boundary(key, value)
            else:
                query, key, value = (x[: self._rows] for x in (query, key, value))
            columns = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = attend(registry.AttentionCall(core, *columns, rules, None, ranges, ring))
            return _WithPadding.apply(out.permute(2, 0, 1, 3).flatten(2), room)

        return forward

    @contextlib.contextmanager
    def _rotary(self, find_positions: Callable[[], torch.Tensor]) -> Iterator[None]:
        """Context in which the rotary embedding, if there is one, is that of the pass's rows.
        ``find_positions()``: of these, called in the forward."""
        if self._gpt.position_embedding_type != "rope":
            yield
            return
        rotary = self._gpt.rotary_pos_emb
        own = rotary.forward

        def forward(*arguments, **named):
            positions = find_positions()
            # Megatron caches tables by length.
            length = 1 << int(positions.max()).bit_length()
            # Of a packed sequence: context parallelism leaves it whole.
            table = own(length, packed_seq=True)
            index = positions if self._shard is not None else self.padded(positions)[0]
            return table[index.to(table.device)]

        with substitutes.forward(rotary, forward):
            yield
