"""Other tensors in place of a model's parameters and buffers, and other forwards in place of its
modules', for the time of some passes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

Place = tuple[dict, str, torch.Tensor]
"""A module's table, a name in it, and the tensor that belongs there."""


def put(
    model: torch.nn.Module, substitute: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[Place]:
    """Replaces each parameter and buffer by its substitute, if it has one. Returns what
    :func:`put_back` takes."""
    places: list[Place] = []
    try:
        for module in model.modules():
            for entries in (module._parameters, module._buffers):
                for name, tensor in entries.items():
                    other = None if tensor is None else substitute(tensor)
                    if other is not None:
                        places.append((entries, name, tensor))
                        entries[name] = other
    except BaseException:
        put_back(places)
        raise
    return places


def put_back(places: list[Place]) -> None:
    """Restores the model's own tensors."""
    for entries, name, tensor in places:
        entries[name] = tensor


@contextlib.contextmanager
def without_hooks(hooks: Iterable[tuple[dict, int]]) -> Iterator[None]:
    """Context in which hooks of modules, each a table and a number in it, are not called. They keep
    their place; hooks that others add or remove meanwhile stay so."""
    tables: dict[int, tuple[dict, dict]] = {}
    taken: set[tuple[int, int]] = set()
    for table, number in hooks:
        if number in table:
            tables.setdefault(id(table), (table, dict(table)))
            taken.add((id(table), number))
            del table[number]
    try:
        yield
    finally:
        for key, (table, before) in tables.items():
            now = dict(table)
            table.clear()
            for number, hook in before.items():
                if number in now or (key, number) in taken:
                    table[number] = hook
            table.update(now)


def parameter_like(own: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Returns a parameter with other data, and with the marks that frameworks keep on ``own``."""
    parameter = torch.nn.Parameter(data, requires_grad=own.requires_grad)
    parameter.__dict__.update(own.__dict__)
    return parameter


def forward(
    module: torch.nn.Module, function: Callable
) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which ``function`` is this thread's forward of a module."""
    return ForwardSubstitutes({module: function}).in_place()


class ForwardSubstitutes:
    """Functions in place of modules' forwards, prepared once for many passes."""

    def __init__(
        self, functions: Mapping[torch.nn.Module, Callable], *, compiles_own: bool = False
    ):
        """``compiles_own``: compiled code calls the modules' own forwards instead. Otherwise its
        graph breaks at each of the functions."""
        self._compiles_own = compiles_own
        self._threads: list[int] = []
        self._places = [
            (vars(module), self._dispatched(module.forward, function))
            for module, function in functions.items()
        ]

    def _dispatched(self, own: Callable, function: Callable) -> Callable:
        threads, compiles_own = self._threads, self._compiles_own

        def dispatched(*args, **kwargs):
            if compiles_own and torch.compiler.is_compiling():
                return own(*args, **kwargs)
            chosen = function if threading.get_ident() in threads else own
            return chosen(*args, **kwargs)

        return dispatched if compiles_own else torch.compiler.disable(dispatched)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the functions are the modules' forwards in this thread."""
        patches = [attributes.get("forward") for attributes, _ in self._places]
        thread = threading.get_ident()
        self._threads.append(thread)
        # Not by the modules' own setters, which look for parameters and modules first.
        for attributes, dispatched in self._places:
            attributes["forward"] = dispatched
        try:
            yield
        finally:
            for (attributes, _), patch in zip(self._places, patches, strict=True):
                if patch is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = patch
            self._threads.remove(thread)
