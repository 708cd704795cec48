"""Torch function modes that follow which module the thread is inside."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

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


class LayerMode(HookedMode):
    """A mode that knows which decoder layer runs."""

    def __init__(self, layers: Sequence[torch.nn.Module]):
        super().__init__()
        self.layers = layers
        self.layer: torch.nn.Module | None = None
        """The layer that the thread is inside."""

    def register_hooks(self):
        for layer in self.layers:
            # A checkpointed layer is computed again without its own hooks.
            for module in layer.modules():
                self.before(module, functools.partial(self._set_layer, layer))
            self.after(layer, functools.partial(self._set_layer, None))

    def _set_layer(self, layer: torch.nn.Module | None) -> None:
        self.layer = layer
