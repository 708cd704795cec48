"""Gradient checkpointing during the passes of a step: that of transformers, and torch's wrappers.

Phase A keeps its graph: the prefix sleeps instead of being computed again. Phase B recomputes as
the trainer asks. The recomputation runs inside backward, on a GPU in a thread of autograd's, where
no pass is active: each checkpointed function therefore carries the context of its pass. A function
that was checkpointed outside a pass, by a loss that calls the model, carries none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

# Attributes in which modules keep their checkpoint function: those of transformers, and those that
# torch's ``checkpoint_wrapper`` made.
_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")

Again = Callable[[], contextlib.AbstractContextManager]
"""Returns the context in which a part of a pass is computed again."""


@contextlib.contextmanager
def use(model: torch.nn.Module, again: Again | None) -> Iterator[None]:
    """Context of a forward of this thread. ``again``: None if nothing is to be checkpointed."""
    thread = threading.get_ident()

    def checkpoint(own: Callable, function: Callable, *args, **named):
        # Another thread evaluates the model meanwhile.
        if threading.get_ident() != thread:
            return own(function, *args, **named)
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
