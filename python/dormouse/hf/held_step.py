"""A step whose backwards wait for the gradients of what its forwards return."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .. import _native as native
from .. import failures
from ..activations.forwards import Forwards
from ..schedule import Op, Score
from . import graph
from .embedding_rows import EmbeddingRows
from .head import Head
from .step import Step, StepReport

Values = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]
"""Of values; None for one that no loss depends on."""
GradientsOf = Callable[[Score], Gradients]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors with their gradients."""


class Measure(Protocol):
    """What is computed from the logits of a sequence."""

    def values(self, logits: torch.Tensor, labels: torch.Tensor) -> Values:
        """Returns values of the labels, with their graph."""

    def overwrite_with_gradient(
        self, logits: torch.Tensor, labels: torch.Tensor, gradients: Gradients
    ) -> None:
        """Overwrites the logits with their gradient."""


@dataclass
class _Held:
    """A microbatch between its forward and its backward."""

    reads: int | None
    """The prefix that it follows."""
    scores: tuple[Score, ...]
    values: list[Values]
    """With their graph; empty if logits are computed again."""
    hidden: list[torch.Tensor]
    """What the head reads, in its parts, with the graph of the layers; empty if values have it."""
    leaves: list[torch.Tensor]
    """The same without."""
    roots: Pairs = field(default_factory=list)
    """Where the backward of the layers begins, with gradients."""

    def of_values(self, given: list[Gradients]) -> Pairs:
        """Returns values with their gradients; nothing here keeps them."""
        values, self.values = self.values, []
        return [
            (value, gradient)
            for own, gradients in zip(values, given, strict=True)
            for value, gradient in zip(own, gradients, strict=True)
            if value.requires_grad and gradient is not None
        ]

    def take_gradients(self) -> None:
        """Begins the backward of the layers at the hidden states."""
        for live, leaf in zip(self.hidden, self.leaves, strict=True):
            if leaf.grad is not None:
                self.roots.append((live, leaf.grad))
        self.hidden, self.leaves = [], []


class HeldStep(Step):
    """Runs all forwards first: of the prefixes, then of the microbatches, whose graphs are kept.

    A prefix sleeps between its forward and its backward, as in every step, and microbatches may. If
    the model's head runs apart, the graphs of layers end at the hidden states. Only for groups.
    """

    @property
    def counts(self) -> dict:
        """Number of tokens and microbatches run so far."""
        return self._report.counts

    def forward(
        self,
        measure: Measure,
        head: Head | None,
        rows: EmbeddingRows,
        asleep: Forwards | None,
        *,
        holds_logits: bool,
    ) -> Iterator[tuple[Score, Values]]:
        """Runs the forwards in the plan's order; yields the values of each sequence. ``head``: of
        the model; None: it does not run apart, and logits are held. ``rows``: take the gradients of
        embedded tokens. ``asleep``: lets what microbatches save sleep; None: it stays awake.
        ``holds_logits``: else the backward computes them again."""
        self._measure, self._head, self._rows, self._asleep = measure, head, rows, asleep
        self._held: list[_Held] = []
        # In the order of their backwards.
        self._prefixes: list[int] = []
        for op in self._plan:
            if op.kind is native.OpKind.PREFIX_FORWARD:
                with rows.apart(is_prefix=True):
                    self._prefix_forward(op)
            elif op.kind is native.OpKind.MICROBATCH:
                self._enter("B")
                both = self._hold_whole(op) if head is None else self._hold(op, holds_logits)
                values, held = both
                self._held.append(held)
                yield from zip(op.scores, values, strict=True)
            elif op.kind is native.OpKind.PREFIX_BACKWARD:
                self._prefixes.append(op.node)

    def _hold_whole(self, op: Op) -> tuple[list[Values], _Held]:
        with self._of_layers():
            output, kept = self._packed_output(op)
        values = [
            self._values(part.logits, score)
            for part, score in zip(kept.parts(output, op.scores), op.scores, strict=True)
        ]
        return values, _Held(op.reads, op.scores, list(values), [], [])

    def _hold(self, op: Op, holds_logits: bool) -> tuple[list[Values], _Held]:
        with self._of_layers(), self._head.apart() as hidden:
            self._packed_output(op)
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in hidden]
        with torch.set_grad_enabled(holds_logits):
            logits = self._logits(leaves)
            # A row's gradient is that of one part: no loss changes logits here.
            parts = torch.unsafe_split_with_sizes(logits, [len(each.rows) for each in op.scores])
            del logits
            values = [
                self._values(part, score)
                for part, score in zip(parts, op.scores, strict=True)
            ]
        held = list(values) if holds_logits else []
        return values, _Held(op.reads, op.scores, held, hidden, leaves)

    @contextlib.contextmanager
    def _of_layers(self) -> Iterator[None]:
        """Context of the forward of a microbatch's layers."""
        with self._rows.apart(), self._asleep or contextlib.nullcontext():
            yield

    def _logits(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """Returns logits as whole forwards compute them, a part each."""
        parts = list(map(self._head.logits, hidden))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def backward_of_heads(self, gradients_of: GradientsOf) -> None:
        """Runs the backwards of heads that run apart. They come first, so that no logits exist
        beside the gradients of layers. ``gradients_of(score)``: of its values."""
        for held in reversed(self._held):
            given = [gradients_of(score) for score in held.scores]
            if self._head is None:
                # Their backward goes on into the layers.
                held.roots = held.of_values(given)
                continue
            if held.values:
                _backward(held.of_values(given))
            elif any(gradient is not None for gradients in given for gradient in gradients):
                logits = self._logits(held.leaves)
                if logits.requires_grad:
                    logits.backward(self._gradient_of_logits(logits, held.scores, given))
                del logits
            held.take_gradients()

    def backward(self) -> StepReport:
        """Runs the backwards of layers, the last microbatch's first, then those of the prefixes."""
        while self._held:
            failures.check()
            held = self._held.pop()
            with self._accepting(held.reads):
                _backward(held.roots)
        for node in self._prefixes:
            self._prefix_backward(node, is_last=False)
        return self._report

    def _gradient_of_logits(
        self, logits: torch.Tensor, scores: Sequence[Score], given: list[Gradients]
    ) -> torch.Tensor:
        """Returns the gradient, in the memory of the logits if that may be overwritten."""
        result = logits.detach()
        if not graph.is_overwritable(logits):
            result = result.clone()
        with torch.no_grad():
            for score, gradients in zip(scores, given, strict=True):
                own = result[score.rows.start : score.rows.stop]
                labels = self._batch.labels(score.sequence)
                self._measure.overwrite_with_gradient(own, labels, gradients)
        return result

    def _values(self, logits: torch.Tensor, score: Score) -> Values:
        return self._measure.values(logits, self._batch.labels(score.sequence))


def _backward(pairs: Pairs) -> None:
    """Runs the backward of a graph that nothing else holds: what it saved is freed on the way."""
    if pairs:
        roots, seeds = map(list, zip(*pairs, strict=True))
        pairs.clear()
        torch.autograd.backward(roots, seeds)
