"""Attention of rows over a sequence whose K and V pass by, block by block.

Ranks that share a sequence each have a block of its rows. Rows attend to their own keys, and to
those before them in each block as it passes; the parts are merged by log-sum-exp as they come
(docs/method.md §3). In the backward the blocks pass again, with accumulators of their gradients,
which end at their owner. No rank holds the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from .attention import (
    Add,
    Packed,
    Place,
    Rules,
    Weights,
    packed_backward,
    packed_forward,
    past_backward,
    past_forward,
)

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V of a block, or sums of their gradients, ``[1, kv_heads, rows, width]``."""


class Ring(Protocol):
    """Ranks that pass blocks on. Each has as many calls as the others, in one order: every method
    but :meth:`rows_before` is collective."""

    ranks: int

    def rows_before(self, position: int) -> list[int]:
        """Returns how many rows of each rank's block come before a position: its first ones."""

    def visit(self, block: Pair, read: Callable[[int, Pair], None]) -> None:
        """Calls ``read(rank, block)`` for this rank's block, then for that of each other rank. A
        block is valid during the call."""

    def collect(self, block: Pair, add: Callable[[int, Pair, Pair], None]) -> Pair:
        """Calls ``add(rank, block, sums)`` likewise, which adds to the sums of the block, FP32 or
        FP64; returns those of this rank's block, to which every rank has added."""


class Rows(NamedTuple):
    """Rows of queries that see the same rows of each block."""

    place: slice
    """Among the queries, and among the keys that are their own."""
    packed: Packed
    """How they attend to their own keys."""
    seen: list[int]
    """The number of first rows of each rank's block that they see."""


def rows_of_ranges(ring: Ring, ranges: Sequence[range]) -> list[Rows]:
    """Returns the rows of ranges of the sequence itself, one after another."""
    found, row = [], 0
    for each in ranges:
        place = slice(row, row + len(each))
        packed = Packed.of([(0, len(each))])
        found.append(Rows(place, packed, ring.rows_before(each.start)))
        row += len(each)
    return found


def rows_behind(ring: Ring, packed: Packed, end: int) -> list[Rows]:
    """Returns packed rows that follow the whole sequence. ``end``: the position after it."""
    return [Rows(slice(0, packed.rows), packed, ring.rows_before(end))]


class RingAttention(torch.autograd.Function):
    """Attention of rows over their own keys and over blocks that pass by.

    ``query``, ``key``, ``value``: of the rows; those in none of ``rows`` are padding, whose output
    is 0. ``block``: this rank's, without a graph; None: ``key`` and ``value``, whose gradients are
    then those of all ranks. ``add``: receives those of ``block``. Shapes are those of
    :mod:`.attention`.
    """

    @staticmethod
    def forward(
        ctx,
        query,
        key,
        value,
        rules: Rules,
        rows: Sequence[Rows],
        ring: Ring,
        block: Pair | None = None,
        add: Add | None = None,
    ):
        merged = _Merged(query, value, 1 + ring.ranks)
        for each in rows:
            own = (x[:, :, each.place] for x in (query, key, value))
            out, (lse,) = packed_forward(*own, None, each.packed, rules, ())
            merged.put(each.place, 0, out, lse)

        def read(rank: int, pair: Pair) -> None:
            for each in rows:
                count = each.seen[rank]
                if count:
                    own = query[:, :, each.place], *_first(pair, count), _place(count)
                    out, lse = past_forward(*own, each.packed, rules)
                    merged.put(each.place, 1 + rank, out, lse)

        ring.visit(block or (key, value), read)
        # Stored tokens-first, as the model reads it.
        out = merged.out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, merged.log_sum_exps, *(block or ()))
        ctx.rules, ctx.rows, ctx.ring, ctx.add = rules, rows, ring, add
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lses, *block = ctx.saved_tensors
        rules, rows = ctx.rules, ctx.rows
        grads = [_wide_zeros(x) for x in (query, key, value)]
        weights = {
            each.place.start: Weights(list(lses[:, :, :, each.place]), None) for each in rows
        }

        def seen_by(each: Rows, part: int) -> tuple[torch.Tensor, ...]:
            """Returns what a part's backward reads: of the rows the gradient and the log-sum-exp,
            and query and output."""
            own = weights[each.place.start].seen_by(part, grad[:, :, each.place])
            return *own, query[:, :, each.place], out[:, :, each.place]

        for each in rows:
            part_grad, lse, own_query, own_out = seen_by(each, 0)
            own = own_query, *(x[:, :, each.place] for x in (key, value)), None, own_out, [lse]
            *found, _ = packed_backward(part_grad, *own, each.packed, rules, (), None)
            for to, gradient in zip(grads, found, strict=True):
                to[:, :, each.place] += gradient

        def add(rank: int, pair: Pair, sums: Pair) -> None:
            for each in rows:
                count = each.seen[rank]
                if not count:
                    continue
                part_grad, lse, own_query, own_out = seen_by(each, 1 + rank)
                own = own_query, *_first(pair, count), own_out, lse, _place(count)
                of_query, *found = past_backward(part_grad, *own, each.packed, rules)
                grads[0][:, :, each.place] += of_query
                for to, gradient in zip(sums, found, strict=True):
                    to[:, :, :count] += gradient

        sums = ctx.ring.collect(tuple(block) or (key, value), add)
        if not block:
            for to, gradient in zip(grads[1:], sums, strict=True):
                to += gradient
        elif ctx.add is not None:
            ctx.add(0, *sums)
        of_rows = (to.to(x.dtype) for to, x in zip(grads, (query, key, value), strict=True))
        return *of_rows, *[None] * 5


class _Merged:
    """The merged softmax of the parts so far."""

    def __init__(self, query: torch.Tensor, value: torch.Tensor, parts: int):
        wide, shape = torch.promote_types(query.dtype, torch.float32), query.shape[:3]
        self.out = query.new_zeros(*shape, value.shape[3], dtype=wide)
        self._lse = query.new_full(shape, -math.inf, dtype=wide)
        self.log_sum_exps = query.new_full((parts, *shape), -math.inf, dtype=wide)
        """Of the rows' own keys, then of each rank's block."""

    def put(self, rows: slice, part: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds a part of some rows. The first has a key of each."""
        self.log_sum_exps[part, :, :, rows] = lse
        before = self._lse[:, :, rows]
        # Weights that add up to one: see attention.Weights.
        kept, added = (torch.sigmoid(x).unsqueeze(-1) for x in (before - lse, lse - before))
        own = self.out[:, :, rows]
        own.mul_(kept).addcmul_(out.to(own.dtype), added)
        self._lse[:, :, rows] = torch.logaddexp(before, lse)


def _first(pair: Pair, count: int) -> Pair:
    return tuple(each[:, :, :count] for each in pair)


def _place(count: int) -> Place:
    return Place(0, count, count)


def _wide_zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
