"""Positions that attention counts by itself.

Most models hand ``position_ids`` down to their layers. Llama 4 scales queries by positions that
each attention counts with ``torch.arange``, from 0. While a thread is inside :class:`use`, these are
the positions of a pass's rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.overrides import TorchFunctionMode


class use(TorchFunctionMode):
    """Context: ``torch.arange(n)`` returns ``positions`` in this thread's ``modules``, if they are
    n."""

    def __init__(self, modules: Sequence[torch.nn.Module], positions: torch.Tensor):
        super().__init__()
        self._modules, self._positions = modules, positions
        self._is_inside = False

    def __enter__(self):
        thread = threading.get_ident()

        def enter(module, args):
            # Another thread evaluates the model meanwhile.
            if threading.get_ident() == thread:
                self._is_inside = True

        def leave(module, args, output):
            if threading.get_ident() == thread:
                self._is_inside = False

        self._hooks = []
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(enter))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*exc)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.arange and self._is_inside and args == (len(self._positions),):
            self._positions = self._positions.to(kwargs.get("device"))
            return self._positions.to(kwargs.get("dtype"), copy=True)
        return function(*args, **kwargs)
