"""transformers' gradient checkpointing during the passes of a step.

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

# The attribute in which transformers keeps a module's checkpoint function.
_FUNCTION = "_gradient_checkpointing_func"

Again = Callable[[], contextlib.AbstractContextManager]
"""Returns the context in which a part of a pass is computed again."""


@contextlib.contextmanager
def use(model: torch.nn.Module, again: Again | None) -> Iterator[None]:
    """Context of a forward of this thread. ``again``: None if nothing is to be checkpointed."""
    thread = threading.get_ident()

    def checkpoint(own: Callable, function: Callable, *args):
        # Another thread evaluates the model meanwhile.
        if threading.get_ident() != thread:
            return own(function, *args)
        return function(*args) if again is None else own(_carrying(function, again), *args)

    replaced = [(m.__dict__, m.__dict__[_FUNCTION]) for m in model.modules() if _has(m)]
    for attributes, own in replaced:
        attributes[_FUNCTION] = functools.partial(checkpoint, own)
    try:
        yield
    finally:
        for attributes, own in replaced:
            attributes[_FUNCTION] = own


def _has(module: torch.nn.Module) -> bool:
    return _FUNCTION in module.__dict__


def _carrying(function: Callable, again: Again) -> Callable:
    """Returns ``function``, which enters ``again`` in every call after the first, the forward's."""
    is_forward = True

    def call(*args):
        nonlocal is_forward
        if is_forward:
            is_forward = False
            return function(*args)
        with again():
            return function(*args)

    return call
