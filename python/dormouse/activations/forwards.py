"""The forwards of a model whose saved activations sleep: hooks at the borders of its layers."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from ..errors import StateError
from ..modes.copying import Awake, SavedTensorOffload, is_capturing
from ..runtime import Runtime
from .layers import check_not_compiled, modules_around
from .passes import ByCopy, InPlace, Pass
from .report import BY_COPY, OffloadReport

# Layers whose saved tensors an open context manages.
_managed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class _Open(threading.local):
    """The open contexts of a thread, the innermost last."""

    def __init__(self):
        self.contexts: list[Forwards] = []


_open = _Open()


def are_managed(layers: Sequence[torch.nn.Module]) -> bool:
    """Returns whether an open context manages one of the layers."""
    return not _managed.isdisjoint(layers)


class Forwards:
    """A context in which what forwards with a graph save sleeps until their backward. It can be
    entered again. Not thread-safe: forwards run on the thread that entered it, backwards on any."""

    def __init__(
        self,
        model: torch.nn.Module,
        runtime: Runtime,
        layers: list[torch.nn.Module],
        way: str,
        window_layers: int,
    ):
        """``layers``: modules inside ``model``, side by side. ``way``: see :class:`OffloadReport`.
        ``window_layers``: the last calls of layers in a forward, whose saved tensors stay awake."""
        self._model = model
        self._runtime = runtime
        self._layers = layers
        self._way = way
        self._around = modules_around(model, layers)
        self._window_layers = window_layers
        # Calls of layers in a forward: the most seen so far.
        self._calls = len(layers)
        self._copying = None
        if way == BY_COPY:
            self._copying = SavedTensorOffload(runtime, [*model.parameters(), *model.buffers()])
        self._exit: contextlib.ExitStack | None = None
        self._thread = 0
        # The forward that runs, the module whose call it is, and the layer that runs.
        self._pass: Pass | None = None
        self._root: torch.nn.Module | None = None
        self._layer: torch.nn.Module | None = None
        # Forwards that have ended, and whose reports are not complete.
        self._ended: list[Pass] = []
        runtime._contexts.add(self)

    def __enter__(self) -> Forwards:
        check_not_compiled(self._model)
        if are_managed(self._layers):
            raise StateError(
                "the model's layers are in another dormouse.offload context; accepted: one at a "
                "time"
            )
        self._thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            _managed.update(self._layers)
            stack.callback(_managed.difference_update, self._layers)
            for module in self._around:
                self._hook(stack, module, Forwards._begin, Forwards._end)
            for layer in self._layers:
                self._hook(stack, layer, Forwards._begin_layer, Forwards._end_layer)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_save, _restore))
            _open.contexts.append(self)
            stack.callback(_open.contexts.remove, self)
            stack.callback(self._leave)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc):
        self._exit.__exit__(*exc)
        self.finish()

    def finish(self, *, latest: int = 0) -> None:
        """Closes forwards whose graphs are freed, but for the ``latest``."""
        over = [each for each in self._ended[: len(self._ended) - latest] if each.is_over]
        self._ended = [each for each in self._ended if each not in over]
        for each in over:
            each.finish()
            self._finished(each)

    def wake_ahead(self) -> None:
        """Starts to wake what the backward of the latest forward needs first."""
        for each in reversed(self._ended):
            if not each.is_over:
                each.wake_ahead()
                return

    def _finished(self, ended: Pass) -> None:
        """Called when the report of a forward is complete."""

    def _hook(self, stack, module: torch.nn.Module, before: Callable, after: Callable) -> None:
        """Calls ``before`` and ``after`` around each forward of a module in this thread. ``after``
        also if the forward raises an ``Exception``; not after an interrupt."""
        before, after = (_Hook(self, module, each) for each in (before, after))
        stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
        stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _begin(self, module: torch.nn.Module) -> None:
        if self._pass is not None and module is not self._root:
            return
        # A call that an interrupt ended.
        self._leave()
        if not torch.is_grad_enabled() or is_capturing(self._runtime.device):
            return
        # All but the latest, whose end a GPU may not have reached.
        self.finish(latest=1)
        report = OffloadReport(self._way)
        expected = self._runtime, report, self._calls, self._window_layers
        if self._copying is None:
            self._pass = InPlace(*expected, self._ended[-1] if self._ended else None)
        else:
            self._pass = ByCopy(*expected, self._copying)
        self._root = module

    def _end(self, module: torch.nn.Module) -> None:
        if module is self._root:
            self._leave()

    def _leave(self) -> None:
        """Ends the forward that runs, if one does."""
        ended, self._pass, self._root, self._layer = self._pass, None, None, None
        if ended is not None:
            self._ended.append(ended)
            ended.end()
            self._calls = max(self._calls, ended.report.layer_calls)

    def _begin_layer(self, layer: torch.nn.Module) -> None:
        if self._pass is not None and self._layer is None:
            self._layer = layer
            self._pass.begin_layer()

    def _end_layer(self, layer: torch.nn.Module) -> None:
        if self._pass is not None and self._layer is layer:
            self._layer = None
            self._pass.end_layer()


class _Hook:
    """Calls a method of a context at each forward of one module in the context's thread, but not
    where backward computes it again. Copies do nothing: a model that is copied or pickled inside
    has the hooks too, and must not refer to the context."""

    def __init__(self, context: Forwards, module: torch.nn.Module, method: Callable):
        self._context, self._module = weakref.ref(context), weakref.ref(module)
        self._method = method

    def __call__(self, module: torch.nn.Module, *args) -> None:
        context = self._context()
        if context is None or module is not self._module():
            return
        is_forward = torch._C._current_graph_task_id() == -1
        if is_forward and threading.get_ident() == context._thread:
            self._method(context, module)

    def __reduce__(self):
        return _NoHook, ()


class _NoHook:
    """A copy of a hook."""

    def __call__(self, *args) -> None:
        pass


def _save(tensor: torch.Tensor):
    """Torch calls the hooks of the innermost context alone, whose model may not be the one that
    runs."""
    for context in reversed(_open.contexts):
        if context._pass is not None:
            return context._pass.save(tensor)
    return Awake.of(tensor)


def _restore(kept) -> torch.Tensor:
    return kept.restore()
