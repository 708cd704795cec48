"""A step whose backwards wait for the gradients of what its forwards return."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import _native as native
from ..schedule import Op, Score
from .step import Step, StepReport

Values = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]
"""Of values; None for one that no loss depends on."""


class HeldStep(Step):
    """Runs all forwards first: of the prefixes, then of the microbatches, whose graphs are kept.

    A prefix sleeps between its forward and its backward, as in every step.
    """

    @property
    def counts(self) -> dict:
        """Number of tokens and microbatches run so far."""
        return self._report.counts

    def forward(self, read: Callable[[torch.Tensor, Score], Values]) -> None:
        """Runs the forwards in the plan's order. ``read(logits, score)`` returns the values of a
        sequence's labels, with their graph."""
        self._ops: list[Op] = []
        self._held: dict[int, tuple[list[Score], list[Values]]] = {}
        for op in self._plan:
            if op.kind is native.OpKind.PREFIX_FORWARD:
                self._prefix_forward(op)
            elif op.kind is native.OpKind.MICROBATCH:
                self._held[len(self._ops)] = self._hold(op, read)
            self._ops.append(op)

    def _hold(self, op: Op, read) -> tuple[list[Score], list[Values]]:
        self._enter("B")
        output, kept = self._packed_output(op)
        parts = zip(kept.parts(output, op.scores), op.scores, strict=True)
        return list(op.scores), [read(part.logits, score) for part, score in parts]

    def backward(self, gradients_of: Callable[[Score], Gradients]) -> StepReport:
        """Runs the backwards in the plan's order. ``gradients_of(score)``: of the values that
        ``read`` returned."""
        for at, op in enumerate(self._ops):
            if op.kind is native.OpKind.MICROBATCH:
                self._backward_of(op, *self._held.pop(at), gradients_of)
            elif op.kind is native.OpKind.PREFIX_BACKWARD:
                self._prefix_backward(op.node, is_last=False)
        return self._report

    def _backward_of(self, op: Op, scores: list[Score], values: list[Values], gradients_of) -> None:
        pairs = [
            (value, gradient)
            for score, given in zip(scores, values, strict=True)
            for value, gradient in zip(given, gradients_of(score), strict=True)
            if value.requires_grad and gradient is not None
        ]
        values.clear()
        if pairs:
            with self._accepting(op.reads):
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
