"""Gradient checkpointing during the passes of a step: that of transformers, and torch's wrappers.

Phase A keeps its graph: the prefix sleeps instead of being computed again. Phase B recomputes as
the trainer asks. The recomputation runs inside backward, on a GPU in a thread of autograd's, where
no pass is active: each checkpointed function therefore carries the context of its pass. A function
that was checkpointed outside a pass, by a loss that calls the model, carries none.

transformers takes the cache away from a layer that it checkpoints, because a generation's would be
updated twice. That of a pass returns the same each time, and is given back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch
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
        return own(_carrying(function, again), *args, **named)

    replaced = [
        (module.__dict__, name, module.__dict__[name])
        for module in model.modules()
        for name in _FUNCTIONS
        if callable(module.__dict__.get(name))
    ]
    for attributes, name, own in replaced:
        attributes[name] = functools.partial(checkpoint, own)
    try:
        yield
    finally:
        for attributes, name, own in replaced:
            attributes[name] = own


def _carrying(function: Callable, again: Again) -> Callable:
    """Returns ``function``, which enters ``again`` in every call after the first, the forward's."""
    is_forward = True

    def call(*args, **named):
        nonlocal is_forward
        if is_forward:
            is_forward = False
            return function(*args, **named)
        with again():
            return function(*args, **named)

    return call
