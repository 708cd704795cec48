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

from . import cached, calls, direct, masks, registry
from .attention import Packed
from .support import ModelView

# The argument of attention functions for a sliding window.
WINDOW = "sliding_window"


class Route(Enum):
    """What the layers call for attention."""

    REGISTRY = "transformers' AttentionInterface"
    TORCH = "torch.nn.functional.scaled_dot_product_attention"
    CACHE = "the update of a cache"
    NONE = "nothing known"


class Handlers(NamedTuple):
    """What a pass does with the calls of the layers."""

    attend: registry.Attend
    """By the routes REGISTRY and TORCH."""
    update: cached.Update
    """By the route CACHE."""
    recur: calls.Handler
    """Convolutions and scans."""


class Mixers:
    """What mixes tokens in the layers of a model as it is now."""

    def __init__(self, view: ModelView):
        self._view = view
        self.route = route_of(view.layers)
        self._recurrent = calls.callers(view.layers, calls.RECURRENT)
        self._builders: list[calls.Caller] = []
        if self.route is Route.REGISTRY and _leaves_windows_to_masks(view.layers):
            self._builders = calls.callers([view.model], masks.BUILDERS)

    def are_recurrent_in(self, layer: torch.nn.Module) -> bool:
        """Returns whether the layer has a recurrent module."""
        inside = set(layer.modules())
        return any(caller.module in inside for caller in self._recurrent)

    @property
    def are_recurrent(self) -> bool:
        """Whether any layer has a recurrent module."""
        return bool(self._recurrent)

    @contextlib.contextmanager
    def taken_over(
        self, handlers: Handlers, packed: Packed | None = None, prefix_tokens: int = 0
    ) -> Iterator[dict]:
        """Context of a pass: calls of this thread go to ``handlers``. Yields arguments that the
        model's forward needs beside the tokens. ``packed``: the rows of a microbatch, over a prefix
        of ``prefix_tokens``; None in phase A."""
        arguments: dict = {"use_cache": False}
        with contextlib.ExitStack() as stack:
            callers = [*self._recurrent, *self._builders]
            if callers:
                stack.enter_context(calls.use(callers, functools.partial(_handle, handlers.recur)))
            if self.route is Route.CACHE:
                cache = cached.PassCache(prefix_tokens, handlers.update)
                arguments = {"use_cache": True, "past_key_values": cache}
                if packed is not None:
                    weight = self._view.embedding.weight
                    arguments["attention_mask"] = cached.mask(
                        packed, prefix_tokens, weight.dtype, weight.device
                    )
            elif self.route is Route.TORCH:
                stack.enter_context(registry.use(handlers.attend, direct.IMPLEMENTATION))
                stack.enter_context(direct.use(self._view.layers, handlers.attend))
            else:
                stack.enter_context(registry.use(handlers.attend))
            yield arguments


def _handle(recur: calls.Handler, call: calls.Call):
    return masks.build(call) if call.name in masks.BUILDERS else recur(call)


def route_of(layers: Sequence[torch.nn.Module]) -> Route:
    """Returns the route of the layers' attention, found in the code of their classes."""
    names: set[str] = set()
    for function in _functions(layers):
        names.update(function.__code__.co_names)
        if _calls_registry(function):
            return Route.REGISTRY
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


def _leaves_windows_to_masks(layers: Sequence[torch.nn.Module]) -> bool:
    """Returns whether the layers' file can build masks of windows, and no function that calls the
    registry names its argument for a window."""
    found = False
    for function in filter(_calls_registry, _functions(layers)):
        found |= not masks.BUILDERS.isdisjoint(function.__globals__)
        for constant in function.__code__.co_consts:
            if WINDOW in (constant if isinstance(constant, tuple) else (constant,)):
                return False
    return found
