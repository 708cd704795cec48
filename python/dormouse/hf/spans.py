"""Causal attention of some rows of a sequence, whose keys are all present.

Ranks that share a sequence's rows each have the queries of some spans of it. A span attends to the
keys before it and, causally, to its own (docs/method.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention import Packed, PackedAttention, Rules

Span = tuple[int, int]
"""The first row, and the one after the last."""


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rules: Rules,
    spans: Sequence[Span],
) -> torch.Tensor:
    """Causal attention of ``spans`` of a sequence, differentiable.

    ``query``: of the spans' rows, one span after another. ``key``, ``value``: of the whole
    sequence. Shapes are those of :mod:`.attention`.
    """
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    key, value = _Collected.apply(key, value, before)

    def add(index: int, *gradients: torch.Tensor) -> None:
        before.append(gradients)

    outs, row = [query.new_zeros(*query.shape[:2], 0, value.shape[3])], 0
    for start, end in spans:
        own = query[:, :, row : row + end - start]
        row += end - start
        past = ((key[:, :, :start].detach(), value[:, :, :start].detach()),) if start else ()
        packed = Packed.of([(0, end - start)])
        keys, values = key[:, :, start:end], value[:, :, start:end]
        outs.append(PackedAttention.apply(own, keys, values, None, packed, rules, past, add))
    return torch.cat(outs, 2)


class _Collected(torch.autograd.Function):
    """K and V as they are. Their backward, which follows that of every span, adds the gradients of
    keys before spans."""

    @staticmethod
    def forward(ctx, key, value, before):
        ctx.before = before
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx, *gradients):
        whole = [gradient.clone() for gradient in gradients]
        for pair in ctx.before:
            for gradient, own in zip(whole, pair, strict=True):
                gradient[:, :, : own.shape[2]] += own
        ctx.before.clear()
        return (*whole, None)
