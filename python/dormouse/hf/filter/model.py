"""Token filtering of a dense run: :func:`token_filter`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ...activations.layers import check_layers, find_layers
from ...errors import ArgumentError
from .choice import check_mask
from .graph import Edge, FilteredGraph, FilterReport, nodes_below
from .rows import Layout, Rows

# The key of marks in the metadata of a graph's node. Marks live as long as the graph.
_KEY = "dormouse.rows"

HIDDEN = Layout(1, 0)
"""Of what layers return, ``[sequences, columns, width]``."""


class Mark(NamedTuple):
    """Where the rows of a tensor of a forward are."""

    forward: tuple[int, ...]
    """Number of the forward, sequences, columns."""
    layout: Layout | None
    """None: its rows are others."""
    is_end: bool
    """Whether losses read it."""


class TokenFilter:
    """Runs the backward of losses of a model's outputs on some rows. Not thread-safe."""

    def __init__(self) -> None:
        self._forwards = 0

    def backward(self, loss: torch.Tensor, keep: torch.Tensor) -> FilterReport:
        """Adds the gradients of a loss to its leaves, as ``loss.backward()`` would if gradients
        were zero in dropped rows of every layer.

        ``loss``: a scalar of the outputs of one forward of the model, run in this context.
        ``keep``: bool ``[sequences, columns]``, True for each row of the model's input whose
        backward runs: every row of a prompt, and the rows of a response that predict kept tokens.
        What the loss says of a dropped row does not count.

        Raises :class:`dormouse.ArgumentError` for a mask of another shape or dtype, and for a loss
        of no forward in this context or of several.
        """
        if loss.dim() or loss.grad_fn is None:
            raise ArgumentError(
                f"a loss of shape {list(loss.shape)}, with grad_fn {loss.grad_fn}; accepted: a "
                "scalar with a graph"
            )
        forwards = {mark.forward for mark in _ends_of(loss).values()}
        if len(forwards) != 1:
            raise ArgumentError(
                f"a loss of the outputs of {len(forwards)} forwards in this context; accepted: one"
            )
        _, *sizes = forwards.pop()
        check_mask("keep", keep, sizes)
        if bool(keep.all()):
            loss.backward()
            return FilterReport(keep.numel(), keep.numel())
        return backward_of(loss, Rows(keep.to(loss.device)))


def backward_of(loss: torch.Tensor, rows: Rows) -> FilterReport:
    """Runs the backward of a loss of the marked outputs of one forward, whose rows ``rows``
    counts."""
    graph = FilteredGraph([(Edge.of(loss), None)], rows, anchor_of)
    graph.backward([torch.ones_like(loss)])
    return graph.report


@contextlib.contextmanager
def token_filter(
    model: torch.nn.Module, layers: list[torch.nn.Module] | None = None
) -> Iterator[TokenFilter]:
    """Context in which forwards of a model note where the rows of their tensors are, so that the
    backward can run on some of them.

    ::

        with dormouse.hf.token_filter(model) as tokens:
            loss = loss_fn(model(input_ids=ids).logits)
            tokens.backward(loss, keep)

    ``model``: any model whose layers return ``[sequences, columns, width]``. ``layers``: these,
    side by side; None: its longest ModuleList or Sequential. Forward and loss do not change.
    """
    found = find_layers(model) if layers is None else check_layers(model, layers)
    own = TokenFilter()
    with contextlib.ExitStack() as stack:
        marks = stack.enter_context(marked_layers(found))

        def begin(module, args) -> None:
            own._forwards += 1
            marks.begin(own._forwards)

        def end(module, args, output) -> None:
            for tensor in _tensors(output) if marks.forward else ():
                has_rows = tensor.shape[:2] == marks.forward[1:]
                layout = HIDDEN if has_rows else None
                mark_rows(tensor, Mark(marks.forward, layout, is_end=True))

        stack.callback(model.register_forward_pre_hook(begin).remove)
        stack.callback(model.register_forward_hook(end).remove)
        yield own


class _LayerMarks:
    """Marks what layers return."""

    def __init__(self) -> None:
        self.forward: tuple[int, ...] | None = None
        """Number of the forward, sequences, columns; None before its first layer."""
        self._number = 0

    def begin(self, number: int) -> None:
        """Called before a forward."""
        self._number, self.forward = number, None

    def end_layer(self, module, args, output) -> None:
        hidden = next(_tensors(output), None)
        if hidden is None or hidden.dim() != 3:
            return
        if self.forward is None:
            self.forward = (self._number, *hidden.shape[:2])
        if self.forward[1:] == hidden.shape[:2]:
            mark_rows(hidden, Mark(self.forward, HIDDEN, is_end=False))


@contextlib.contextmanager
def marked_layers(layers: Sequence[torch.nn.Module]) -> Iterator[_LayerMarks]:
    """Context in which the tensors that layers return are marked."""
    marks = _LayerMarks()
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(marks.end_layer).remove)
        yield marks


def mark_rows(tensor: torch.Tensor, mark: Mark) -> None:
    """Notes where the rows of a tensor are, in its graph."""
    if tensor.grad_fn is not None:
        edge = Edge.of(tensor)
        edge.node.metadata.setdefault(_KEY, {})[edge.number] = mark


def _marks(node) -> dict[int, Mark]:
    return node.metadata.get(_KEY, {})


def anchor_of(edge: Edge) -> Layout | None:
    """Returns the layout of a tensor whose rows are known."""
    mark = _marks(edge.node).get(edge.number)
    return None if mark is None else mark.layout


def _ends_of(loss: torch.Tensor) -> dict[Edge, Mark]:
    """Returns the outputs of forwards that a loss reads.

    Raises :class:`ArgumentError` if it reads the inside of a forward too.
    """
    ends: dict[Edge, Mark] = {}
    nodes, todo = set(), [Edge.of(loss)]
    while todo:
        edge = todo.pop()
        mark = _marks(edge.node).get(edge.number)
        if mark is not None and mark.is_end:
            ends[edge] = mark
        elif edge.node not in nodes:
            nodes.add(edge.node)
            todo += [Edge(*each) for each in edge.node.next_functions if each[0] is not None]
    inside = nodes_below([edge.node for edge in ends])
    if any(not hasattr(node, "variable") for node in nodes & inside):
        raise ArgumentError(
            "the loss reads tensors inside the model beside its outputs; accepted: outputs alone"
        )
    return ends


def _tensors(output) -> Iterator[torch.Tensor]:
    """Yields the tensors of a module's output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)
