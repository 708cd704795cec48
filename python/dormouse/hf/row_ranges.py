"""Causal attention of some rows of a sequence, whose keys are all present.

Ranks that share a sequence each have the queries of some ranges of its rows. A range attends to the
keys before it and, causally, to its own (docs/method.md §3). One node of a graph has all ranges,
and padding behind them: the graph of a short prompt stands for that of a long one (see the probe).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .attention import Packed, Past, Rules, packed_backward, packed_forward

class _Part(NamedTuple):
    """A range."""

    rows: slice
    """Of the queries."""
    start: int
    """Of the keys that are causal."""
    end: int

    @property
    def packed(self) -> Packed:
        return Packed.of([(0, self.end - self.start)])

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the keys of the range."""
        return whole[:, :, self.start : self.end]

    def past(self, key: torch.Tensor, value: torch.Tensor) -> Past:
        """Returns the keys before the range."""
        pair = key[:, :, : self.start], value[:, :, : self.start]
        return (pair,) if self.start else ()


class RangeAttention(torch.autograd.Function):
    """Causal attention of ranges of a sequence's rows.

    ``query``: of their rows, one range after another, and of padding, whose output is 0.
    ``key``, ``value``: of the whole sequence. Shapes are those of :mod:`.attention`.
    """

    @staticmethod
    def forward(ctx, query, key, value, rules: Rules, ranges: Sequence[range]):
        _, heads, rows, _ = query.shape
        # Stored tokens-first, as the model reads it.
        out = query.new_zeros(1, rows, heads, value.shape[3]).transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum_exps = query.new_full((2, 1, heads, rows), -math.inf, dtype=wide)
        counts = []
        for part in _parts(ranges):
            own = query[:, :, part.rows], part.own(key), part.own(value)
            past = part.past(key, value)
            out[:, :, part.rows], lses = packed_forward(*own, None, part.packed, rules, past)
            counts.append(len(lses))
            for to, lse in zip(log_sum_exps, lses, strict=False):
                to[:, :, part.rows] = lse
        ctx.save_for_backward(query, key, value, out, log_sum_exps)
        ctx.rules, ctx.ranges, ctx.counts = rules, ranges, counts
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, log_sum_exps = ctx.saved_tensors
        grad_query, grad_key, grad_value = map(torch.zeros_like, (query, key, value))

        def add(index: int, of_key: torch.Tensor, of_value: torch.Tensor) -> None:
            grad_key[:, :, : of_key.shape[2]] += of_key
            grad_value[:, :, : of_value.shape[2]] += of_value

        for part, count in zip(_parts(ctx.ranges), ctx.counts, strict=True):
            past = part.past(key, value)
            grad_query[:, :, part.rows], of_key, of_value, _ = packed_backward(
                grad[:, :, part.rows],
                query[:, :, part.rows],
                part.own(key),
                part.own(value),
                None,
                out[:, :, part.rows],
                [each[:, :, part.rows] for each in log_sum_exps[:count]],
                part.packed,
                ctx.rules,
                past,
                add,
            )
            part.own(grad_key).add_(of_key)
            part.own(grad_value).add_(of_value)
        return grad_query, grad_key, grad_value, None, None


def _parts(ranges: Sequence[range]) -> Iterator[_Part]:
    row = 0
    for each in ranges:
        yield _Part(slice(row, row + len(each)), each.start, each.stop)
        row += len(each)
