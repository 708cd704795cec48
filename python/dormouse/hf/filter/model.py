"""Token filtering of a dense run: :func:`token_filter`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ...activations.layers import check_layers, find_layers
from ...errors import ArgumentError, StateError
from .. import deepspeed_engine, tensor_parallel
from ..support import UnsupportedModelError
from .choice import check_mask
from .graph import FilteredGraph, FilterReport
from .marks import HIDDEN, GraphEdge, Mark, check_inside, mark_of, mark_rows, nodes_below
from .rows import Rows

# Forwards of all contexts have different numbers.
_numbers = itertools.count()


class TokenFilter:
    """Runs the backward of losses of a model's outputs on some rows. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        """Numbers of forwards before their backward."""

    def backward(self, loss: torch.Tensor, keep: torch.Tensor) -> FilterReport:
        """Adds the gradients of a loss to its leaves, as ``loss.backward()`` would if gradients
        were zero in dropped rows of every layer. The forward's graph is used up: there is one
        backward of each forward, of the sum of its losses.

        ``loss``: a scalar of the outputs of one forward of the model, run in this context.
        ``keep``: bool ``[sequences, columns]``, True for each row of the model's input whose
        backward runs: every row of a prompt, and the rows of a response that predict kept tokens.
        The gradient of the loss at a dropped row is ignored.

        Raises, before any gradient changes, :class:`dormouse.ArgumentError` for a mask of another
        shape or dtype, and for a loss of no forward in this context or of several;
        :class:`dormouse.StateError` for a second backward of a forward;
        :class:`UnsupportedModelError` for checkpointing with ``use_reentrant=True``.
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
        number, *sizes = forwards.pop()
        check_mask("keep", keep, sizes)
        if number not in self._waiting:
            raise StateError(
                "a forward that has had its backward, or ran in another context; accepted: one "
                "backward of each forward, of the sum of its losses"
            )
        self._waiting.remove(number)
        if bool(keep.all()):
            loss.backward()
            return FilterReport(keep.numel(), keep.numel())
        rows = Rows(keep.to(loss.device))
        return _in_engine(lambda: backward_of(loss, rows))


def backward_of(loss: torch.Tensor, rows: Rows) -> FilterReport:
    """Runs the backward of a loss of the marked outputs of one forward, whose rows ``rows``
    counts."""
    graph = FilteredGraph([(GraphEdge.of(loss), None)], rows)
    graph.backward([torch.ones_like(loss)])
    return graph.report


def _in_engine(run: Callable[[], FilterReport]) -> FilterReport:
    """Returns what a function returns that runs in a backward of autograd's engine. There a
    checkpointed layer is computed again once, for all that read it, and nodes of
    DistributedDataParallel can ask to be called at the end."""
    found: list[FilterReport] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True, device="cpu")
        _Run.apply(start, lambda: found.append(run())).backward()
    return found.pop()


class _Run(torch.autograd.Function):
    """Its backward is a function's call."""

    @staticmethod
    def forward(ctx, start, run: Callable[[], None]):
        ctx.run = run
        return start.detach()

    @staticmethod
    def backward(ctx, _):
        ctx.run()
        return None, None


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

    ``model``: one that reads one sequence per row, and whose layers return ``[sequences, columns,
    width]``. ``layers``: these, side by side; None: its longest ModuleList or Sequential. Forward
    and loss do not change.

    Raises :class:`UnsupportedModelError` for a model with an encoder or with cross-attention, and
    for one that is split over ranks; its forward does for layers that return other tensors.
    """
    _check_one_sequence(model)
    if _is_split(model):
        raise UnsupportedModelError(
            "token_filter of a model that is split over ranks, or in DeepSpeed's engine; accepted: a "
            "model that is whole on each rank, also in DistributedDataParallel"
        )
    found = find_layers(model) if layers is None else check_layers(model, layers)
    own = TokenFilter()
    with contextlib.ExitStack() as stack:
        marks = stack.enter_context(marked_layers(found))

        def begin(module, args) -> None:
            marks.begin(next(_numbers))

        def end(module, args, output) -> None:
            if not torch.is_grad_enabled():
                return
            if marks.refused is not None:
                raise UnsupportedModelError(marks.refused)
            if marks.forward is None:
                return
            own._waiting.add(marks.forward[0])
            for tensor in _tensors(output):
                # Weights of attention have four dimensions, and perhaps as many heads as columns.
                has_rows = tensor.dim() <= 3 and tensor.shape[:2] == marks.forward[1:]
                layout = HIDDEN if has_rows else None
                mark_rows(tensor, Mark(marks.forward, layout, is_end=True))

        stack.callback(model.register_forward_pre_hook(begin).remove)
        stack.callback(model.register_forward_hook(end).remove)
        yield own


def _is_split(model: torch.nn.Module) -> bool:
    """Returns whether more than the hooks of parameters has to run in the backward: those of
    modules, or an engine's own."""
    if tensor_parallel.has_parts(model) or deepspeed_engine.is_engine(model):
        return True
    # As FullyShardedDataParallel and ZeRO's third stage mark what they hold parts of.
    return any(
        hasattr(parameter, mark)
        for parameter in model.parameters()
        for mark in ("_is_flat_param", "ds_id")
    )


def _check_one_sequence(model: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` for a model that says of itself that its attention
    reads another sequence, whose rows the mask would be taken to count."""
    for module in model.modules():
        config = getattr(module, "config", None)
        for name in ("is_encoder_decoder", "add_cross_attention"):
            if getattr(config, name, False):
                raise UnsupportedModelError(
                    f"{type(module).__name__} reads another sequence (config.{name} is True); "
                    "accepted: models of one sequence per row"
                )
        if isinstance(module, (torch.nn.Transformer, torch.nn.TransformerDecoderLayer)):
            raise UnsupportedModelError(
                f"{type(module).__name__} reads another sequence; accepted: models of one sequence "
                "per row"
            )


class _LayerMarks:
    """Marks what layers read and return."""

    def __init__(self) -> None:
        self.forward: tuple[int, ...] | None = None
        """Number of the forward, sequences, columns; None before its first layer."""
        self.refused: str | None = None
        """Why rows of the forward cannot be dropped."""
        self._number = self._began = 0

    def begin(self, number: int) -> None:
        """Called before a forward."""
        self._number, self.forward, self.refused = number, None, None

    def begin_layer(self, module, args, arguments) -> None:
        hidden = args[0] if args else arguments.get("hidden_states")
        if self.forward is None:
            self._began = torch._C._autograd._get_sequence_nr()
        if isinstance(hidden, torch.Tensor):
            self._mark(hidden)

    def end_layer(self, module, args, output) -> None:
        hidden = next(_tensors(output), None)
        if hidden is None or not self._mark(hidden):
            kind = type(output).__name__ if hidden is None else list(hidden.shape)
            self.refused = (
                f"a {type(module).__name__} returns {kind}; accepted: layers that return "
                "[sequences, columns, width], all of one forward with as many of the first two"
            )

    def _mark(self, hidden: torch.Tensor) -> bool:
        """Returns whether the tensor has the rows of the forward."""
        if hidden.dim() != 3:
            return False
        if self.forward is None:
            self.forward = (self._number, *hidden.shape[:2])
        has_rows = self.forward[1:] == hidden.shape[:2]
        if has_rows:
            mark_rows(hidden, Mark(self.forward, HIDDEN, False, self._began))
        return has_rows


@contextlib.contextmanager
def marked_layers(layers: Sequence[torch.nn.Module]) -> Iterator[_LayerMarks]:
    """Context in which the tensors that layers read and return are marked."""
    marks = _LayerMarks()
    with contextlib.ExitStack() as stack:
        for layer in layers:
            before = layer.register_forward_pre_hook(marks.begin_layer, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(layer.register_forward_hook(marks.end_layer).remove)
        yield marks


def _ends_of(loss: torch.Tensor) -> dict[GraphEdge, Mark]:
    """Returns the outputs of forwards that a loss reads.

    Raises :class:`ArgumentError` if it reads the inside of a forward too, and
    :class:`UnsupportedModelError` if a part of a forward has no graph.
    """
    ends: dict[GraphEdge, Mark] = {}
    nodes, todo = set(), [GraphEdge.of(loss)]
    while todo:
        edge = todo.pop()
        mark = mark_of(edge)
        if mark is not None and mark.is_end:
            ends[edge] = mark
        elif edge.node not in nodes:
            nodes.add(edge.node)
            todo += edge.below()
    inside = nodes_below([edge.node for edge in ends])
    if any(not hasattr(node, "variable") for node in nodes & inside):
        raise ArgumentError(
            "the loss reads tensors inside the model beside its outputs; accepted: outputs alone"
        )
    check_inside(inside)
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
