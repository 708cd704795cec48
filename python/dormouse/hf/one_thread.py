"""One thread at a time runs a model's passes.

Passes put other forwards and tensors in the model's place, and a check clears its gradients for a
while. Passes of two threads would see each other's, and gradients would be wrong.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..errors import StateError


class _Holder(NamedTuple):
    thread: int
    name: str


_holders: weakref.WeakKeyDictionary[torch.nn.Module, _Holder] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def holding(module: torch.nn.Module, *, in_backward: bool = False) -> Iterator[None]:
    """Context of passes of the model that has ``module``; this thread may enter it again.

    Raises :class:`dormouse.StateError` if another thread is in such a context. ``in_backward``: not
    in a node of a backward, which autograd may run on a thread of its own for a step that waits.
    """
    thread = threading.current_thread()
    with _lock:
        holder = _holders.get(module)
        if holder is not None and holder.thread != thread.ident and not in_backward:
            raise StateError(
                f"thread {holder.name!r} runs passes of this model; accepted: one thread at a time"
            )
        if holder is None:
            _holders[module] = _Holder(thread.ident, thread.name)
    try:
        yield
    finally:
        if holder is None:
            with _lock:
                del _holders[module]
