"""Windows, chunks and other lengths at which attention changes, shortened for one thread.

A check shortens them so that its few tokens exceed each. They are attributes of modules and
configurations. While a thread is inside :class:`use`, their classes report them as short to that
thread. Other threads may evaluate the model at the same time; they read the real values.
"""

from __future__ import annotations

import threading

import torch

NAMES = ("sliding_window", "attention_chunk_size", "floor_scale")
TOKENS = 3
"""What takes the place of longer ones."""

_active = threading.local()
_lock = threading.Lock()
_users: dict[tuple[type, str], int] = {}
ABSENT = object()
"""In place of an attribute that a class does not have."""


class _OfThread:
    """An attribute in the place of a class's own, or of none."""

    def __init__(self, name: str, own):
        self.name, self.own = name, own

    def __get__(self, owner, kind=None):
        if owner is None or self.name not in owner.__dict__:
            return self._of_class(kind or type(owner))
        value = owner.__dict__[self.name]
        longest = getattr(_active, "longest", None)
        if longest is None or type(value) is not int or value <= longest:
            return value
        return TOKENS

    def __set__(self, owner, value):
        owner.__dict__[self.name] = value

    def __delete__(self, owner):
        if self.name not in owner.__dict__:
            raise AttributeError(self.name)
        del owner.__dict__[self.name]

    def _of_class(self, kind: type):
        for each in kind.__mro__:
            found = outside(vars(each).get(self.name, ABSENT))
            if found is not ABSENT:
                return found
        raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")


def outside(value):
    """Returns what a class has outside where ``value`` is inside; another value as it is."""
    return value.own if isinstance(value, _OfThread) else value


class use:
    """Context: to this thread, lengths of the model above ``longest`` tokens are short."""

    def __init__(self, model: torch.nn.Module, longest: int):
        owners: dict[int, object] = {}
        for module in model.modules():
            owners[id(module)] = module
            for value in list(module.__dict__.values()):
                if hasattr(value, "to_dict") and not isinstance(value, (type, torch.nn.Module)):
                    for config in (value, *vars(value).values()):
                        if hasattr(config, "to_dict") and not isinstance(config, type):
                            owners[id(config)] = config
        self._longest = longest
        self._places = {
            (type(owner), name)
            for owner in owners.values()
            for name in NAMES
            if type(owner.__dict__.get(name)) is int and owner.__dict__[name] > longest
        }

    def __enter__(self):
        self._before = getattr(_active, "longest", None)
        _active.longest = self._longest
        with _lock:
            for kind, name in self._places:
                _users[kind, name] = _users.get((kind, name), 0) + 1
                own = vars(kind).get(name, ABSENT)
                if not isinstance(own, _OfThread):
                    setattr(kind, name, _OfThread(name, own))

    def __exit__(self, *exc):
        with _lock:
            for kind, name in self._places:
                _users[kind, name] -= 1
                if _users[kind, name]:
                    continue
                del _users[kind, name]
                own = vars(kind)[name].own
                if own is ABSENT:
                    delattr(kind, name)
                else:
                    setattr(kind, name, own)
        _active.longest = self._before
