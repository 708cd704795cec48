"""Other tensors in place of a model's parameters and buffers, and other forwards in place of its
modules', for the time of some passes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

Place = tuple[dict, str, torch.Tensor]
"""A module's table, a name in it, and the tensor that belongs there."""


def put(
    model: torch.nn.Module, substitute: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[Place]:
    """Replaces each parameter and buffer by its substitute, if it has one. Returns what
    :func:`put_back` takes."""
    places = []
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                other = None if tensor is None else substitute(tensor)
                if other is not None:
                    places.append((entries, name, tensor))
                    entries[name] = other
    return places


def put_back(places: list[Place]) -> None:
    """Restores the model's own tensors."""
    for entries, name, tensor in places:
        entries[name] = tensor


def parameter_like(own: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Returns a parameter with other data, and with the marks that frameworks keep on ``own``."""
    parameter = torch.nn.Parameter(data, requires_grad=own.requires_grad)
    parameter.__dict__.update(own.__dict__)
    return parameter


@contextlib.contextmanager
def forward(module: torch.nn.Module, function: Callable) -> Iterator[None]:
    """Context in which ``function`` is this thread's forward of a module."""
    thread, before, patch = threading.get_ident(), module.forward, vars(module).get("forward")

    @torch.compiler.disable
    def dispatched(*args, **kwargs):
        chosen = function if threading.get_ident() == thread else before
        return chosen(*args, **kwargs)

    module.forward = dispatched
    try:
        yield
    finally:
        del module.forward
        if patch is not None:
            module.forward = patch
