"""Gradient checkpointing during the passes of a step: that of transformers, and that of torch.

Phase A keeps its graph: the prefix sleeps instead of being computed again. Phase B recomputes as
the trainer asks. The recomputation runs inside backward, on a GPU in a thread of autograd's, where
no pass is active: each checkpointed function therefore carries the context of its pass. A function
that was checkpointed outside a pass, by a loss that calls the model, carries none.

transformers takes the cache away from a layer that it checkpoints, because a generation's would be
updated twice. That of a pass returns the same each time, and is given back.

Code that calls ``torch.utils.checkpoint.checkpoint`` by itself is reached by the two names that this
function calls: one for each of torch's ways.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch
from torch.utils import checkpoint as torch_checkpoint
from transformers.cache_utils import Cache

# Attributes in which modules keep their checkpoint function: those of transformers, and those that
# torch's ``checkpoint_wrapper`` made.
_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")

Again = Callable[[], contextlib.AbstractContextManager]
"""Returns the context in which a part of a pass is computed again."""


# Arguments by which layers receive the cache.
_CACHES = ("past_key_values", "layer_past")


@contextlib.contextmanager
def use(model: torch.nn.Module, again: Again | None, cache: Cache | None = None) -> Iterator[None]:
    """Context of a forward of this thread. ``again``: None if nothing is to be checkpointed.
    ``cache``: of the pass."""
    thread = threading.get_ident()

    def checkpoint(own: Callable, function: Callable, *args, **named):
        # Another thread evaluates the model meanwhile.
        if threading.get_ident() != thread:
            return own(function, *args, **named)
        if cache is not None and isinstance(function, functools.partial):
            taken = {name: cache for name in _CACHES if name in function.keywords}
            function = functools.partial(function, **taken)
        if again is None:
            return function(*args, **named)
        return own(_Carrying(function, again), *args, **named)

    replaced = [
        (module.__dict__, name, module.__dict__[name])
        for module in model.modules()
        for name in _FUNCTIONS
        if callable(module.__dict__.get(name))
    ]
    for attributes, name, own in replaced:
        attributes[name] = functools.partial(checkpoint, own)
    try:
        with _Pass(again):
            yield
    finally:
        for attributes, name, own in replaced:
            attributes[name] = own


class _Carrying:
    """A function that enters ``again`` in every call; ``is_forward``: in every call after the
    first, the forward's."""

    def __init__(self, function: Callable, again: Again, *, is_forward: bool = True):
        self._function, self._again, self._is_forward = function, again, is_forward

    def __call__(self, *args, **named):
        if self._is_forward:
            self._is_forward = False
            return self._function(*args, **named)
        with self._again(), _Pass(self._again):
            return self._function(*args, **named)


_active = threading.local()
_lock = threading.Lock()
_users = 0
# Names that torch's function looks up. The second has another name before torch 2.15.
_REENTRANT = "CheckpointFunction"
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
_OWN = {
    name: getattr(torch_checkpoint, name)
    for name in (_REENTRANT, *_GENERATORS)
    if hasattr(torch_checkpoint, name)
}


class _Pass:
    """Context, entered once: torch's function runs in this thread as in a pass. ``again``: see
    :func:`use`."""

    def __init__(self, again: Again | None):
        self.again = again

    def __enter__(self):
        global _users
        self._before = getattr(_active, "pass_", None)
        around = None if self._before is None else self._before.again
        if self.again is not None and around is not None:
            # A check's passes run inside the context of its masks.
            self.again = functools.partial(_both, around, self.again)
        _active.pass_ = self
        with _lock:
            _users += 1
            vars(torch_checkpoint).update(_DISPATCHING)

    def __exit__(self, *exc):
        global _users
        _active.pass_ = self._before
        with _lock:
            _users -= 1
            if _users == 0:
                vars(torch_checkpoint).update(_OWN)


@contextlib.contextmanager
def _both(outer: Again, inner: Again) -> Iterator[None]:
    with outer(), inner():
        yield


class _Reentrant(_OWN[_REENTRANT]):
    @staticmethod
    def apply(function, preserve, *args):
        running = getattr(_active, "pass_", None)
        if running is None or isinstance(function, _Carrying):
            return _OWN[_REENTRANT].apply(function, preserve, *args)
        if running.again is None:
            return function(*args)
        return _OWN[_REENTRANT].apply(_Carrying(function, running.again), preserve, *args)


def _nothing() -> Iterator[None]:
    """Runs around a forward that is not computed again."""
    yield


def _generator(own: Callable) -> Callable:
    @functools.wraps(own)
    def generator(function, *args, **named):
        running = getattr(_active, "pass_", None)
        if running is None or isinstance(function, _Carrying):
            return own(function, *args, **named)
        if running.again is None:
            return _nothing()
        # The forward calls the function itself.
        return own(_Carrying(function, running.again, is_forward=False), *args, **named)

    return generator


_DISPATCHING = {
    name: _Reentrant if name == _REENTRANT else _generator(own) for name, own in _OWN.items()
}
