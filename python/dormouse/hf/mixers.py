"""What mixes tokens in a model's layers, and how a pass takes it over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from enum import Enum
from types import FunctionType
from typing import NamedTuple

import torch
from transformers import AttentionInterface

from . import biases, cached, calls, direct, masks, positions, registry, routing
from .attention import Packed
from .support import ModelView, Way

# The argument of attention functions for a sliding window.
WINDOW = "sliding_window"


class Route(Enum):
    """What the layers call for attention."""

    REGISTRY = "transformers' AttentionInterface"
    TORCH = "torch.nn.functional.scaled_dot_product_attention"
    CACHE = "the update of a cache"
    OWN = "modules of another framework"
    NONE = "nothing known"


class Handlers(NamedTuple):
    """What a pass does with the calls of the layers."""

    attend: registry.Attend
    """By the routes REGISTRY and TORCH."""
    update: cached.Update
    """By the route CACHE."""
    update_indexer: cached.UpdateIndexer
    """By the route CACHE, of models that select keys by an indexer."""
    recur: calls.Handler
    """Convolutions and scans."""
    is_prefix: bool = False
    """Whether the rows are those of a prefix."""


class Mixers:
    """What mixes tokens in the layers of a model of transformers as it is now."""

    ends_at_keys = True
    """Whether nothing but losses reads what comes after the last layer's K and V in a prefix."""

    def __init__(self, view: ModelView):
        self._view = view
        self.route = route_of(view)
        self._recurrent = calls.callers(view.layers, calls.RECURRENT)
        self._builders: list[calls.Caller] = []
        self._counting: list[torch.nn.Module] = []
        self.routers = routing.Places(view.layers)
        """Of recorded experts."""
        if self.route is Route.REGISTRY:
            if _leaves_windows_to_masks(view.layers):
                self._builders = calls.callers([view.model], masks.BUILDERS)
            self._counting = _that_count(view.layers)
        elif self.route is Route.CACHE:
            self._builders = calls.callers([view.model], masks.BUILDERS | biases.BUILDERS)

    def are_recurrent_in(self, layer: torch.nn.Module) -> bool:
        """Returns whether the layer has a recurrent module."""
        inside = set(layer.modules())
        return any(caller.module in inside for caller in self._recurrent)

    def select_keys_in(self, layer: torch.nn.Module) -> bool:
        """Returns whether an indexer selects the keys that the layer reads."""
        return self.route is Route.CACHE and "update_indexer" in _names([layer])

    @property
    def are_recurrent(self) -> bool:
        """Whether any layer has a recurrent module."""
        return bool(self._recurrent)

    def rows_of_prefix(self) -> None:
        """Returns what a prefix, which has just run, has behind these K and V: nothing."""

    @contextlib.contextmanager
    def taken_over(
        self,
        handlers: Handlers,
        packed: Packed | None = None,
        prefix_tokens: int = 0,
        experts: torch.Tensor | None = None,
    ) -> Iterator[dict]:
        """Context of a pass: calls of this thread go to ``handlers``. Yields arguments that the
        model's forward needs beside the tokens. ``packed``: rows that follow a prefix of
        ``prefix_tokens``; None if they follow none. ``experts``: recorded for the rows."""
        arguments: dict = {"use_cache": False}
        joined, callers = None, [*self._recurrent]
        if self.route is Route.CACHE:
            cache = cached.PassCache(prefix_tokens, handlers.update, handlers.update_indexer)
            arguments = {"use_cache": True, "past_key_values": cache}
            if packed is not None and self._view.way is not Way.ALONE:
                weight = self._view.embedding.weight
                joined = cached.JoinedKeys(packed, prefix_tokens, weight.dtype, weight.device)
                arguments["attention_mask"] = joined.mask()
        if self.route is not Route.CACHE or joined is not None:
            callers += self._builders
        with contextlib.ExitStack() as stack:
            if callers:
                handle = functools.partial(_handle, handlers.recur, joined)
                stack.enter_context(calls.use(callers, handle))
            if self.route is Route.TORCH:
                stack.enter_context(registry.use(handlers.attend, direct.IMPLEMENTATION))
                stack.enter_context(direct.use(self._view.layers, handlers.attend))
            elif self.route is not Route.CACHE:
                stack.enter_context(registry.use(handlers.attend))
            if self._counting and packed is not None:
                rows = prefix_tokens + packed.offsets
                stack.enter_context(positions.use(self._counting, rows))
            if experts is not None:
                stack.enter_context(routing.Replay(self._view, self.routers, experts))
            yield arguments


def of(view: ModelView) -> Mixers:
    """Returns what mixes tokens in the layers of a model as it is now."""
    return Mixers(view) if view.own_mixers is None else view.own_mixers


def _handle(recur: calls.Handler, joined: cached.JoinedKeys | None, call: calls.FunctionCall):
    if call.name in biases.BUILDERS:
        return biases.build(call, joined.positions)
    if call.name not in masks.BUILDERS:
        return recur(call)
    built = masks.build(call)
    return built if joined is None else joined.mask_of(built)


def ways_of(view: ModelView) -> list[Way]:
    """Returns the ways that the code of the layers' classes allows."""
    if view.own_mixers is not None:
        return [Way.PARTS]
    if _cheapest_route(view.layers) is Route.CACHE:
        return [Way.JOINED, Way.ALONE]
    return list(Way) if "update" in _names(view.layers) else [Way.PARTS]


def way_of(view: ModelView) -> Way:
    """Returns the way of the view."""
    return ways_of(view)[0] if view.way is None else view.way


def route_of(view: ModelView) -> Route:
    """Returns the route of the layers' attention, found in the code of their classes."""
    if view.own_mixers is not None:
        return view.own_mixers.route
    return _cheapest_route(view.layers) if way_of(view) is Way.PARTS else Route.CACHE


def _names(layers: Sequence[torch.nn.Module]) -> set[str]:
    return set().union(*(calls.names_in(each.__code__) for each in _functions(layers)))


def _cheapest_route(layers: Sequence[torch.nn.Module]) -> Route:
    if any(map(_calls_registry, _functions(layers))):
        return Route.REGISTRY
    names = _names(layers)
    if torch.nn.functional.scaled_dot_product_attention.__name__ in names:
        return Route.TORCH
    return Route.CACHE if "update" in names else Route.NONE


def _functions(layers: Sequence[torch.nn.Module]) -> Iterator[FunctionType]:
    for kind in {type(module) for layer in layers for module in layer.modules()}:
        yield from calls.functions_of(kind)


def _calls_registry(function: FunctionType) -> bool:
    variables = function.__globals__
    return any(
        isinstance(variables.get(name), AttentionInterface) for name in function.__code__.co_names
    )


def _that_count(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns the modules whose attention counts positions by itself."""
    modules = [module for layer in layers for module in layer.modules()]
    kinds = {
        kind
        for kind in set(map(type, modules))
        for function in calls.functions_of(kind)
        if _calls_registry(function) and torch.arange.__name__ in function.__code__.co_names
    }
    return [module for module in modules if type(module) in kinds]


def _leaves_windows_to_masks(layers: Sequence[torch.nn.Module]) -> bool:
    """Returns whether the layers' file can build masks of windows or chunks, and no function that
    calls the registry names its argument for a window."""
    found = False
    for function in filter(_calls_registry, _functions(layers)):
        found |= not masks.BUILDERS.isdisjoint(function.__globals__)
        for constant in function.__code__.co_consts:
            if WINDOW in (constant if isinstance(constant, tuple) else (constant,)):
                return False
    return found
