"""Activation offloading alone: :func:`offload`."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .activations.layers import check_layers, check_not_compiled, find_layers, modules_around
from .activations.passes import ByCopy, InPlace, Pass
from .activations.report import BY_COPY, IN_PLACE, OffloadReport, why_awake
from .errors import ArgumentError, StateError
from .install import installed
from .modes.copying import Awake, SavedTensorOffload, is_capturing
from .runtime import Runtime

# Layers whose saved tensors an open context manages.
_managed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def offload(
    model: torch.nn.Module,
    runtime: Runtime | None = None,
    *,
    layers: Sequence[torch.nn.Module] | None = None,
    in_place: bool | None = None,
) -> Offload:
    """Returns a context in which the saved activations of a model sleep between forward and
    backward.

    ::

        with dormouse.offload(model, runtime=runtime) as off:
            loss = model(**batch).loss
            loss.backward()
        print(off.report())

    Loss and gradients are those of the plain step, bit for bit. Inside there may be any number of
    forwards and backwards, in any order: accumulation, several forwards for one loss, evaluation
    under ``torch.no_grad()``, in which nothing sleeps. Backward may also run after the context. An
    exception between forward and backward leaves nothing behind. The context can be entered again,
    by the next step.

    ``model``: on the runtime's device; of any library, in DistributedDataParallel or not, with
    gradient checkpointing or not (then the inputs of layers sleep). ``runtime``: whose tiers hold
    what sleeps; defaults to that of :func:`dormouse.install`. ``layers``: the modules of ``model``
    whose saved activations sleep, none inside another; the default is the longest ModuleList or
    Sequential that repeats its classes, so of an encoder and a decoder name both. A layer may be
    called several times in a forward, as with shared weights: each call counts as one layer, from
    the second forward on.

    What the last layers of a forward saved stays awake, because backward needs it first: as many as
    the runtime wakes ahead (``Runtime(window_layers=)``, 3). So do storages below 64 KiB in place
    and 1 MiB by copy, and whatever else holds: parameters, inputs, outputs, caches.

    ``in_place``: the default is in place where dormouse manages the model's memory: on the CPU
    under the preload library, on a GPU in mode ``"allocator"``. Elsewhere saved tensors are copied
    out and back, by the calling thread. ``False`` always copies.

    If nothing can sleep, one ``RuntimeWarning`` says why and what helps.

    Raises :class:`ArgumentError` for a model without repeated layers, for layers that are not
    modules of the model, for a model on another device or compiled by ``torch.compile``, and for
    ``in_place=True`` where that is not possible; :class:`StateError` without a runtime, and on
    entering while another context has the same layers. Forward and backward raise
    :class:`MemoryTierError`, :class:`StorageError` or :class:`DeviceError` if memory cannot wake;
    zero the gradients before the next attempt.

    Not thread-safe: forwards of one context run on the thread that entered it. Other threads can
    use the model meanwhile; what they save stays awake.
    """
    runtime = runtime or _installed_runtime()
    layers = find_layers(model) if layers is None else check_layers(model, layers)
    elsewhere = {each.device for each in model.parameters()} - {runtime.device}
    if elsewhere:
        raise ArgumentError(
            f"the model has parameters on {elsewhere.pop()}; accepted: all on {runtime.device}, "
            "the runtime's device"
        )
    reason = _why_not_in_place(runtime)
    if in_place and reason is not None:
        raise ArgumentError(f"in_place=True is not possible: {reason}")
    is_in_place = reason is None and in_place is not False
    return Offload(model, runtime, layers, IN_PLACE if is_in_place else BY_COPY)


class Offload:
    """The context of :func:`offload`."""

    def __init__(self, model: torch.nn.Module, runtime: Runtime, layers: list, way: str):
        self._model = model
        self._runtime = runtime
        self._layers = layers
        self._around = modules_around(model, layers)
        self._report = OffloadReport(way)
        self._window_layers = runtime.info()["window_layers"]
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
        self._has_warned = False

    def report(self) -> OffloadReport:
        """Returns a copy of the figures of the latest forward whose graph is freed."""
        self._finish(0)
        return replace(self._report)

    def __enter__(self) -> Offload:
        check_not_compiled(self._model)
        if not _managed.isdisjoint(self._layers):
            raise StateError(
                "the model's layers are in another dormouse.offload context; accepted: one at a "
                "time"
            )
        self._thread = threading.get_ident()
        with contextlib.ExitStack() as stack:
            _managed.update(self._layers)
            stack.callback(_managed.difference_update, self._layers)
            for module in self._around:
                self._hook(stack, module, self._begin, self._end)
            for layer in self._layers:
                self._hook(stack, layer, self._begin_layer, self._end_layer)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._save, _restore)
            stack.enter_context(hooks)
            stack.callback(self._leave)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc):
        self._exit.__exit__(*exc)
        self._finish(0)

    def _hook(self, stack, module: torch.nn.Module, before: Callable, after: Callable) -> None:
        """Calls ``before(module)`` and ``after(module)`` around each forward of a module in this
        thread, but not where backward computes it again."""

        def is_own() -> bool:
            is_forward = torch._C._current_graph_task_id() == -1
            return is_forward and threading.get_ident() == self._thread

        def pre_hook(module, args) -> None:
            if is_own():
                before(module)

        def hook(module, args, output) -> None:
            if is_own():
                after(module)

        stack.callback(module.register_forward_pre_hook(pre_hook, prepend=True).remove)
        stack.callback(module.register_forward_hook(hook).remove)

    def _begin(self, module: torch.nn.Module) -> None:
        if self._pass is not None and module is not self._root:
            return
        # A call that an error ended.
        self._leave()
        if not torch.is_grad_enabled() or is_capturing(self._runtime.device):
            return
        # All but the latest, whose end a GPU may not have reached.
        self._finish(1)
        report = OffloadReport(self._report.way)
        expected = self._runtime, report, self._calls, self._window_layers
        if self._copying is None:
            self._pass = InPlace(*expected)
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

    def _save(self, tensor: torch.Tensor):
        return Awake.of(tensor) if self._pass is None else self._pass.save(tensor)

    def _finish(self, latest: int) -> None:
        """Completes the reports of forwards whose graphs are freed, but for the ``latest``."""
        over = [each for each in self._ended[: len(self._ended) - latest] if each.is_over]
        self._ended = [each for each in self._ended if each not in over]
        for each in over:
            each.finish()
            self._report = replace(each.report, forwards=self._report.forwards + 1)
            # A forward with more calls of layers than expected tells the next one how many.
            if each.report.layer_calls <= each.calls_expected:
                self._warn_if_awake()

    def _warn_if_awake(self) -> None:
        report = self._report
        has_saved = report.saved_bytes > 0 or report.layer_calls == 0
        # Backward may have begun before anything was written.
        came_late = report.prefix.get("dormant_bytes") and not report.prefix["declined"]
        if self._has_warned or report.asleep_bytes or came_late or not has_saved:
            return
        self._has_warned = True
        reason = why_awake(report, self._runtime, self._window_layers)
        warnings.warn(f"dormouse.offload: nothing slept: {reason}", RuntimeWarning, stacklevel=4)


def _restore(kept) -> torch.Tensor:
    return kept.restore()


def _installed_runtime() -> Runtime:
    found = installed()
    if found is None:
        raise StateError(
            "no runtime: dormouse is not installed; accepted: offload(model, runtime=...), or "
            "dormouse.install() before"
        )
    return found.runtime


def _why_not_in_place(runtime: Runtime) -> str | None:
    """Returns why memory of the runtime's device cannot sleep in place, or None."""
    if runtime.device.type == "cpu":
        if "preload" in runtime.info()["modes"]:
            return None
        return "the process was not started under LD_PRELOAD=libdormouse_preload.so"
    found = installed()
    if found is not None and found.mode == "allocator" and found.runtime is runtime:
        return None
    return "dormouse is not torch's CUDA allocator; call dormouse.install() before the first tensor"
