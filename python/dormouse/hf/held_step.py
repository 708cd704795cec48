"""A step whose backwards wait for the gradients of what its forwards return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .. import _native as native
from ..schedule import Op, Score
from .microbatch import pack_members
from .step import Step, StepReport, _changeable, _split

Values = tuple[torch.Tensor, ...]


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
        pack = pack_members(self._batch, op.members)
        kept = self._kept(op.scores, len(pack.tokens))
        output = self._output(op.reads, pack, self._batch.request, kept.index(pack.tokens.device))
        kept.check(output.logits)
        output = kept.of(replace(output, logits=_changeable(output.logits)))
        parts = _split(output, [kept.place(score.rows) for score in op.scores])
        self._report.counts["microbatch_tokens"] += len(pack.tokens)
        self._report.counts["microbatches"] += 1
        scores = list(op.scores)
        return scores, [
            read(part.logits, score) for part, score in zip(parts, scores, strict=True)
        ]

    def backward(self, gradients_of: Callable[[Score], Values]) -> StepReport:
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
            if value.requires_grad
        ]
        values.clear()
        if pairs:
            with self._accepting(op.reads):
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
