"""Activation offloading alone: :func:`offload`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from .activations.forwards import Forwards, are_managed
from .activations.layers import check_layers, find_layers, is_compiled
from .activations.passes import Pass
from .activations.report import BY_COPY, IN_PLACE, OffloadReport, why_awake
from .asleep import why_no_tier, why_not_in_place
from .errors import ArgumentError, StateError
from .install import installed
from .runtime import Runtime


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
    by the next step, and inside that of another model. Hooks for saved tensors that are entered
    inside take precedence.

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
    reason = why_not_in_place(runtime)
    if in_place and reason is not None:
        raise ArgumentError(f"in_place=True is not possible: {reason}")
    is_in_place = reason is None and in_place is not False
    return Offload(model, runtime, layers, IN_PLACE if is_in_place else BY_COPY)


class Offload(Forwards):
    """The context of :func:`offload`."""

    def __init__(self, model: torch.nn.Module, runtime: Runtime, layers: list, way: str):
        super().__init__(model, runtime, layers, way, runtime.info()["window_layers"])
        self._report = OffloadReport(way)
        self._has_warned = False

    def report(self) -> OffloadReport:
        """Returns a copy of the figures of the latest forward whose graph is freed."""
        self.finish()
        return replace(self._report)

    def _finished(self, ended: Pass) -> None:
        self._report = replace(ended.report, forwards=self._report.forwards + 1)
        # A forward with more calls of layers than expected tells the next one how many.
        if ended.report.layer_calls <= ended.calls_expected:
            self._warn_if_awake(ended)

    def _warn_if_awake(self, ended: Pass) -> None:
        report = self._report
        # Layers may save parameters alone.
        is_telling = report.saved_bytes > 0 or report.layer_calls == 0 or not ended.has_saves
        # Backward may have begun before anything was written.
        came_late = report.prefix.get("dormant_bytes") and not report.prefix["declined"]
        if self._has_warned or report.asleep_bytes or came_late or not is_telling:
            return
        self._has_warned = True
        reason = why_no_tier(self._runtime) or why_awake(report, self._window_layers)
        warnings.warn(f"dormouse.offload: nothing slept: {reason}", RuntimeWarning, stacklevel=5)


def in_place(
    model: torch.nn.Module, runtime: Runtime, layers: Sequence[torch.nn.Module]
) -> Forwards | None:
    """Returns the context in which all that forwards save sleeps in place, that of their last layers
    too, because other work comes before their backward. None where that is not possible: see
    :func:`offload`; or another context manages the layers."""
    can_sleep = why_not_in_place(runtime) is None and runtime.info()["tiers"]
    if not can_sleep or are_managed(layers) or is_compiled(model):
        return None
    return Forwards(model, runtime, list(layers), IN_PLACE, 0)


def _installed_runtime() -> Runtime:
    found = installed()
    if found is None:
        raise StateError(
            "no runtime: dormouse is not installed; accepted: offload(model, runtime=...), or "
            "dormouse.install() before"
        )
    return found.runtime
