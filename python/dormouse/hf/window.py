"""Values of one call, given to the trainer in parts: one for each microbatch of an accumulation
window.

Rows with equal prompts meet in one call, whichever microbatches they are in. A part that is not the
last ends at copies of the values, where its gradients wait. The backward of the last part adds its
own and goes on into the call. Every loss is computed from the rows of its own microbatch, so any
normalisation and any order of the rows is exact.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from . import sharding
from .token_scores import TokenScores


class Window:
    """Scores of the rows of several microbatches. Weights must not change before its last part's
    backward."""

    def __init__(
        self, wrapped: torch.nn.Module, scores: TokenScores, *, may_finish: bool = False
    ):
        """``wrapped``: the model with what is around it. ``may_finish``: :meth:`finish` may be
        called, for which the window keeps the last part's graph."""
        self.scores = scores
        """Of all rows."""
        self._wrapped = wrapped
        self._values: tuple[torch.Tensor, ...] | None = scores.tensors()
        # Of the last part, until its backward.
        self._open: tuple[torch.Tensor, ...] | None = None
        self._may_finish = may_finish
        self._waiting = scores.mapped(lambda each: each.detach().requires_grad_(each.requires_grad))

    def part(self, rows: slice | torch.Tensor, *, is_last: bool) -> TokenScores:
        """Returns the scores of ``rows``, with a graph. The backward of the last part runs the
        passes with the gradients of all parts so far; rows of no part have none. ``rows``: a slice
        of the values' first dimension, or different indices of it.

        Raises :class:`RuntimeError` after the last part.
        """
        if self._values is None:
            raise RuntimeError("a part of a window after its last; accepted: a new window")
        if not is_last:
            return self._waiting.mapped(lambda each: each[rows])
        own, self._values = self._values, None
        if not own[0].requires_grad:
            return self.scores.mapped(lambda each: each[rows])
        self.scores = self._waiting
        self._open = own if self._may_finish else None
        values = sharding.inside(self._wrapped, lambda: _LastPart.apply(self, rows, *own))
        parts = iter(values)
        return self._waiting.mapped(lambda each: next(parts))


    def finish(self, *, without_gradients: bool) -> None:
        """Runs the passes with the gradients of the other parts if the last part was taken and had
        no backward. ``without_gradients``: also if no part has any."""
        if self._open is None:
            return
        values, found = self._open, self._taken()
        if without_gradients or any(each is not None for each in found):
            pairs = zip(values, found, strict=True)
            found = [torch.zeros_like(each) if own is None else own for each, own in pairs]
            torch.autograd.backward(values, found)

    def _taken(self) -> list[torch.Tensor | None]:
        """Returns the gradients that wait."""
        self._open, found = None, []
        for waiting in self._waiting.tensors():
            found.append(waiting.grad)
            waiting.grad = None
        return found


class _LastPart(torch.autograd.Function):
    """Rows of values; in the backward, the gradients of all rows."""

    @staticmethod
    def forward(ctx, window, rows, *values):
        ctx.window, ctx.rows = window, rows
        ctx.set_materialize_grads(False)
        return tuple(value[rows].clone() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        found = []
        pairs = zip(ctx.window._taken(), gradients, ctx.window._waiting.tensors(), strict=True)
        for whole, own, waiting in pairs:
            if own is not None:
                whole = torch.zeros_like(waiting) if whole is None else whole
                whole[ctx.rows] += own
            found.append(whole)
        return (None, None, *found)
