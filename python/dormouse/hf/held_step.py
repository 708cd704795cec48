"""A step whose backwards wait for the gradients of what its forwards return."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import _native as native
from .. import failures
from ..activations.forwards import Forwards
from ..runtime import Runtime
from ..schedule import Op, Score
from . import graph
from .embedding_rows import EmbeddingRows
from .filter.graph import FilteredGraph
from .filter.marks import GraphEdge
from .filter.microbatch import Dropped, FilteredMicrobatch
from .filter.model import marked_layers
from .filter.rows import Layout
from .head import Head
from .likelihood import Norms
from .outputs import Output
from .score import labels_of
from .score_values import Measure, Tensors, Values, tensors_of
from .step import KeptRows, Step
from .step_report import StepReport

GradientsOf = Callable[[Score], Values]
"""Returns the gradients of the values of a sequence."""
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors with their gradients."""


@dataclass
class _Head:
    """The head of a microbatch, apart from its layers, between its forward and its backward."""

    hidden: list[torch.Tensor]
    """What it reads, in its parts, with the graph of the layers."""
    leaves: list[torch.Tensor]
    """The same without."""
    norms: list[Norms]
    logits: torch.Tensor | None
    """With their graph; None if they are computed again."""
    places: list[tuple[slice, torch.Tensor | slice]]
    """Of each response: its rows, and which of its tokens these predict."""
    filtered: FilteredGraph | None = None
    """The graph of logits that have the rows of kept tokens alone."""
    _found: list[torch.Tensor | None] | None = None

    def drop(self, dropped: Dropped) -> None:
        """Drops the rows of dropped tokens."""
        rows, by_rows = dropped.rows, Layout(0)
        self.places = dropped.places()
        both = zip(self.norms, self.places, strict=True)
        self.norms = [Norms(*(each[own] for each in norms)) for norms, (_, own) in both]
        if self.logits is None:
            self.leaves = [
                rows.gather(leaf.detach(), by_rows).requires_grad_(leaf.requires_grad)
                for leaf in self.leaves
            ]
        elif self.logits.requires_grad:
            root = GraphEdge.of(self.logits), by_rows
            self.filtered = FilteredGraph([root], rows, self.leaves)
            self.logits = rows.gather(self.logits.detach(), by_rows)

    def backward(self, edge: GradientEdge | None, gradient: torch.Tensor) -> None:
        """Runs the backward of logits, given their gradient. ``edge``: of their graph."""
        if self.filtered is None:
            torch.autograd.backward(edge, gradient)
        else:
            self._found = self.filtered.backward([gradient])

    def gradients(self) -> list[torch.Tensor | None]:
        """Returns the gradients of the hidden states, of kept rows alone if others are dropped."""
        return self._found or [leaf.grad for leaf in self.leaves]


@dataclass
class _Held:
    """A microbatch between its forward and its backward."""

    reads: int | None
    """The prefix that it follows."""
    scores: tuple[Score, ...]
    head: _Head | None = None
    values: list[Tensors] = field(default_factory=list)
    """With the graph of layers and head, if it does not run apart."""
    outputs: Tensors = ()
    """What is read of all rows beside logits, with the graph of the layers, if it does."""
    given: list[Values] = field(default_factory=list)
    """The gradients of each sequence's values."""
    roots: Pairs = field(default_factory=list)
    """Where the backward of the layers begins, with gradients."""
    filtered: FilteredMicrobatch | None = None
    """The graph of the layers without the rows of dropped tokens; None: all are kept."""

    def drop(self, dropped: Dropped) -> None:
        """Frees what the rows of dropped tokens saved."""
        if self.head is None:
            roots, layout = [each for values in self.values for each in values], None
        else:
            self.head.drop(dropped)
            roots, layout = [*self.head.hidden, *self.outputs], Layout(0)
        self.filtered = FilteredMicrobatch(dropped, roots, layout)

    def take(self, given: list[Values]) -> None:
        """Receives the gradients of each sequence's values."""
        self.given = given if self.filtered is None else self.filtered.dropped.masked(given)

    def end_values(self) -> None:
        """Begins the backward at the values."""
        values, self.values = self.values, []
        for own, given in zip(values, self.given, strict=True):
            self.roots += _pairs(own, (*given.of_logits, *given.of_rows))

    def end_head(self) -> None:
        """Begins the backward at the hidden states."""
        head, self.head = self.head, None
        self.roots += _pairs(head.hidden, head.gradients())

    def end_outputs(self) -> None:
        """Begins it at the outputs of rows too."""
        outputs, self.outputs = self.outputs, ()
        for number, output in enumerate(outputs):
            gradients = [each.of_rows[number] for each in self.given]
            # A loss reads an output of all rows of a batch, or of none.
            if gradients[0] is not None:
                self.roots += _pairs([output], [torch.cat(gradients)])


class HeldStep(Step):
    """Runs all forwards first: of the prefixes, then of the microbatches, whose graphs are kept.

    A prefix sleeps between its forward and its backward, as in every step, and microbatches may. If
    the model's head runs apart, the graphs of layers end at the hidden states.
    """


    sleeps_in: Runtime | None = None
    """Where kept rows of filtered microbatches sleep; None: they stay awake."""

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
        """Runs the forwards in the plan's order; yields the values of each sequence, of a tree in
        parts. ``head``: of the model, for a group; None: it does not run apart, and logits are
        held. ``rows``: take the gradients of embedded tokens. ``asleep``: lets what microbatches
        save sleep; None: it stays awake. ``holds_logits``: else the backward computes them
        again."""
        self._measure, self._head, self._rows, self._asleep = measure, head, rows, asleep
        self._held: list[_Held] = []
        # In the order of their backwards.
        self._prefixes: list[int] = []
        # Those of prefixes, by node, and the values of the one that ran last.
        self._labelled: dict[int, _Held] = {}
        self._found: list[tuple[Score, Values]] = []
        for op in self._plan:
            if op.kind is native.OpKind.PREFIX_FORWARD:
                with rows.apart(is_prefix=True):
                    self._prefix_forward(op)
                found, self._found = self._found, []
                yield from found
            elif op.kind is native.OpKind.MICROBATCH:
                self._enter("B")
                both = self._hold_whole(op) if head is None else self._hold(op, holds_logits)
                values, held = both
                if self.choose is not None:
                    self._drop(held, values)
                self._held.append(held)
                yield from zip(op.scores, values, strict=True)
            elif op.kind is native.OpKind.PREFIX_BACKWARD:
                self._prefixes.append(op.node)

    def _drop(self, held: _Held, values: Sequence[Values]) -> None:
        """Drops tokens of a microbatch."""
        both = zip(held.scores, values, strict=True)
        masks = [self.choose(score, own.of_logits[0].detach()) for score, own in both]
        dropped = Dropped(held.scores, masks)
        if dropped.is_all_kept and self.sleeps_in is None:
            self.filter_reports.append(dropped.report)
            return
        # If all is kept too: the graph sleeps in this way alone, because hooks of saved tensors
        # would have had to be there in the forward.
        held.drop(dropped)
        if self.sleeps_in is not None:
            held.filtered.sleep(self.sleeps_in)
        self.filter_reports.append(held.filtered.report)

    def _hold_whole(self, op: Op) -> tuple[list[Values], _Held]:
        with self._of_layers():
            output, kept = self._packed_output(op)
        return self._hold_values(op.reads, output, op.scores, kept, self._prompt_of(op.reads))

    def _hold_values(
        self,
        reads: int | None,
        output: Output,
        scores: Sequence[Score],
        kept: KeptRows,
        prompt: Output | None = None,
    ) -> tuple[list[Values], _Held]:
        values = []
        for part, score in zip(kept.parts(output, scores), scores, strict=True):
            labels = labels_of(self._batch, score)
            own = self._measure.differentiable_values(part.logits, labels)
            values.append(Values.of(own, part, prompt))
        held = [(*each.of_logits, *each.of_rows) for each in values]
        return values, _Held(reads, tuple(scores), values=held)

    def _read_labels(self, node, rows, scores, kept):
        output = replace(rows.output(), logits=rows.take_logits())
        values, self._labelled[node] = self._hold_values(None, output, scores, kept)
        self._found = list(zip(scores, values, strict=True))

    def _hold(self, op: Op, holds_logits: bool) -> tuple[list[Values], _Held]:
        with self._of_layers(), self._head.apart() as hidden:
            output, _ = self._packed_output(op)
        prompt = self._prompt_of(op.reads)
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in hidden]
        with torch.set_grad_enabled(holds_logits):
            logits = self._logits(leaves)
        parts = logits.detach().split([len(each.rows) for each in op.scores])
        values, norms = [], []
        for part, score in zip(parts, op.scores, strict=True):
            own, of_rows = self._measure.values(part, labels_of(self._batch, score))
            rows = output.without_logits().rows(score.rows.start, score.rows.stop)
            values.append(Values.of(own, rows, prompt))
            norms.append(of_rows)
        places = [(slice(x.rows.start, x.rows.stop), slice(None)) for x in op.scores]
        head = _Head(hidden, leaves, norms, logits if holds_logits else None, places)
        outputs = tensors_of(output.without_logits())
        return values, _Held(op.reads, op.scores, head, outputs=outputs)

    @contextlib.contextmanager
    def _of_layers(self) -> Iterator[None]:
        """Context of the forward of a microbatch's layers."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._rows.apart())
            if self._asleep is not None:
                stack.enter_context(self._asleep)
            if self.choose is not None:
                stack.enter_context(marked_layers(self._view.layers))
            yield

    def _logits(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """Returns logits as whole forwards compute them, a part each."""
        parts = list(map(self._head.logits, hidden))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def backward_of_heads(self, gradients_of: GradientsOf) -> None:
        """Runs the backwards of heads that run apart. They come first, so that no logits exist
        beside the gradients of layers. ``gradients_of(score)``: of its values."""
        while self._labelled:
            node, held = self._labelled.popitem()
            held.given = [gradients_of(score) for score in held.scores]
            held.end_values()
            with self._live[node].forward.rows.scoring():
                _backward(held.roots)
        for held in reversed(self._held):
            held.take([gradients_of(score) for score in held.scores])
            if held.head is None:
                # Their backward goes on into the layers.
                held.end_values()
                continue
            given = [each.of_logits for each in held.given]
            if any(gradient is not None for gradients in given for gradient in gradients):
                self._backward_of_head(held.head, held.scores, given)
            held.end_head()

    def _backward_of_head(self, head: _Head, scores: Sequence[Score], given: list[Tensors]) -> None:
        logits, head.logits = head.logits, None
        if logits is None:
            logits = self._logits(head.leaves)
        if not logits.requires_grad and head.filtered is None:
            return
        # Taken before the logits change: behind a view that has changed, autograd would copy the
        # gradient into zeros.
        edge = get_gradient_edge(logits) if logits.requires_grad else None
        # In the memory of the logits, if that may be overwritten. The change counts, so that an
        # operation that reads what it returned raises.
        gradient = logits.detach()
        if not graph.is_overwritable(logits):
            gradient = gradient.clone()
        each = zip(scores, head.places, head.norms, given, strict=True)
        for score, (rows, tokens), norms, gradients in each:
            labels = labels_of(self._batch, score)[tokens]
            gradients = [x if x is None else x[tokens] for x in gradients]
            self._measure.overwrite_with_gradient(gradient[rows], labels, norms, gradients)
        head.backward(edge, gradient)

    def backward(self) -> StepReport:
        """Runs the backwards of layers, the last microbatch's first, then those of the prefixes."""
        while self._held:
            failures.check()
            held = self._held.pop()
            for each in held.given:
                self._backward_of_prompt(held.reads, each.of_prompt)
            held.end_outputs()
            with self._accepting(held.reads):
                if held.filtered is None:
                    _backward(held.roots)
                else:
                    held.filtered.backward(held.roots)
        for node in self._prefixes:
            self._prefix_backward(node, is_last=False)
        return self._report

    def _backward_of_prompt(self, node: int | None, gradients: Tensors) -> None:
        """Adds gradients by what is read of the prompt to those that wait for phase C."""
        if gradients:
            _backward(_pairs(tensors_of(self._prompt_of(node)), gradients))


def _pairs(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Pairs:
    """Returns tensors with a graph, and their gradients if they have one."""
    both = zip(tensors, gradients, strict=True)
    return [(x, grad) for x, grad in both if x.requires_grad and grad is not None]


def _backward(pairs: Pairs) -> None:
    """Runs the backward of a graph that nothing else holds: what it saved is freed on the way."""
    if pairs:
        roots, seeds = map(list, zip(*pairs, strict=True))
        pairs.clear()
        torch.autograd.backward(roots, seeds)
