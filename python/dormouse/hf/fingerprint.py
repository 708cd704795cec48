"""A fingerprint of a model: has anything changed on which the result of a check depends?

Compared by identity: parameters, buffers, modules, hooks and attributes of every module, entries of
its containers, the configuration, the functions of each class, the callables of the files that
define them, transformers' tables of functions, hooks on all modules, and the variables that hooks,
patched functions and functions of classes outside torch and transformers read. Compared by value:
numbers and texts among these, methods by their function and object, buffers and other small tensors
without a gradient that were replaced by others, as moving a model to another device and back does,
and dtype, shape, device, trainability and hooks of every parameter. Values of weights are not
compared, nor what other objects hold beside numbers, texts and such tensors. Every object compared
is kept alive, so no identity is used twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from types import MethodType

import torch

from .sources import DEPTH_MAX, Source, sources_of
from .watch import Watch

# Buffers up to this size are compared by their values.
BUFFER_BYTES_MAX = 1 << 20

# In place of an entry that is not there.
_ABSENT = object()

# The attribute by which transformers knows that it has registered hooks, which stay.
_HOOKS_NOTE = "_output_capturing_hooks_installed"
# The file of these hooks. They do nothing in a forward that returns no more than before.
_HOOKS_FILE = "transformers.utils.output_capturing"
# Attributes of modules that generation alone reads: peft sets it in each.
_OF_GENERATION = frozenset({"prepare_inputs_for_generation"})

_properties = operator.attrgetter("dtype", "shape", "device", "requires_grad")
_hooks = operator.attrgetter("_backward_hooks")
_later_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


class Fingerprint:
    """What a model held when it was taken."""

    def __init__(self, model: torch.nn.Module, volatile: frozenset = frozenset()):
        """``volatile``: entries that every forward changes, from :meth:`volatile` of an earlier
        fingerprint; they are left out."""
        self._volatile = volatile
        changing: dict[int, set] = {}
        for container, key in volatile:
            changing.setdefault(container, set()).add(key)
        self._sources = [_without(source, changing) for source in sources_of(model)]
        self._watch = Watch(self._sources)
        self._entries = [source.entries() for source in self._sources]
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        self._parameters = list(model.parameters())
        self._values = self._current_values()

    def matches(self) -> bool:
        """Returns whether the model still holds the same, or equal numbers, texts and small tensors
        instead."""
        if self._other_difference() is not None:
            return False
        suspects = self._watch.suspects()
        if not suspects:
            return True
        replaced = []
        for index, key, now in self._replaced(suspects):
            if not _is_same(key, self._entries[index].get(key, _ABSENT), now):
                return False
            replaced.append((index, key, now))
        self._adopt(replaced)
        return True

    def _adopt(self, replaced: list[tuple[int, object, object]]) -> None:
        """Takes equal values in place of those before, so that the next step need not compare them
        again: peft replaces the names of active adapters whenever they are switched."""
        containers = {id(source.container) for source in self._sources} if replaced else set()
        before = (self._entries[index].get(key, _ABSENT) for index, key, _ in replaced)
        if any(each is _ABSENT or id(each) in containers for each in before):
            # Its entries are compared too, so those of its successor must be.
            self.__init__(self._modules[0], self._volatile)
            return
        for index, key, now in replaced:
            if now is _ABSENT:
                del self._entries[index][key]
            else:
                self._entries[index][key] = now
        self._watch.settle()

    def has_parameters_of(self, model: torch.nn.Module) -> bool:
        """Returns whether the model holds the parameters that it held."""
        return [id(p) for p in model.parameters()] == [id(p) for p in self._parameters]

    def difference(self) -> str:
        """Names what changed since."""
        for source, key in self._changed(_is_same):
            return f"{source.name}.{key} changed".lstrip(".")
        return self._other_difference() or "nothing changed"

    def _other_difference(self) -> str | None:
        if list(map(type, self._modules)) != self._types:
            return "the class of a module changed"
        if self._current_values() != self._values:
            return "dtype, shape, device, trainability or hooks of parameters changed"
        return None

    def volatile(self) -> frozenset:
        """Returns the entries that changed since, for a fingerprint taken after a forward."""
        changed = self._changed(_is_identical)
        return frozenset((id(source.container), key) for source, key in changed)

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

    def _changed(self, is_same: Callable) -> Iterator[tuple[Source, object]]:
        for index, key, now in self._replaced(self._watch.suspects()):
            if not is_same(key, self._entries[index].get(key, _ABSENT), now):
                yield self._sources[index], key

    def _replaced(self, suspects: Iterable[int]) -> Iterator[tuple[int, object, object]]:
        """Yields the source's index, the key and the present value of every entry of ``suspects``
        that holds another object than before."""
        for index in suspects:
            entries, view = self._entries[index], self._sources[index].view()
            if len(view) == len(entries) and all(map(operator.is_, view, entries.values())):
                continue
            now = self._sources[index].entries()
            for key in entries.keys() | now.keys():
                value = now.get(key, _ABSENT)
                if entries.get(key, _ABSENT) is not value:
                    yield index, key, value

    def _current_values(self) -> list[list]:
        return [
            list(map(_properties, self._parameters)),
            list(map(bool, map(_hooks, self._parameters))),
            list(map(bool, map(_later_hooks, self._parameters))),
        ]


def _is_identical(key, before, now) -> bool:
    return before is now


def _is_same(key, before, now) -> bool:
    """Returns whether an entry says the same: an equal value, or nothing to passes of a step."""
    if key in _OF_GENERATION or key == _HOOKS_NOTE:
        return True
    if before is _ABSENT and getattr(now, "__module__", None) == _HOOKS_FILE:
        return True
    return _equal(before, now)


def _equal(before, now, depth: int = 0) -> bool:
    """Returns whether both are the same, or equal numbers, texts or small tensors, or the same
    method of the same object, or containers of these."""
    if before is now:
        return True
    if type(before) is not type(now) or depth > DEPTH_MAX:
        return False
    if isinstance(before, dict):
        if before.keys() != now.keys():
            return False
        before, now = before.values(), [now[key] for key in before]
    elif isinstance(before, MethodType):
        # Each access of an object's method makes another.
        return before.__func__ is now.__func__ and before.__self__ is now.__self__
    elif type(before) is torch.Tensor:
        return _are_equal(before, now)
    elif not isinstance(before, (list, tuple)):
        return isinstance(before, (int, float, str)) and before == now
    elif len(before) != len(now):
        return False
    return all(_equal(*each, depth + 1) for each in zip(before, now, strict=True))


def _are_equal(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Returns whether tensors that need no gradient have the same values, if they are small."""
    if _properties(before) != _properties(now) or now.requires_grad:
        return False
    if before.layout is not torch.strided or now.layout is not torch.strided or before.is_meta:
        return False
    return before.nbytes <= BUFFER_BYTES_MAX and torch.equal(before, now)


def _without(source: Source, changing: dict[int, set]) -> Source:
    """``changing``: the keys to leave out, by the container's identity."""
    left_out = changing.get(id(source.container))
    if not left_out:
        return source
    kept = tuple(key for key in source.entries() if key not in left_out)
    if isinstance(source.container, tuple):
        return Source(source.name, tuple(source.container[i] for i in kept))
    if isinstance(source.container, list):
        return Source(source.name, {}, ())
    return Source(source.name, source.container, kept)
