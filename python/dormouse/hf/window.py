"""Values of one call, given to the trainer in parts: one for each microbatch of an accumulation
window.

Rows with equal prompts meet in one call, whichever microbatches they are in. A part that is not the
last ends at copies of the values, where its gradients wait. The backward of the last part adds its
own and goes on into the call. Every loss is computed from the rows of its own microbatch, so any
normalisation and any order of the rows is exact.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.autograd.function import once_differentiable

from . import sharding
from .token_scores import TokenScores


class Window:
    """Scores of the rows of several microbatches. Weights must not change before its last part's
    backward."""

    def __init__(self, wrapped: torch.nn.Module, scores: TokenScores):
        """``wrapped``: the model with what is around it."""
        self.scores = scores
        """Of all rows."""
        self._wrapped = wrapped
        values = (scores.log_probabilities, scores.entropies)
        self._values: tuple[torch.Tensor, ...] | None = tuple(v for v in values if v is not None)
        self._waiting = tuple(v.detach().requires_grad_(v.requires_grad) for v in self._values)

    def part(self, rows: slice | torch.Tensor, *, is_last: bool) -> TokenScores:
        """Returns the scores of ``rows``, with a graph. The backward of the last part runs the
        passes with the gradients of all parts so far; rows of no part have none. ``rows``: a slice
        of the values' first dimension, or different indices of it.

        Raises :class:`RuntimeError` after the last part.
        """
        if self._values is None:
            raise RuntimeError("a part of a window after its last; accepted: a new window")
        if not is_last:
            return self._scores(tuple(each[rows] for each in self._waiting))
        own, self._values = self._values, None
        self.scores = self._scores(self._waiting)
        if not own[0].requires_grad:
            return self._scores(tuple(each[rows] for each in own))
        values = sharding.inside(
            self._wrapped, lambda: _LastPart.apply(self._waiting, rows, *own)
        )
        return self._scores(values)

    def _scores(self, values: tuple[torch.Tensor, ...]) -> TokenScores:
        entropies = values[1] if len(values) > 1 else None
        return replace(self.scores, log_probabilities=values[0], entropies=entropies)


class _LastPart(torch.autograd.Function):
    """Rows of values; in the backward, the gradients of all rows."""

    @staticmethod
    def forward(ctx, waiting, rows, *values):
        ctx.waiting, ctx.rows = waiting, rows
        ctx.set_materialize_grads(False)
        return tuple(value[rows].clone() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        found = []
        for waiting, own in zip(ctx.waiting, gradients, strict=True):
            whole, waiting.grad = waiting.grad, None
            if own is not None:
                whole = torch.zeros_like(waiting) if whole is None else whole
                whole[ctx.rows] += own
            found.append(whole)
        return (None, None, *found)
