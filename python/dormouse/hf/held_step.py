"""A step whose backwards wait for the gradients of what its forwards return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .. import _native as native
from ..schedule import Op, Score
from . import graph
from .embedding_rows import EmbeddingRows
from .head import Head
from .step import Step, StepReport

Values = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]
"""Of values; None for one that no loss depends on."""
ValuesOf = Callable[[torch.Tensor, Score, Sequence[bool]], tuple[torch.Tensor | None, ...]]
"""``(logits, score, needed)``: values of a sequence's labels, with their graph; None for those that
are not needed."""
ALL = (True, True)
GradientsOf = Callable[[Score], Gradients]


@dataclass
class _Held:
    """A microbatch between its forward and its backward."""

    scores: list[Score]
    values: list[Values]
    """With their graph; empty if logits are computed again."""
    hidden: list[torch.Tensor]
    """What the head reads, in its parts; empty if values have a graph."""


class HeldStep(Step):
    """Runs all forwards first: of the prefixes, then of the microbatches, whose graphs are kept.

    A prefix sleeps between its forward and its backward, as in every step. If the model's head runs
    apart, a microbatch's graph ends at the hidden states, and its logits exist twice for a while:
    in the forward and in the backward. Only for groups.
    """

    @property
    def counts(self) -> dict:
        """Number of tokens and microbatches run so far."""
        return self._report.counts

    def forward(
        self, values_of: ValuesOf, head: Head | None, rows: EmbeddingRows
    ) -> Iterator[tuple[Score, Values]]:
        """Runs the forwards in the plan's order; yields the values of each sequence. ``head``: of
        the model; None: logits are kept. ``rows``: take the gradients of embedded tokens."""
        self._values_of, self._head, self._rows = values_of, head, rows
        self._ops: list[Op] = []
        self._held: dict[int, _Held] = {}
        for op in self._plan:
            if op.kind is native.OpKind.PREFIX_FORWARD:
                self._prefix_forward(op)
            elif op.kind is native.OpKind.MICROBATCH:
                values, self._held[len(self._ops)] = self._hold(op)
                yield from zip(op.scores, values, strict=True)
            self._ops.append(op)

    def _hold(self, op: Op) -> tuple[list[Values], _Held]:
        self._enter("B")
        if self._head is None:
            with self._rows.apart():
                output, kept = self._packed_output(op)
            values = [
                self._values_of(part.logits, score, ALL)
                for part, score in zip(kept.parts(output, op.scores), op.scores, strict=True)
            ]
            return values, _Held(list(op.scores), values, [])
        with self._rows.apart(), self._head.apart() as hidden:
            self._packed_output(op)
        with torch.no_grad():
            logits = self._logits(hidden)
            values = [
                self._values_of(logits[score.rows.start : score.rows.stop], score, ALL)
                for score in op.scores
            ]
        return values, _Held(list(op.scores), [], hidden)

    def _logits(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """Returns logits as whole forwards compute them, a part each."""
        parts = list(map(self._head.logits, hidden))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def backward(self, gradients_of: GradientsOf) -> StepReport:
        """Runs the backwards in the plan's order. ``gradients_of(score)``: of its values."""
        for at, op in enumerate(self._ops):
            if op.kind is native.OpKind.MICROBATCH:
                held = self._held.pop(at)
                roots, seeds = self._roots_of(held, gradients_of)
                if roots:
                    with self._accepting(op.reads):
                        torch.autograd.backward(roots, seeds)
            elif op.kind is native.OpKind.PREFIX_BACKWARD:
                self._prefix_backward(op.node, is_last=False)
        return self._report

    def _roots_of(self, held: _Held, gradients_of: GradientsOf) -> tuple[list, list]:
        """Returns the ends of a microbatch's graph and their gradients; nothing here keeps them."""
        given = [gradients_of(score) for score in held.scores]
        if self._head is not None:
            return self._through_head(held, given)
        values, held.values = held.values, []
        pairs = [
            (value, gradient)
            for own, gradients in zip(values, given, strict=True)
            for value, gradient in zip(own, gradients, strict=True)
            if value.requires_grad and gradient is not None
        ]
        return [value for value, _ in pairs], [gradient for _, gradient in pairs]

    def _through_head(self, held: _Held, given: list[Gradients]) -> tuple[list, list]:
        """Computes logits again, and runs their backward: its result is the gradient of the hidden
        states."""
        if all(gradient is None for gradients in given for gradient in gradients):
            return [], []
        hidden, held.hidden = held.hidden, []
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in hidden]
        logits = self._logits(leaves)
        if logits.requires_grad:
            logits.backward(self._gradient_of_logits(logits, held.scores, given))
        pairs = [
            (live, leaf.grad)
            for live, leaf in zip(hidden, leaves, strict=True)
            if leaf.grad is not None
        ]
        return [live for live, _ in pairs], [gradient for _, gradient in pairs]

    def _gradient_of_logits(
        self, logits: torch.Tensor, scores: list[Score], given: list[Gradients]
    ) -> torch.Tensor:
        """Returns the gradient, in the memory of the logits if their backward does not read it."""
        read = logits.detach()
        result = read.clone() if graph.saves(logits) else read
        for score, gradients in zip(scores, given, strict=True):
            own = result[score.rows.start : score.rows.stop]
            needed = [gradient is not None for gradient in gradients]
            leaf = read[score.rows.start : score.rows.stop].requires_grad_()
            if not any(needed):
                own.zero_()
                continue
            with torch.enable_grad():
                values = self._values_of(leaf, score, needed)
            pairs = zip(values, gradients, strict=True)
            roots, seeds = zip(*((v, g) for v, g in pairs if g is not None), strict=True)
            torch.autograd.backward(roots, seeds)
            with torch.no_grad():
                own.copy_(leaf.grad)
        return result
