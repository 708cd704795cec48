"""A fingerprint of a model: has anything changed on which the result of a check depends?

Compared by identity: parameters, buffers, modules, hooks and attributes of every module, entries of
its lists and dicts, the configuration, the functions of each class, the callables of the files that
define them, and the registered attention functions. Compared by value: dtype, shape, device and
trainability of every parameter. Values of weights are not compared. Every object compared is kept
alive, so no identity is used twice.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterator
from itertools import chain
from types import ModuleType
from typing import NamedTuple

import torch
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


class _Source(NamedTuple):
    """A dict or list whose entries are compared."""

    name: str
    container: dict | list
    keys: tuple[str, ...] | None = None
    """The entries of a dict that are compared; None: all."""

    def view(self) -> Collection:
        """Returns a live view of the entries."""
        if self.keys is not None:
            return _Picked(self.container, self.keys)
        return self.container if isinstance(self.container, list) else self.container.values()

    def entries(self) -> dict:
        """Returns the entries by key."""
        if isinstance(self.container, list):
            return dict(enumerate(self.container))
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


class Fingerprint:
    """What a model held when it was taken."""

    def __init__(self, model: torch.nn.Module, volatile: frozenset = frozenset()):
        """``volatile``: entries that every forward changes, from :meth:`volatile` of an earlier
        fingerprint; they are left out."""
        self._sources = [_without(source, volatile) for source in _sources(model)]
        self._views = [source.view() for source in self._sources]
        self._entries = [source.entries() for source in self._sources]
        self._lengths = list(map(len, self._views))
        self._objects = list(chain.from_iterable(self._views))
        self._parameters = list(model.parameters())
        self._values = self._current_values()

    def matches(self) -> bool:
        """Returns whether the model still holds the same."""
        return (
            list(map(len, self._views)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._views), self._objects))
            and self._current_values() == self._values
        )

    def difference(self) -> str:
        """Names what changed since."""
        for source, key in self._changed():
            return f"{source.name}.{key} changed".lstrip(".")
        if self._current_values() != self._values:
            return "dtype, shape, device or trainability of parameters changed"
        return "nothing changed"

    def volatile(self) -> frozenset:
        """Returns the entries that changed since, for a fingerprint taken after a forward."""
        return frozenset((id(source.container), key) for source, key in self._changed())

    def _changed(self) -> Iterator[tuple[_Source, object]]:
        for source, before in zip(self._sources, self._entries, strict=True):
            now = source.entries()
            for key in before.keys() | now.keys():
                if key not in before or key not in now or before[key] is not now[key]:
                    yield source, key

    def _current_values(self) -> list[tuple]:
        return [(p.dtype, p.shape, p.device, p.requires_grad) for p in self._parameters]


def _without(source: _Source, volatile: frozenset) -> _Source:
    entries = source.entries()
    kept = tuple(key for key in entries if (id(source.container), key) not in volatile)
    if len(kept) == len(entries):
        return source
    return _Source(source.name, {} if isinstance(source.container, list) else source.container, kept)


def _sources(model: torch.nn.Module) -> Iterator[_Source]:
    classes: dict[type, None] = {}
    configs: dict[int, object] = {}
    for name, module in model.named_modules():
        yield _Source(name, module.__dict__)
        for kind in _MODULE_DICTS:
            yield _Source(f"{name}.{kind}".lstrip("."), module.__dict__[kind])
        for attribute, value in module.__dict__.items():
            if attribute.startswith("_"):
                continue
            if isinstance(value, (dict, list)):
                yield _Source(f"{name}.{attribute}", value)
            elif hasattr(value, "to_dict") and not isinstance(value, (type, torch.nn.Module)):
                configs[id(value)] = value
        classes |= dict.fromkeys(type(module).__mro__)
    for config in configs.values():
        yield from _config_sources(config)
    files: dict[str, ModuleType] = {}
    for kind in classes:
        if kind in (object, torch.nn.Module):
            continue
        yield _Source(kind.__name__, kind.__dict__)
        file = sys.modules.get(kind.__module__)
        if file is not None and not kind.__module__.startswith("torch."):
            files[kind.__module__] = file
    for name, file in files.items():
        names = tuple(key for key, value in file.__dict__.items() if callable(value))
        yield _Source(name, file.__dict__, names)
    yield _Source("attention functions", AttentionInterface._global_mapping)
    yield _Source("mask functions", AttentionMaskInterface._global_mapping)


def _config_sources(config) -> Iterator[_Source]:
    name = type(config).__name__
    yield _Source(name, config.__dict__)
    for attribute, value in config.__dict__.items():
        if isinstance(value, (dict, list)):
            yield _Source(f"{name}.{attribute}", value)
        elif hasattr(value, "to_dict"):
            yield from _config_sources(value)
