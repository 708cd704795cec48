"""Positions that attention counts by itself.

Most models hand ``position_ids`` down to their layers. Llama 4 scales queries by positions that
each attention counts with ``torch.arange``, from 0. While a thread is inside :class:`use`, these are
the positions of a pass's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .hooked_mode import HookedMode


class use(HookedMode):
    """Context: ``torch.arange(n)`` returns ``positions`` in this thread's ``modules``, if they are
    n."""

    def __init__(self, modules: Sequence[torch.nn.Module], positions: torch.Tensor):
        super().__init__()
        self._modules, self._positions = modules, positions
        self._is_inside = False

    def register_hooks(self):
        for module in self._modules:
            self.before(module, functools.partial(self._set_inside, True))
            self.after(module, functools.partial(self._set_inside, False))

    def _set_inside(self, is_inside: bool) -> None:
        self._is_inside = is_inside

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.arange and self._is_inside and args == (len(self._positions),):
            self._positions = self._positions.to(kwargs.get("device"))
            return self._positions.to(kwargs.get("dtype"), copy=True)
        return function(*args, **kwargs)
