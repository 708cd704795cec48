"""A fingerprint of a model: has anything changed on which the result of a check depends?

Compared by identity: parameters, buffers, modules, hooks and attributes of every module, entries of
its containers, the configuration, the functions of each class, the callables of the files that
define them, the registered attention functions, hooks on all modules, and the variables that hooks,
patched functions and functions of classes outside torch and transformers read. Compared by value:
numbers and texts among these, and dtype, shape, device, trainability and hooks of every parameter.
Values of weights are not compared, nor what other objects hold beside numbers and texts. Every
object compared is kept alive, so no identity is used twice.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.modules import module as torch_module
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

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

# Containers in containers are followed to this depth.
DEPTH_MAX = 6

# In place of an entry that is not there.
_ABSENT = object()

# The attribute by which transformers knows that it has registered hooks, which stay.
_HOOKS_NOTE = "_output_capturing_hooks_installed"

# Packages whose functions' variables are not followed.
_FIXED_PACKAGES = frozenset({"torch", "transformers"})


class _Source(NamedTuple):
    """A dict, list or closure whose entries are compared."""

    name: str
    container: dict | list | tuple
    keys: tuple[str, ...] | None = None
    """The entries of a dict that are compared; None: all."""

    def view(self) -> Collection:
        """Returns a live view of the entries."""
        if self.keys is not None:
            return _Picked(self.container, self.keys)
        if isinstance(self.container, tuple):
            return _Cells(self.container)
        return self.container if isinstance(self.container, list) else self.container.values()

    def entries(self) -> dict:
        """Returns the entries by key."""
        if isinstance(self.container, (list, tuple)):
            return dict(enumerate(self.view()))
        keys = self.container if self.keys is None else self.keys
        return {key: self.container.get(key) for key in keys}


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


class Fingerprint:
    """What a model held when it was taken."""

    def __init__(self, model: torch.nn.Module, volatile: frozenset = frozenset()):
        """``volatile``: entries that every forward changes, from :meth:`volatile` of an earlier
        fingerprint; they are left out."""
        self._volatile = volatile
        changing: dict[int, set] = {}
        for container, key in volatile:
            changing.setdefault(container, set()).add(key)
        self._sources = [_without(source, changing) for source in _sources(model)]
        self._views = [source.view() for source in self._sources]
        self._entries = [source.entries() for source in self._sources]
        self._lengths = list(map(len, self._views))
        self._objects = list(chain.from_iterable(self._views))
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        self._parameters = list(model.parameters())
        self._values = self._current_values()

    def matches(self) -> bool:
        """Returns whether the model still holds the same, or equal numbers and texts instead."""
        if self._is_identical():
            return True
        if self._difference() is not None:
            return False
        # peft replaces the names of active adapters whenever they are switched. Equal values take
        # the place of those before, so that the next step need not compare them again.
        self._adopt_equal()
        return True

    def _adopt_equal(self) -> None:
        containers = {id(source.container) for source in self._sources}
        for index, key, now in list(self._replaced()):
            if id(self._entries[index][key]) in containers:
                # Its entries are compared too, so those of its successor must be.
                self.__init__(self._modules[0], self._volatile)
                return
            self._entries[index][key] = now
        self._objects = list(chain.from_iterable(self._views))

    def _is_identical(self) -> bool:
        return (
            list(map(len, self._views)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._views), self._objects))
            and list(map(type, self._modules)) == self._types
            and self._current_values() == self._values
        )

    def has_parameters_of(self, model: torch.nn.Module) -> bool:
        """Returns whether the model holds the parameters that it held."""
        return [id(p) for p in model.parameters()] == [id(p) for p in self._parameters]

    def difference(self) -> str:
        """Names what changed since."""
        return self._difference() or "nothing changed"

    def _difference(self) -> str | None:
        for source, key in self._changed(_equal):
            return f"{source.name}.{key} changed".lstrip(".")
        if list(map(type, self._modules)) != self._types:
            return "the class of a module changed"
        if self._current_values() != self._values:
            return "dtype, shape, device, trainability or hooks of parameters changed"
        return None

    def volatile(self) -> frozenset:
        """Returns the entries that changed since, for a fingerprint taken after a forward."""
        return frozenset((id(source.container), key) for source, key in self._changed(operator.is_))

    def restore(self) -> None:
        """Puts attributes of modules back that a forward changed, and entries of the dicts and
        lists in them. Containers that the trainer's functions read are the trainer's: another
        thread may use them."""
        dicts = {id(module.__dict__) for module in self._modules}
        owned = set(dicts)
        for source, before in zip(self._sources, self._entries, strict=True):
            if id(source.container) in dicts:
                # Parameters, buffers and hooks have owners that put them back.
                owned |= {id(each) for key, each in before.items() if not key.startswith("_")}
        for source, before in zip(self._sources, self._entries, strict=True):
            container = source.container
            if source.keys is not None or id(container) not in owned:
                continue
            if isinstance(container, list):
                before = list(before.values())
                if len(container) != len(before) or any(map(operator.is_not, container, before)):
                    container[:] = before
            elif isinstance(container, dict):
                for key in container.keys() - before.keys() - {_HOOKS_NOTE}:
                    del container[key]
                for key, value in before.items():
                    if container.get(key) is not value or key not in container:
                        container[key] = value

    def _changed(self, is_same: Callable) -> Iterator[tuple[_Source, object]]:
        for index, key, now in self._replaced():
            if not is_same(self._entries[index].get(key, _ABSENT), now):
                yield self._sources[index], key

    def _replaced(self) -> Iterator[tuple[int, object, object]]:
        """Yields the source's index, the key and the present value of every entry that holds
        another object than before."""
        objects = iter(self._objects)
        for index, (source, view) in enumerate(zip(self._sources, self._views, strict=True)):
            before = list(islice(objects, self._lengths[index]))
            if len(view) == len(before) and all(map(operator.is_, view, before)):
                continue
            entries, now = self._entries[index], source.entries()
            for key in entries.keys() | now.keys():
                value = now.get(key, _ABSENT)
                if entries.get(key, _ABSENT) is not value:
                    yield index, key, value

    def _current_values(self) -> list[tuple]:
        return [
            (
                *(p.dtype, p.shape, p.device, p.requires_grad),
                *(bool(p._backward_hooks), bool(p._post_accumulate_grad_hooks)),
            )
            for p in self._parameters
        ]


def _equal(before, now, depth: int = 0) -> bool:
    """Returns whether both are the same, or containers of equal numbers and texts."""
    if before is now:
        return True
    if type(before) is not type(now) or depth > DEPTH_MAX:
        return False
    if isinstance(before, dict):
        if before.keys() != now.keys():
            return False
        before, now = before.values(), (now[key] for key in before)
    elif not isinstance(before, (list, tuple)):
        return isinstance(before, (int, float, str)) and before == now
    elif len(before) != len(now):
        return False
    return all(_equal(*each, depth + 1) for each in zip(before, now, strict=True))


def _without(source: _Source, changing: dict[int, set]) -> _Source:
    """``changing``: the keys to leave out, by the container's identity."""
    left_out = changing.get(id(source.container))
    if not left_out:
        return source
    kept = tuple(key for key in source.entries() if key not in left_out)
    if isinstance(source.container, tuple):
        return _Source(source.name, tuple(source.container[i] for i in kept))
    if isinstance(source.container, list):
        return _Source(source.name, {}, ())
    return _Source(source.name, source.container, kept)


def _sources(model: torch.nn.Module) -> Iterator[_Source]:
    classes: dict[type, None] = {}
    configs: dict[int, object] = {}
    followed: set[int] = set()
    for name, module in model.named_modules():
        yield _Source(name, module.__dict__)
        for kind in _MODULE_DICTS:
            place = f"{name}.{kind}".lstrip(".")
            yield _Source(place, module.__dict__[kind])
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
        yield _Source(kind.__name__, kind.__dict__)
        for function in list(kind.__dict__.values()):
            if isinstance(function, FunctionType):
                yield from _inside(f"{kind.__name__}.{function.__name__}", function, followed)
        file = sys.modules.get(kind.__module__)
        if file is not None and not kind.__module__.startswith("torch."):
            files[kind.__module__] = file
    files["torch.nn.functional"] = torch.nn.functional
    for function in list(AttentionInterface._global_mapping.values()):
        yield from _inside("attention functions", function, followed)
        file = sys.modules.get(getattr(function, "__module__", None))
        if file is not None:
            files[file.__name__] = file
    for name, file in files.items():
        names = tuple(key for key, value in file.__dict__.items() if callable(value))
        yield _Source(name, file.__dict__, names)
    yield _Source("attention functions", AttentionInterface._global_mapping)
    yield _Source("mask functions", AttentionMaskInterface._global_mapping)
    for kind in GLOBAL_HOOKS:
        hooks = getattr(torch_module, kind)
        yield _Source(f"torch.nn.modules.module.{kind}", hooks)
        for hook in hooks.values():
            yield from _inside(kind, hook, followed)


def _settings(name: str, value) -> Iterator[_Source]:
    """Yields the numbers and texts of an object of the trainer's own that a module holds."""
    package = type(value).__module__.partition(".")[0]
    attributes = getattr(value, "__dict__", None)
    if package in _FIXED_PACKAGES or type(attributes) is not dict or callable(value):
        return
    kinds = (int, float, str, type(None))
    keys = tuple(key for key, each in attributes.items() if isinstance(each, kinds))
    yield _Source(name, attributes, keys)


def _inside(name: str, value, followed: set[int], depth: int = 0) -> Iterator[_Source]:
    """Yields what ``value`` holds: entries of containers, and variables that functions read."""
    if depth > DEPTH_MAX or id(value) in followed:
        return
    inner: list = []
    if isinstance(value, (dict, list)):
        yield _Source(name, value)
        inner += value.values() if isinstance(value, dict) else value
    elif isinstance(value, tuple):
        inner += value
    elif isinstance(value, SimpleNamespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        if hasattr(value, "__dict__"):
            inner.append(vars(value))
    elif isinstance(value, functools.partial):
        inner += [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        inner += [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        if value.__module__ and value.__module__.partition(".")[0] in _FIXED_PACKAGES:
            return
        read = tuple(key for key in value.__code__.co_names if key in value.__globals__)
        yield _Source(f"{name}: {value.__module__}", value.__globals__, read)
        if value.__closure__:
            yield _Source(f"{name}: {value.__name__}", value.__closure__)
            inner += _Cells(value.__closure__)
        inner += [value.__globals__[key] for key in read]
    else:
        return
    followed.add(id(value))
    for each in inner:
        yield from _inside(name, each, followed, depth + 1)


def _config_sources(config, followed: set[int]) -> Iterator[_Source]:
    name = type(config).__name__
    yield _Source(name, config.__dict__)
    for attribute, value in config.__dict__.items():
        if hasattr(value, "to_dict") and not isinstance(value, type):
            yield from _config_sources(value, followed)
        else:
            yield from _inside(f"{name}.{attribute}", value, followed)
