"""Routers that select recorded experts.

A rollout engine and a trainer round differently, so a token near a tie goes to one expert in the
rollout and to another in training. A trainer may pass the experts that the rollout selected. Their
weights, and the gradients of the routers, are the model's own.

The router of a layer is its only ``torch.topk`` over one score per expert.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ..errors import ArgumentError
from . import checkpointing
from .hooked_mode import LayerMode
from .support import ModelView, UnsupportedModelError, configurations, figure

# Names of configurations for the number of experts of a layer.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_TOPK = (torch.topk, torch.Tensor.topk)


def count_experts(view: ModelView) -> int:
    """Returns the number of experts of a layer; 0 if the configuration names none."""
    for config in configurations(view.config):
        for name in EXPERTS:
            count = figure(config, name)
            if isinstance(count, int):
                return count
    return 0


def check_ids(view: ModelView, experts: Sequence[torch.Tensor] | None) -> None:
    """Raises :class:`dormouse.ArgumentError` for recorded ids that the model does not have."""
    count = count_experts(view)
    largest = max((int(each.max()) for each in experts or () if each.numel()), default=0)
    if count and largest >= count:
        raise ArgumentError(f"routed_experts has id {largest}; accepted: below {count}")


class _Routers(LayerMode):
    """A mode that finds the routers' selections."""

    def __init__(self, view: ModelView, rows: int):
        super().__init__(view.layers)
        self._rows, self._experts = rows, count_experts(view)
        self.selected: set[torch.nn.Module] = set()
        """Layers whose router ran."""

    def select(self, function, arguments: tuple, named: dict, scores: torch.Tensor, k: int):
        """Returns the result of a router's call."""
        raise NotImplementedError

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in _TOPK or self.layer is None:
            return function(*args, **kwargs)
        scores, k = self._scores(*args, **kwargs)
        if scores is None:
            return function(*args, **kwargs)
        return self.select(function, args, kwargs, scores, k)

    def _scores(self, input, k, dim=-1, largest=True, sorted=True):
        is_last = largest and dim in (-1, input.dim() - 1)
        per_expert = is_last and input.shape[-1] == self._experts
        is_router = per_expert and input.numel() == self._rows * self._experts
        return (input, k) if is_router else (None, k)


class Recorder(_Routers):
    """Context of one forward of ``rows`` tokens: records the experts that each router selects."""

    def __init__(self, view: ModelView, rows: int):
        super().__init__(view, rows)
        self._recorded: list[torch.Tensor] = []

    def select(self, function, arguments, named, scores, k):
        if self.layer in self.selected:
            raise _selects_twice(self.layer)
        self.selected.add(self.layer)
        result = function(*arguments, **named)
        self._recorded.append(result.indices.reshape(self._rows, k).cpu())
        return result

    def experts(self) -> torch.Tensor | None:
        """Returns what was selected, ``[rows, layers with a router, experts per token]``."""
        return torch.stack(self._recorded, 1) if self._recorded else None


class Places:
    """Which of a record's layers belongs to which layer of the model: all of them, or those with a
    router, in the order in which they first ran."""

    def __init__(self, layers: Sequence[torch.nn.Module]):
        self._layers = list(layers)
        self._routing: dict[torch.nn.Module, int] = {}
        self._expected: set[torch.nn.Module] | None = None
        self.selected: set[torch.nn.Module] = set()
        """Layers whose router ran in the last pass, or part of one."""

    def of(self, layer: torch.nn.Module, count: int) -> int:
        """Returns the place of a layer in a record of ``count`` layers."""
        place = self._routing.setdefault(layer, len(self._routing))
        place = self._layers.index(layer) if count == len(self._layers) else place
        if place >= count:
            raise ArgumentError(
                f"routed_experts has {count} layers, and more of the model have a router; "
                f"accepted: those with a router, or all {len(self._layers)}"
            )
        return place

    def check_prefix(self) -> None:
        """Checks, after a pass, that the same routers selected as in the pass before it. The last
        layer's does not run in a prefix that no loss reads."""
        ran = self.selected - {self._layers[-1]}
        if self._expected is None:
            self._expected = ran
        if ran != self._expected:
            index = min(map(self._layers.index, ran ^ self._expected))
            raise UnsupportedModelError(
                f"the router of layer {index} did not run in every pass; accepted: once per pass"
            )

    def check(self, count: int) -> None:
        """Checks a pass through all layers, with a record of ``count`` layers."""
        if not self.selected:
            raise no_router()
        self.check_prefix()
        if count not in (len(self._routing), len(self._layers)):
            raise ArgumentError(
                f"routed_experts has {count} layers; accepted: {len(self._routing)}, those with a "
                f"router, or all {len(self._layers)}"
            )


class Replay(_Routers):
    """Context of a pass, or of a part that is computed again: routers select recorded experts."""

    def __init__(self, view: ModelView, places: Places, experts: torch.Tensor):
        """``experts``: of the pass's rows, ``[rows, layers, experts per token]``."""
        super().__init__(view, len(experts))
        self._places, self._recorded = places, experts
        places.selected = self.selected

    def select(self, function, arguments, named, scores, k):
        if self.layer in self.selected:
            raise _selects_twice(self.layer)
        self.selected.add(self.layer)
        if k != self._recorded.shape[2]:
            raise ArgumentError(
                f"routed_experts has {self._recorded.shape[2]} experts per token; accepted: {k}"
            )
        place = self._places.of(self.layer, self._recorded.shape[1])
        indices = self._recorded[:, place].reshape(*scores.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def no_router() -> UnsupportedModelError:
    """Returns the refusal of a model whose routers are not found."""
    return UnsupportedModelError(
        "routed_experts, and no layer selects experts by torch.topk over as many scores as the "
        f"configuration has experts ({', '.join(EXPERTS)}); accepted: such routers, not compiled"
    )


def _selects_twice(layer: torch.nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(layer).__name__} selects experts twice, so it is not known which were recorded; "
        "accepted: one router per layer"
    )


@contextlib.contextmanager
def replaying(view: ModelView, experts: torch.Tensor) -> Iterator[None]:
    """Context of a forward of the model's own, of whole sequences. Parts that it checkpoints are
    computed again with the same experts. ``experts``: of its rows, on the model's device."""
    places = Places(view.layers)

    def replay() -> Replay:
        return Replay(view, places, experts)

    with replay(), checkpointing.use(view.model, replay):
        yield
