"""A backward on kept rows: autograd's graph, planned once, then run node by node.

The plan goes through the nodes in the order of the backward. Where the rule of an operation is
known, the tensors it saved lose their dropped rows, and the node itself runs on compact gradients:
its products become smaller. A node without a rule keeps its rows. It gets a gradient with zeros in
dropped rows, and what it returns stays whole down to the next tensor whose rows are known: a
layer's output, an attention's, one that has another gradient by rows. There dropped rows get no
gradient.

The nodes do not run in autograd's engine, which compares the sizes of gradients with those of the
forward. Hooks of tensors inside the graph are not called; those of leaves are.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...errors import StateError
from .. import graph
from . import attention, rules
from .rows import Layout, NotByRowsError, Rows
from .rules import Operation, Plan
from .saved import Saved

KNOWN = rules.KNOWN | attention.KNOWN

_ACCUMULATE = "torch::autograd::AccumulateGrad"


class Edge(NamedTuple):
    """An output of a node, which is a tensor of the forward."""

    node: torch.autograd.graph.Node
    number: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Edge:
        """Returns the edge of a tensor with a graph."""
        return cls(*torch.autograd.graph.get_gradient_edge(tensor)[:2])


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
        roots: Sequence[tuple[Edge, Layout | None]],
        rows: Rows,
        anchor_of: Callable[[Edge], Layout | None],
        taken: Sequence[torch.Tensor] = (),
    ):
        """``roots``: where the backward begins, with the layouts of their gradients.
        ``anchor_of``: returns the layout of a tensor inside the graph if its rows are known.
        ``taken``: leaves whose gradients :meth:`backward` returns."""
        self.rows = rows
        self._roots = roots
        self._kept_whole: Counter[str] = Counter()
        self._taken = [Edge.of(leaf) for leaf in taken]
        self._saved = Saved(rows)
        self._plans: list[_Planned] | None = []
        self._make(anchor_of)

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

    def _make(self, anchor_of: Callable[[Edge], Layout | None]) -> None:
        found: dict[Edge, list[Layout | None]] = {}
        for edge, layout in self._roots:
            found.setdefault(edge, []).append(layout)
        leaves = {edge.node for edge in self._taken}
        # Nodes below a tensor whose rows are known.
        inside = set()
        for node in _in_order([edge.node for edge, _ in self._roots]):
            own = attention.anchor(node, self.rows) if node in inside else None
            layouts = {
                number: anchor_of(edge) or own or self._common(found.pop(edge))
                for number in range(len(node._input_metadata))
                if (edge := Edge(node, number)) in found
            }
            if node.name() == _ACCUMULATE:
                plan = Plan([], lambda gradients: [])
                layouts = {0: layouts[0] if node in leaves else None}
            else:
                plan = self._plan_of(node, layouts)
            self._plans.append(_Planned(node, layouts, plan))
            if node in inside or any(layouts.values()):
                inside.update(target for target, _ in node.next_functions)
            for (target, number), layout in zip(node.next_functions, plan.inputs, strict=True):
                if target is not None:
                    found.setdefault(Edge(target, number), []).append(layout)
        self._compact = self._saved.seal()

    def _common(self, layouts: list[Layout | None]) -> Layout | None:
        """Returns the layout of a sum: a term by rows tells where these are in the others."""
        first, *others = {layout for layout in layouts if layout is not None} or {None}
        return first if all(self.rows.are_equal(first, each) for each in others) else None

    def _plan_of(self, node, layouts: dict[int, Layout | None]) -> Plan:
        inputs = [None] * len(node.next_functions)
        whole = Plan(inputs, lambda gradients: rules.call(node, gradients), is_whole=True)
        if all(layout is None for layout in layouts.values()):
            self._saved.hold(node)
            return whole
        outputs = [tuple(meta.shape) for meta in node._input_metadata]
        inputs = [
            None if target is None else tuple(target._input_metadata[number].shape)
            for target, number in node.next_functions
        ]
        rule = KNOWN.get(rules.kind_of(node))
        try:
            if rule is None:
                raise NotByRowsError("an unknown operation")
            plan = rule(Operation(node, outputs, inputs, layouts, self.rows, self._saved))
            self._saved.apply()
        except NotByRowsError:
            self._saved.forget()
            plan = whole
            for number in layouts:
                layouts[number] = None
        if plan.is_whole:
            self._kept_whole[node.name()] += 1
            self._saved.count_whole(node)
        return plan

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Adds gradients to the leaves; returns those of ``taken``, compact where their rows are
        known. ``gradients``: of the roots, compact where they have a layout."""
        if self._plans is None:
            raise StateError("a second backward of a filtered graph; accepted: one")
        plans, self._plans = self._plans, None
        self._compact.clear()
        buffers: dict[Edge, torch.Tensor] = {}
        places = {planned.node: planned for planned in plans}
        taken: dict[Edge, torch.Tensor] = {}
        with torch.no_grad():
            for (edge, layout), grad in zip(self._roots, gradients, strict=True):
                self._add(buffers, places, edge, layout, grad)
            for planned in plans:
                node, _, plan = planned
                edges = [Edge(node, number) for number in range(len(node._input_metadata))]
                own = [buffers.pop(edge, None) for edge in edges]
                if all(grad is None for grad in own):
                    continue
                if node.name() == _ACCUMULATE:
                    if edges[0] in self._taken:
                        taken[edges[0]] = own[0]
                    else:
                        _accumulate(node.variable, own.pop())
                    continue
                found = plan.run(own)
                del own
                self._saved.release(node)
                for (target, number), layout, grad in zip(
                    node.next_functions, plan.inputs, found, strict=True
                ):
                    if target is not None:
                        self._add(buffers, places, Edge(target, number), layout, grad)
        return [taken.get(edge) for edge in self._taken]

    def _add(self, buffers, places, edge: Edge, layout: Layout | None, grad) -> None:
        """Adds a gradient to that of a tensor, in the layout of that."""
        if grad is None:
            return
        meta = edge.node._input_metadata[edge.number]
        grad = _fitted(grad, self.rows.sizes(meta.shape, layout), meta.dtype)
        wanted = places[edge.node].layouts[edge.number]
        if not self.rows.are_equal(layout, wanted):
            if layout is not None:
                grad = self.rows.scatter(grad, layout, meta.shape)
            if wanted is not None:
                grad = self.rows.gather(grad, wanted)
        before = buffers.get(edge)
        if before is None:
            buffers[edge] = grad
        elif _is_own(before):
            before.add_(grad)
        else:
            buffers[edge] = before + grad


def _fitted(grad: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a gradient as autograd's engine hands it on: summed over what was broadcast."""
    if tuple(grad.shape) != tuple(sizes):
        grad = grad.sum_to_size(sizes)
    return grad if grad.dtype is dtype else grad.to(dtype)


def _accumulate(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds to the gradient of a leaf, with its hooks."""
    is_plain = not leaf._backward_hooks and not getattr(leaf, "_post_accumulate_grad_hooks", None)
    if is_plain and type(leaf.grad) is torch.Tensor and leaf.grad.layout is torch.strided:
        leaf.grad.add_(grad)
    elif is_plain and leaf.grad is None and _is_own(grad) and grad.stride() == leaf.stride():
        leaf.grad = grad.detach()
    else:
        torch.autograd.backward([leaf], [grad])


def _is_own(grad: torch.Tensor) -> bool:
    """Returns whether nothing else holds the memory of a gradient."""
    storage = grad.untyped_storage()
    # Python's object of the storage holds it too, and the tensor that the gradient is a view of.
    return torch._C._storage_Use_Count(storage._cdata) == 2 + (grad._base is not None)


def nodes_below(roots: Sequence) -> set:
    """Returns the nodes of a graph."""
    seen, todo = set(roots), list(roots)
    while todo:
        for target, _ in todo.pop().next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


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
