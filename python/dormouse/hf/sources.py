"""Where the entries are on which the result of a check depends: dicts, lists and closures."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.modules import module as torch_module
from transformers import masking_utils
from transformers.utils.generic import GeneralInterface

from . import calls, short_windows

# Dicts of a module whose entries, not only whose identities, are compared.
_MODULE_DICTS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

# Hooks that run in every module.
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

# Of objects that run other code: where they hold it, the code last.
_CODE_IN = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    MethodType: ("__self__", "__func__"),
    property: ("fset", "fdel", "fget"),
    functools.cached_property: ("func",),
    functools.partial: ("keywords", "args", "func"),
    functools.partialmethod: ("keywords", "args", "func"),
}

# Containers in containers are followed to this depth.
DEPTH_MAX = 6

# Packages whose functions' variables are not followed.
_FIXED_PACKAGES = frozenset({"torch", "transformers", "megatron"})


class Source(NamedTuple):
    """A dict, list or closure whose entries are compared."""

    name: str
    container: dict | list | tuple
    keys: tuple[str, ...] | None = None
    """The entries of a dict that are compared; None: all."""

    def view(self) -> Collection:
        """Returns a live view of the entries, as they are at the moment."""
        if self.keys is not None:
            return _Picked(self.container, self.keys)
        if isinstance(self.container, tuple):
            return _Cells(self.container)
        return self.container if isinstance(self.container, list) else self.container.values()

    def entries(self) -> dict:
        """Returns the entries by key, as they are without what passes of any model on any thread
        put in their place."""
        if isinstance(self.container, (list, tuple)):
            return dict(enumerate(self.view()))
        if self.keys is None:
            # A copy at once: another thread may add entries.
            found = dict(self.container)
        else:
            found = {key: self.container.get(key) for key in self.keys}
        own = {key: short_windows.outside(calls.outside(each)) for key, each in found.items()}
        return {key: each for key, each in own.items() if each is not short_windows.ABSENT}


class _Picked:
    """A live view of some entries of a dict."""

    def __init__(self, container: dict, keys: tuple[str, ...]):
        self._container, self._keys = container, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator:
        return map(self._container.get, self._keys)


class _Cells:
    """A live view of a function's closure."""

    def __init__(self, cells: tuple):
        self._cells = cells

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator:
        for cell in self._cells:
            try:
                yield cell.cell_contents
            except ValueError:
                # Not assigned yet.
                yield None


def sources_of(model: torch.nn.Module) -> Iterator[Source]:
    """Yields everything that is compared."""
    classes: dict[type, None] = {}
    configs: dict[int, object] = {}
    followed: set[int] = set()
    for name, module in model.named_modules():
        yield Source(name, module.__dict__)
        for kind in _MODULE_DICTS:
            place = f"{name}.{kind}".lstrip(".")
            yield Source(place, module.__dict__[kind])
            if kind.endswith("_hooks"):
                for hook in module.__dict__[kind].values():
                    yield from _inside(place, hook, followed)
        for attribute, value in module.__dict__.items():
            if attribute.startswith("_"):
                continue
            if hasattr(value, "to_dict") and not isinstance(value, (type, torch.nn.Module)):
                configs[id(value)] = value
            else:
                place = f"{name}.{attribute}".lstrip(".")
                yield from _settings(place, value)
                yield from _inside(place, value, followed)
        classes |= dict.fromkeys(type(module).__mro__)
    for config in configs.values():
        yield from _config_sources(config, followed)
    files: dict[str, ModuleType] = {}
    for kind in classes:
        if kind in (object, torch.nn.Module):
            continue
        yield Source(kind.__name__, kind.__dict__)
        for attribute, value in list(kind.__dict__.items()):
            if isinstance(value, FunctionType) or code_in(value) is not None:
                yield from _inside(f"{kind.__name__}.{attribute}", value, followed)
        file = sys.modules.get(kind.__module__)
        if file is not None and not kind.__module__.startswith("torch."):
            files[kind.__module__] = file
    files["torch.nn.functional"] = torch.nn.functional
    mappings: dict[int, tuple[str, dict]] = {}
    for interface in interfaces_of(model):
        for mapping in (interface._global_mapping, interface._local_mapping):
            mappings[id(mapping)] = type(interface).__name__, mapping
    for name, mapping in mappings.values():
        yield Source(name, mapping)
        functions = list(mapping.values())
        for function in functions:
            yield from _inside(name, function, followed)
        files |= {file.__name__: file for file in files_of_functions(functions)}
    for name, file in files.items():
        names = tuple(key for key, value in file.__dict__.items() if _is_compared(value))
        yield Source(name, file.__dict__, names)
    for kind in GLOBAL_HOOKS:
        hooks = getattr(torch_module, kind)
        yield Source(f"torch.nn.modules.module.{kind}", hooks)
        for hook in hooks.values():
            yield from _inside(kind, hook, followed)


def interfaces_of(model: torch.nn.Module) -> Iterator[GeneralInterface]:
    """Yields transformers' tables of functions for attention, masks and experts that the files of
    the model's classes read. Entries that are assigned to one go before registered ones."""
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    for name in sorted(names | {masking_utils.__name__}):
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if isinstance(value, GeneralInterface):
                yield value


def files_of_functions(functions: Iterable[Callable]) -> list[ModuleType]:
    """Returns the files of functions, and those of transformers' functions that they import."""
    names: dict[str | None, None] = {}
    for function in functions:
        names[getattr(function, "__module__", None)] = None
        if isinstance(function, FunctionType):
            used = map(function.__globals__.get, function.__code__.co_names)
            of_used = (each.__module__ for each in used if isinstance(each, FunctionType))
            names |= {name: None for name in of_used if name and name.startswith("transformers.")}
    return [sys.modules[name] for name in names if name in sys.modules]


def _is_compared(value) -> bool:
    return callable(value) or isinstance(value, GeneralInterface)


def code_in(value) -> list | None:
    """Returns what an object that runs other code holds of it, the code last; None for others."""
    kind = next((kind for kind in type(value).__mro__ if kind in _CODE_IN), None)
    return None if kind is None else [getattr(value, field) for field in _CODE_IN[kind]]


def _settings(name: str, value) -> Iterator[Source]:
    """Yields the numbers and texts of an object of the trainer's own that a module holds."""
    package = type(value).__module__.partition(".")[0]
    attributes = getattr(value, "__dict__", None)
    if package in _FIXED_PACKAGES or type(attributes) is not dict:
        return
    if isinstance(value, (FunctionType, type)) or code_in(value) is not None:
        return
    kinds = (int, float, str, type(None))
    keys = tuple(key for key, each in attributes.items() if isinstance(each, kinds))
    yield Source(name, attributes, keys)


def _inside(name: str, value, followed: set[int], depth: int = 0) -> Iterator[Source]:
    """Yields what ``value`` holds: entries of containers, and variables that functions read."""
    if depth > DEPTH_MAX or id(value) in followed:
        return
    inner: list = []
    if isinstance(value, (dict, list)):
        yield Source(name, value)
        inner += value.values() if isinstance(value, dict) else value
    elif isinstance(value, tuple):
        inner += value
    elif isinstance(value, SimpleNamespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        if hasattr(value, "__dict__"):
            inner.append(vars(value))
    elif (held := code_in(value)) is not None:
        inner += held
    elif isinstance(value, FunctionType):
        if value.__module__ and value.__module__.partition(".")[0] in _FIXED_PACKAGES:
            return
        read = tuple(key for key in value.__code__.co_names if key in value.__globals__)
        yield Source(f"{name}: {value.__module__}", value.__globals__, read)
        if value.__closure__:
            yield Source(f"{name}: {value.__name__}", value.__closure__)
            inner += _Cells(value.__closure__)
        inner += [value.__globals__[key] for key in read]
    else:
        return
    followed.add(id(value))
    for each in inner:
        yield from _inside(name, each, followed, depth + 1)


def _config_sources(config, followed: set[int]) -> Iterator[Source]:
    name = type(config).__name__
    yield Source(name, config.__dict__)
    for attribute, value in config.__dict__.items():
        if hasattr(value, "to_dict") and not isinstance(value, type):
            yield from _config_sources(value, followed)
        else:
            yield from _inside(f"{name}.{attribute}", value, followed)
