"""Calls of functions that carry a state along the tokens, and the modules that make them.

transformers gives these functions the same names and arguments in the files of all its models, and
calls its own code or an installed kernel by them. While a thread is inside :class:`use`, its calls
go to a handler. Other threads, and this thread outside, run the functions unchanged.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import NamedTuple

import torch

# Functions of transformers' recurrent layers.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
STATE_SPACE_SCAN = "mamba2_chunk_scan"
SELECTIVE_SCAN = "mamba_selective_scan"
# Convolution and scan in one kernel. They return None where there is no such kernel, and the module
# then calls the two.
FUSED = frozenset({"mamba2_split_conv1d_scan_combined", "mamba_inner_fn"})
RECURRENT = FUSED | {CONVOLUTION, *DELTA_RULES, STATE_SPACE_SCAN, SELECTIVE_SCAN}


class FunctionCall(NamedTuple):
    """One call of a function."""

    module: torch.nn.Module
    index: int
    """Number of calls that the module's forward made before."""
    name: str
    function: Callable
    args: tuple
    kwargs: dict


Handler = Callable[[FunctionCall], object]


class Caller(NamedTuple):
    """A module that calls functions of interest, and where it looks them up."""

    module: torch.nn.Module
    places: tuple[tuple[dict, str], ...]
    """Global variables of a file, and a name among them."""


_active = threading.local()
_lock = threading.Lock()
# By file and name: the function that is there outside, and the number of contexts inside.
_replaced: dict[tuple[int, str], tuple[Callable, int]] = {}
# The function that each dispatcher stands for, by the dispatcher's id. Neither is ever freed.
_functions: dict[int, Callable] = {}


def outside(value):
    """Returns the function that is outside where ``value`` is inside; another value as it is."""
    return _functions.get(id(value), value)


def callers(modules: Iterable[torch.nn.Module], names: frozenset[str]) -> list[Caller]:
    """Returns the modules in ``modules`` whose classes call functions of ``names`` that are global
    variables of their files."""
    places: dict[type, tuple] = {}
    found: dict[torch.nn.Module, Caller] = {}
    for outer in modules:
        for module in outer.modules():
            kind = type(module)
            if kind not in places:
                places[kind] = tuple(_places(kind, names))
            if places[kind]:
                found[module] = Caller(module, places[kind])
    return list(found.values())


def _places(kind: type, names: frozenset[str]) -> Iterator[tuple[dict, str]]:
    for function in functions_of(kind):
        for name in names.intersection(names_in(function.__code__)):
            if callable(function.__globals__.get(name)):
                yield function.__globals__, name


def names_in(code: CodeType) -> set[str]:
    """Returns the global variables and attributes that code uses, functions inside it included."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def functions_of(kind: type) -> Iterator[FunctionType]:
    """Yields the functions of a class and its bases, without decorators, but for torch's own."""
    for each in kind.__mro__:
        if each is object or each.__module__.startswith("torch."):
            continue
        for attribute in vars(each).values():
            function = inspect.unwrap(attribute) if callable(attribute) else attribute
            if isinstance(function, FunctionType):
                yield function


class use:
    """Context: calls that this thread's ``callers`` make go to ``handler``."""

    def __init__(self, callers: Sequence[Caller], handler: Handler):
        self._callers, self._handler = callers, handler
        self._places = {(id(file), name): file for each in callers for file, name in each.places}

    def __enter__(self):
        self._before = getattr(_active, "calls", None)
        _active.calls = _Calls(self._handler)
        self._hooks = [
            each.module.register_forward_pre_hook(_note_module) for each in self._callers
        ]
        with _lock:
            for (place, name), file in self._places.items():
                function, users = _replaced.get((place, name), (file[name], 0))
                _replaced[place, name] = function, users + 1
                file[name] = _dispatching(name, function)

    def __exit__(self, *exc):
        with _lock:
            for (place, name), file in self._places.items():
                function, users = _replaced.pop((place, name))
                if users > 1:
                    _replaced[place, name] = function, users - 1
                else:
                    file[name] = function
        for hook in self._hooks:
            hook.remove()
        _active.calls = self._before


class in_torch(use):
    """Context: what this thread's ``callers`` call is transformers' own code, also for the handlers
    of a pass inside, whatever kernel is installed."""

    def __init__(self, callers: Sequence[Caller]):
        super().__init__(callers, lambda call: call.function(*call.args, **call.kwargs))

    def __enter__(self):
        self._was_in_torch = getattr(_active, "in_torch", False)
        _active.in_torch = True
        super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        _active.in_torch = self._was_in_torch


class _Calls:
    """Calls of one thread's pass."""

    def __init__(self, handler: Handler):
        self._handler = handler
        self._module: torch.nn.Module | None = None
        self._count = 0

    def begin(self, module: torch.nn.Module) -> None:
        self._module, self._count = module, 0

    def handle(self, name: str, function: Callable, args: tuple, kwargs: dict):
        if self._module is None:
            return function(*args, **kwargs)
        call = FunctionCall(self._module, self._count, name, function, args, kwargs)
        self._count += 1
        return self._handler(call)


def _note_module(module: torch.nn.Module, args) -> None:
    calls = getattr(_active, "calls", None)
    if calls is not None:
        calls.begin(module)


# The same object for the same function: what a compiler guards on stays as it was.
@functools.cache
def _dispatching(name: str, function: Callable) -> Callable:
    # transformers wraps its own code by what looks for an installed kernel.
    in_torch = inspect.unwrap(function)

    @functools.wraps(function)
    def dispatch(*args, **kwargs):
        calls = getattr(_active, "calls", None)
        if calls is None:
            return function(*args, **kwargs)
        chosen = in_torch if getattr(_active, "in_torch", False) else function
        return calls.handle(name, chosen, args, kwargs)

    _functions[id(dispatch)] = function
    return dispatch
