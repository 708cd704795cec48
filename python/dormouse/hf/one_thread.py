"""One thread at a time runs a model's passes.

Passes put other forwards and tensors in the model's place, and a check clears its gradients for a
while. Passes of two threads would see each other's, and gradients would be wrong.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..errors import StateError


class _Holder(NamedTuple):
    thread: int
    name: str


_holders: weakref.WeakKeyDictionary[torch.nn.Module, list[_Holder]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextlib.contextmanager
def holding(model: torch.nn.Module, *, in_backward: bool = False) -> Iterator[None]:
    """Context of passes of a model; this thread may enter it again.

    Raises :class:`dormouse.StateError` if another thread is in such a context. ``in_backward``: for
    a node of a backward, which is never refused: autograd may run it on a thread of its own while
    the step that holds the model waits for it.
    """
    thread = threading.current_thread()
    own = _Holder(thread.ident, thread.name)
    with _lock:
        holders = _holders.setdefault(model, [])
        others = [each for each in holders if each.thread != own.thread]
        if others and not in_backward:
            raise StateError(
                f"thread {others[0].name!r} runs passes of this model; accepted: one thread at a "
                "time"
            )
        holders.append(own)
    try:
        yield
    finally:
        with _lock:
            holders.remove(own)


def _forget() -> None:
    """In a forked child: its other threads, one of which may have had the lock, are gone."""
    global _lock
    _lock = threading.Lock()
    _holders.clear()


os.register_at_fork(after_in_child=_forget)
