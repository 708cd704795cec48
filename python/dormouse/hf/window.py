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

from ..errors import StateError
from . import sharding
from .token_scores import TokenScores


class Window:
    """Scores of the rows of several microbatches. Weights must not change before its last part's
    backward, or :meth:`finish`."""

    def __init__(self, wrapped: torch.nn.Module, scores: TokenScores):
        """``wrapped``: the model with what is around it."""
        self.scores = scores
        """Of all rows."""
        self._wrapped = wrapped
        self._values: tuple[torch.Tensor, ...] | None = scores.tensors()
        # Of the last part, until its backward.
        self._open: tuple[torch.Tensor, ...] | None = None
        # Whether a backward through the passes has begun and not ended.
        self._is_cut = False
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
            # Copies, as of the last part: a loss may overwrite them.
            return self._waiting.mapped(lambda each: each[rows].clone())
        own, self._values = self._values, None
        if not own[0].requires_grad:
            return self.scores.mapped(lambda each: each[rows])
        self.scores, self._open = self._waiting, own
        values = sharding.inside(self._wrapped, lambda: _LastPart.apply(self, rows, *own))
        parts = iter(values)
        return self._waiting.mapped(lambda each: next(parts))

    @property
    def waits(self) -> bool:
        """Whether parts have gradients for which the passes have not run backward."""
        return any(each.grad is not None for each in self._waiting.tensors())

    def finish(self, *, without_gradients: bool = False) -> None:
        """Runs the passes with the gradients of the other parts if no last part was taken, or it
        had no backward. ``without_gradients``: also if no part has any.

        Raises :class:`StateError` if gradients of parts are lost: the passes' backward failed, or
        ran before them.
        """
        if self._is_cut:
            raise StateError(
                "the backward of a window's last part failed, and the gradients of its other parts "
                "are lost; accepted: a new window of all its microbatches, after zero_grad()"
            )
        values, self._values = self._open or self._values, None
        if values is None:
            if self.waits:
                raise StateError(
                    "a part of a window ran backward after the window's passes did, and its "
                    "gradients are lost; accepted: backward of a part before that of the last, and "
                    "before the next microbatch"
                )
            return
        is_needed = without_gradients or self.waits
        found = self._taken()
        if is_needed:
            pairs = [pair for pair in zip(values, found, strict=True) if pair[0].requires_grad]
            self._is_cut = True
            torch.autograd.backward(
                [value for value, _ in pairs],
                [torch.zeros_like(value) if own is None else own for value, own in pairs],
            )
            self._end()

    def _taken(self) -> list[torch.Tensor | None]:
        """Returns the gradients that wait."""
        self._open, found = None, []
        for waiting in self._waiting.tensors():
            found.append(waiting.grad)
            waiting.grad = None
        return found

    def _begin(self) -> list[torch.Tensor | None]:
        """Returns the gradients that wait, to the backward that runs."""
        self._is_cut = True
        # Called if the backward succeeds.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return self._taken()

    def _end(self) -> None:
        self._is_cut = False


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
        pairs = zip(ctx.window._begin(), gradients, ctx.window._waiting.tensors(), strict=True)
        for whole, own, waiting in pairs:
            if own is not None:
                whole = torch.zeros_like(waiting) if whole is None else whole
                whole[ctx.rows] += own
            found.append(whole)
        return (None, None, *found)
