"""A torch function mode that follows which module the thread is inside."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode


class HookedMode(TorchFunctionMode):
    """A mode with forward hooks on modules while it is active. Hooks act only on the thread that
    entered it: another thread may evaluate the model meanwhile."""

    def register_hooks(self) -> None:
        """Called on entry: calls :meth:`before` and :meth:`after`."""
        raise NotImplementedError

    def before(self, module: torch.nn.Module, act: Callable[[], None]) -> None:
        """Calls ``act`` before each forward of ``module``."""
        self._hooks.append(module.register_forward_pre_hook(lambda *call: self._here(act)))

    def after(self, module: torch.nn.Module, act: Callable[[], None]) -> None:
        """Calls ``act`` after each forward of ``module``, also after an error."""
        hook = module.register_forward_hook(lambda *call: self._here(act), always_call=True)
        self._hooks.append(hook)

    def __enter__(self):
        self._thread, self._hooks = threading.get_ident(), []
        self.register_hooks()
        return super().__enter__()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*exc)

    def _here(self, act: Callable[[], None]) -> None:
        if threading.get_ident() == self._thread:
            act()
