"""A backward on kept rows: autograd's graph, planned once, then run node by node.

The plan goes through the nodes in the order of the backward. Where the rule of an operation is
known, the tensors it saved lose their dropped rows, and the node itself runs on compact gradients:
its products become smaller. A node without a rule keeps its rows. It gets a gradient with zeros in
dropped rows, and what it returns stays whole down to the next tensor whose rows are known: a
layer's input or output, an attention's output, one that has another gradient by rows. There dropped
rows get no gradient.

The nodes do not run in autograd's engine, which compares the sizes of gradients with those of the
forward. Hooks of tensors inside the graph are not called. Leaves get their gradients from the
engine: all their hooks run, also those that no code in Python can see.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...errors import StateError
from . import attention, rules
from .marks import GraphEdge, mark_of, nodes_below
from .rows import Layout, NotByRowsError, Rows
from .rules import Operation, Plan
from .saved import Saved

KNOWN = rules.KNOWN | attention.KNOWN

_ACCUMULATE = "torch::autograd::AccumulateGrad"


@dataclass
class FilterReport:
    """What one filtered backward did."""

    rows: int = 0
    kept_rows: int = 0
    saved_bytes: int = 0
    """Bytes of saved activations that had a place for every row."""
    kept_bytes: int = 0
    """The same after dropped rows were freed."""
    asleep_bytes: int = 0
    """Bytes of these that slept until the backward."""
    kept_whole: dict[str, int] = field(default_factory=dict)
    """Operations that joined rows, or are not known, by name: they ran with all rows."""


class _Planned(NamedTuple):
    node: torch.autograd.graph.Node
    layouts: dict[int, Layout | None]
    plan: Plan


class FilteredGraph:
    """The graph of tensors, with fewer rows. One backward. Not thread-safe."""

    def __init__(
        self,
        roots: Sequence[tuple[GraphEdge, Layout | None]],
        rows: Rows,
        taken: Sequence[torch.Tensor] = (),
    ):
        """``roots``: where the backward begins, with the layouts of their gradients.
        ``taken``: leaves whose gradients :meth:`backward` returns."""
        self.rows = rows
        self._roots = roots
        self._kept_whole: Counter[str] = Counter()
        self._taken = [GraphEdge.of(leaf) for leaf in taken]
        self._saved = Saved(rows)
        self._plans: list[_Planned] | None = []
        # The number of the first operation of the layers.
        self._began = 0
        self._make()

    @property
    def report(self) -> FilterReport:
        """What was dropped."""
        sizes = (sum(each.values()) for each in (self._saved.before, self._saved.after))
        whole = dict(self._kept_whole)
        return FilterReport(self.rows.total, self.rows.count, *sizes, kept_whole=whole)

    def take_compact(self) -> list[torch.Tensor]:
        """Returns the compact tensors that nodes saved, once. Each lives as long as a node needs
        it."""
        compact, self._compact = self._compact, []
        return compact

    def _make(self) -> None:
        found: dict[GraphEdge, list[Layout | None]] = {}
        for edge, layout in self._roots:
            found.setdefault(edge, []).append(layout)
        leaves = {edge.node for edge in self._taken}
        # Nodes below a tensor whose rows are known.
        inside = set()
        for node in _in_order([edge.node for edge, _ in self._roots]):
            is_below = node in inside
            own = attention.anchor(node, self.rows, self._began) if is_below else None
            layouts = {
                number: self._anchor(edge) or own or self._common(found.pop(edge))
                for number in range(len(node._input_metadata))
                if (edge := GraphEdge(node, number)) in found
            }
            if node.name() == _ACCUMULATE:
                plan = Plan([], lambda gradients: [])
                layouts = {0: layouts[0] if node in leaves else None}
            else:
                plan = self._plan_of(node, layouts)
            self._plans.append(_Planned(node, layouts, plan))
            if is_below or any(layouts.values()):
                inside.update(target for target, _ in node.next_functions)
            for (target, number), layout in zip(node.next_functions, plan.inputs, strict=True):
                if target is not None:
                    found.setdefault(GraphEdge(target, number), []).append(layout)
        self._compact = self._saved.seal()

    def _anchor(self, edge: GraphEdge) -> Layout | None:
        """Returns the layout of a tensor whose rows are known."""
        mark = mark_of(edge)
        if mark is None:
            return None
        self._began = max(self._began, mark.began)
        return mark.layout

    def _common(self, layouts: list[Layout | None]) -> Layout | None:
        """Returns the layout of a sum: a term by rows tells where these are in the others."""
        first, *others = {layout for layout in layouts if layout is not None} or {None}
        return first if all(self.rows.are_equal(first, each) for each in others) else None

    def _plan_of(self, node, layouts: dict[int, Layout | None]) -> Plan:
        outputs = [tuple(meta.shape) for meta in node._input_metadata]
        whole = self._with_all_rows(node, outputs, layouts)
        if all(layout is None for layout in layouts.values()):
            self._saved.hold(node)
            return whole
        inputs = [
            None if target is None else tuple(target._input_metadata[number].shape)
            for target, number in node.next_functions
        ]
        rule = KNOWN.get(rules.kind_of(node))
        try:
            if rule is None:
                raise NotByRowsError("an unknown operation")
            own = layouts, self.rows, self._saved, self._began
            plan = rule(Operation(node, outputs, inputs, *own))
            self._saved.apply()
        except NotByRowsError:
            self._saved.forget()
            plan = whole
        if plan.is_whole:
            self._kept_whole[node.name()] += 1
            self._saved.count_whole(node)
        return plan

    def _with_all_rows(self, node, outputs, layouts: dict[int, Layout | None]) -> Plan:
        """Runs a node with zeros in dropped rows. ``outputs``: their sizes."""

        def run(gradients):
            whole = [
                grad
                if grad is None or (layout := layouts.get(number)) is None
                else self.rows.scatter(grad, layout, outputs[number])
                for number, grad in enumerate(gradients)
            ]
            return rules.call(node, whole)

        return Plan([None] * len(node.next_functions), run, is_whole=True)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Adds gradients to the leaves; returns those of ``taken``, compact where their rows are
        known. ``gradients``: of the roots, compact where they have a layout."""
        if self._plans is None:
            raise StateError("a second backward of a filtered graph; accepted: one")
        plans, self._plans = self._plans, None
        self._compact.clear()
        sums = _Sums(self.rows, {planned.node: planned.layouts for planned in plans})
        taken: dict[GraphEdge, torch.Tensor] = {}
        with torch.no_grad():
            for (edge, layout), grad in zip(self._roots, gradients, strict=True):
                sums.add(edge, layout, grad)
            for node, _, plan in plans:
                own = sums.take(node)
                if all(grad is None for grad in own):
                    continue
                if node.name() != _ACCUMULATE:
                    sums.add_all(node, plan.inputs, plan.run(own))
                    self._saved.release(node)
                elif (edge := GraphEdge(node, 0)) in self._taken:
                    taken[edge] = own[0]
                else:
                    _accumulate(node.variable, own)
        return [taken.get(edge) for edge in self._taken]


class _Sums:
    """Gradients of the tensors of a graph, added up until their nodes run."""

    def __init__(self, rows: Rows, layouts: dict):
        """``layouts``: of the gradients of each node's outputs, by number."""
        self._rows, self._layouts = rows, layouts
        self._found: dict[GraphEdge, torch.Tensor] = {}
        # Sums in memory that was allocated here. Any other gradient may be that of several tensors,
        # as what an addition returns, or have one value for several elements.
        self._own: set[GraphEdge] = set()

    def take(self, node) -> list[torch.Tensor | None]:
        """Returns the gradients of a node's outputs, once."""
        edges = [GraphEdge(node, number) for number in range(len(node._input_metadata))]
        self._own.difference_update(edges)
        return [self._found.pop(edge, None) for edge in edges]

    def add_all(self, node, layouts: Sequence[Layout | None], gradients) -> None:
        """Adds the gradients of a node's inputs."""
        for target, layout, grad in zip(node.next_functions, layouts, gradients, strict=True):
            if target[0] is not None:
                self.add(GraphEdge(*target), layout, grad)

    def add(self, edge: GraphEdge, layout: Layout | None, grad: torch.Tensor | None) -> None:
        """Adds a gradient to that of a tensor, in the layout of that."""
        if grad is None:
            return
        meta = edge.node._input_metadata[edge.number]
        grad = _fitted(grad, self._rows.sizes(meta.shape, layout), meta.dtype)
        wanted = self._layouts[edge.node][edge.number]
        if not self._rows.are_equal(layout, wanted):
            if layout is not None:
                grad = self._rows.scatter(grad, layout, meta.shape)
            if wanted is not None:
                grad = self._rows.gather(grad, wanted)
        before = self._found.get(edge)
        if before is None:
            self._found[edge] = grad
        elif edge in self._own:
            before.add_(grad)
        else:
            self._found[edge] = before + grad
            self._own.add(edge)


def _fitted(grad: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a gradient as autograd's engine hands it on: summed over what was broadcast."""
    if tuple(grad.shape) != tuple(sizes):
        grad = grad.sum_to_size(sizes)
    return grad if grad.dtype is dtype else grad.to(dtype)


def _accumulate(leaf: torch.Tensor, grad: list[torch.Tensor]) -> None:
    """Takes the gradient from the list and adds it to that of a leaf."""
    with torch.enable_grad():
        handed = _Handed.apply(leaf, grad)
    handed.backward()


class _Handed(torch.autograd.Function):
    """Hands a gradient to the engine. Nothing else holds it then, so that it becomes the leaf's
    without a copy."""

    @staticmethod
    def forward(ctx, leaf, grad: list[torch.Tensor]):
        ctx.grad = grad
        # There, so that the engine orders the streams of a GPU.
        return leaf.new_empty(())

    @staticmethod
    def backward(ctx, _):
        return ctx.grad.pop(), None


def _in_order(roots: Sequence) -> Iterator:
    """Yields the nodes of a graph, each after all that depend on it, the latest of the forward
    first, as autograd runs them."""
    nodes = nodes_below(roots)
    waiting = Counter(target for node in nodes for target, _ in node.next_functions)
    numbers = itertools.count()

    def entry(node):
        return -node._sequence_nr(), next(numbers), node

    ready = [entry(node) for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    while ready:
        *_, node = heapq.heappop(ready)
        yield node
        for target, _ in node.next_functions:
            waiting[target] -= 1
            if target is not None and not waiting[target]:
                heapq.heappush(ready, entry(target))
