"""Token filtering of a microbatch of a shared step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from ...runtime import Runtime, Tag
from ...schedule import Score
from .. import mixers, tensor_parallel
from ..outputs import Output
from ..score_values import Tensors, Values
from ..support import ModelView, UnsupportedModelError, Way
from .graph import FilteredGraph, FilterReport
from .marks import GraphEdge, Mark, check_inside, mark_rows, nodes_below
from .model import backward_of
from .rows import Layout, Rows

# Smaller tensors stay awake.
ASLEEP_BYTES_MIN = 1 << 20

# Tags in use have different names.
_numbers = itertools.count()

Choose = Callable[[Score, torch.Tensor], torch.Tensor]
"""Receives the place of a response in a microbatch and the log-probabilities of its tokens; returns
which tokens it keeps, bool ``[len(S_i)]``."""


class Dropped:
    """The tokens of a microbatch that take no backward."""

    def __init__(self, scores: Sequence[Score], masks: Sequence[torch.Tensor]):
        """``scores``: of all rows of the microbatch. ``masks``: the kept tokens of each response,
        bool ``[len(S_i)]``."""
        self._scores, self._masks = scores, masks
        keep = torch.ones(scores[-1].rows.stop, dtype=torch.bool, device=masks[0].device)
        for score, mask in zip(scores, masks, strict=True):
            keep[score.rows.start : score.rows.stop] = mask
            # A response begins with the prompt's last token, whose row is kept with the prompt's.
            keep[score.rows.start] = mask.any()
        self.rows = Rows(keep.unsqueeze(0))
        self._keep = keep

    @property
    def is_all_kept(self) -> bool:
        """Whether nothing is dropped."""
        return all(bool(mask.all()) for mask in self._masks)

    @property
    def report(self) -> FilterReport:
        """Of a microbatch that frees nothing."""
        return FilterReport(self.rows.total, self.rows.count)

    def masked(self, given: Sequence[Values]) -> list[Values]:
        """Returns the gradients of each response's values without those of dropped tokens."""
        return [masked(each, mask) for each, mask in zip(given, self._masks, strict=True)]

    def places(self) -> list[tuple[slice, torch.Tensor]]:
        """Returns of each response its place among the kept rows, and which of its rows these
        are."""
        found, start = [], 0
        for score in self._scores:
            own = self._keep[score.rows.start : score.rows.stop].nonzero().flatten()
            found.append((slice(start, start + len(own)), own))
            start += len(own)
        return found


def masked(values: Values, mask: torch.Tensor) -> Values:
    """Returns gradients of a response's values, zero where ``mask`` is, also where they are not
    finite."""

    def zeroed(given: Tensors) -> Tensors:
        return tuple(
            each if each is None else each.masked_fill(~mask.view(-1, *[1] * (each.dim() - 1)), 0)
            for each in given
        )

    return values._replace(of_logits=zeroed(values.of_logits), of_rows=zeroed(values.of_rows))


class FilteredMicrobatch:
    """The graph of a microbatch's layers, without the rows of dropped tokens."""

    def __init__(
        self, dropped: Dropped, roots: Sequence[torch.Tensor], layout: Layout | None
    ):
        """``roots``: where the backward begins. ``layout``: of these; None: not by rows.

        Raises :class:`UnsupportedModelError` for layers that have no graph of their own.
        """
        self.dropped = dropped
        self._roots = [root for root in roots if root.requires_grad]
        self._layout = layout
        edges = [(GraphEdge.of(root), layout) for root in self._roots]
        check_inside(nodes_below([edge.node for edge, _ in edges]))
        self._graph = FilteredGraph(edges, dropped.rows)
        self._tag: Tag | None = None
        self.report = self._graph.report
        """What was dropped."""

    def sleep(self, runtime: Runtime) -> None:
        """Puts what kept rows saved to sleep until the backward."""
        tier = "nvme" if "nvme" in runtime.info()["tiers"] else "host"
        self._tag = runtime.tag(f"filtered microbatch {next(_numbers)}")
        tagged_bytes = 0
        for tensor in self._graph.take_compact():
            if tensor.untyped_storage().nbytes() >= ASLEEP_BYTES_MIN:
                self._tag.add(tensor)
                tagged_bytes += tensor.untyped_storage().nbytes()
        if self._tag.sleep(tier) is None:
            self.report.asleep_bytes = tagged_bytes

    def backward(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """``pairs``: roots with gradients, whole or compact."""
        if self._tag is not None:
            self._tag.wake()
            self._tag.close()
        found = {id(root): grad for root, grad in pairs}
        rows, gradients = self.dropped.rows, []
        for root in self._roots:
            grad = found.get(id(root))
            if grad is not None and self._layout is not None and len(grad) == rows.total:
                grad = rows.gather(grad, self._layout)
            gradients.append(grad)
        self._graph.backward(gradients)


class FilteredLoss:
    """The backward of the losses of a microbatch, without the rows of dropped tokens."""

    def __init__(self, total: torch.Tensor, output: Output, dropped: Dropped):
        """``total``: the losses, of the ``output`` of :func:`.marked_layers`'s context.

        Raises :class:`UnsupportedModelError` for layers that have no graph of their own.
        """
        self._total, self._rows = total, dropped.rows
        forward = (0, *(self._rows.sequences, self._rows.columns))
        roots = [tensor for _, tensor in output.tensors() if tensor.requires_grad]
        check_inside(nodes_below([GraphEdge.of(each).node for each in roots]))
        for _, tensor in output.tensors():
            layout = Layout(0) if len(tensor) == self._rows.total else None
            mark_rows(tensor, Mark(forward, layout, is_end=True))

    def backward(self) -> FilterReport:
        """Runs it once."""
        total, self._total = self._total, None
        return backward_of(total, self._rows)


def check_filtered(model: torch.nn.Module, view: ModelView) -> None:
    """Raises :class:`UnsupportedModelError` if rows of a microbatch cannot be dropped."""
    way = mixers.way_of(view)
    if way is not Way.PARTS:
        raise UnsupportedModelError(
            f"token_filter of a model whose responses read the prompt by {way.value}; accepted: "
            f"by {Way.PARTS.value}"
        )
    if tensor_parallel.has_parts(model):
        raise UnsupportedModelError(
            "token_filter of a model that is split over ranks; accepted: a model that is whole on "
            "each rank"
        )
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        raise UnsupportedModelError(
            "token_filter with gradient checkpointing, whose graph is made in the backward; "
            "accepted: model.gradient_checkpointing_disable()"
        )
