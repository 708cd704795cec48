"""Notes in the graph of a forward: where the rows of a tensor are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..support import UnsupportedModelError
from .rows import Layout, Rows

# The key of marks in the metadata of a graph's node. Marks live as long as the graph.
_KEY = "dormouse.rows"

# The node of a part of a forward that ran without a graph.
_REENTRANT = "CheckpointFunctionBackward"

HIDDEN = Layout(1, 0)
"""Of what layers read and return, ``[sequences, columns, width]``."""


class GraphEdge(NamedTuple):
    """An output of a node, which is a tensor of the forward."""

    node: torch.autograd.graph.Node
    number: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> GraphEdge:
        """Returns the edge of a tensor with a graph."""
        return cls(*torch.autograd.graph.get_gradient_edge(tensor)[:2])

    def below(self) -> Iterator[GraphEdge]:
        """Yields the tensors that its operation read."""
        for node, number in self.node.next_functions:
            if node is not None:
                yield GraphEdge(node, number)


class Mark(NamedTuple):
    """Where the rows of a tensor of a forward are."""

    forward: tuple[int, ...]
    """Number of the forward, sequences, columns."""
    layout: Layout | None
    """None: its rows are others."""
    is_end: bool
    """Whether losses read it."""
    began: int = 0
    """The number of the first operation of the forward's layers; 0: others tell."""


def mark_rows(tensor: torch.Tensor, mark: Mark) -> None:
    """Notes where the rows of a tensor are, in its graph."""
    if tensor.grad_fn is not None:
        edge = GraphEdge.of(tensor)
        edge.node.metadata.setdefault(_KEY, {})[edge.number] = mark


def mark_of(edge: GraphEdge) -> Mark | None:
    """Returns what is noted of a tensor."""
    return edge.node.metadata.get(_KEY, {}).get(edge.number)


def sources_of(edge: GraphEdge, rows: Rows, began: int) -> set[GraphEdge | None]:
    """Returns the nearest tensors with known rows from which a tensor was computed; None among them
    if another one took part that is as large and older than operation ``began``. Weights may be
    older too, as those that autocast has converted."""
    found, seen, todo = set(), set(), [edge]
    while todo:
        edge = todo.pop()
        mark = mark_of(edge)
        if mark is not None and mark.layout is not None:
            found.add(edge)
        elif edge.node._sequence_nr() < began:
            sizes = edge.node._input_metadata[edge.number].shape
            if len(sizes) > 2 and sizes[0] == rows.sequences and rows.columns in sizes[1:]:
                found.add(None)
        elif edge.node not in seen:
            seen.add(edge.node)
            todo += edge.below()
    return found


def nodes_below(roots) -> set:
    """Returns the nodes of a graph."""
    seen, todo = set(roots), list(roots)
    while todo:
        for target, _ in todo.pop().next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def check_inside(nodes) -> None:
    """Raises :class:`UnsupportedModelError` if one of the nodes of a forward stands for a part of
    it: dropped rows may have other rows' gradients there."""
    if any(node.name() == _REENTRANT for node in nodes):
        raise UnsupportedModelError(
            "checkpointing with use_reentrant=True; accepted: use_reentrant=False, whose layers "
            "have a graph before the backward"
        )
