"""The two sides compared, dense and shared prefix, eager or compiled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

import dormouse
import dormouse.hf

from . import dense, models
from .shapes import COMPILED, Geometry

# Compiled graphs of one function: one per length of prompt and of microbatch, the check's and the
# probe's.
GRAPHS_MAX = 64
# Dense batch size tried in addition to 1. Larger ones exceed one GPU.
BATCH_MAX = 2


class Dense:
    """Every response with its own prompt, under torch's allocator."""

    def __init__(self, model, geometry: Geometry, device: torch.device):
        self._model = model
        self._device = device
        self._layers = Layers(model)
        self._kernel: str | None = None
        self._taken: dict[str, float] = {}
        self._batch = 1
        # Bytes of each weight's storage while the side rests.
        self._rested: list[int] = []

    def step(self, group, loss_fn, way: str, *, on_phase: Callable[[str], None], **_) -> dict:
        """Adds the group's gradients."""
        self._layers.run(way)
        on_phase("step")
        with dense.kernel(self._kernel):
            loss = dense.backward(self._model, group, loss_fn, self._device, self._batch)
        on_phase("end")
        return {"loss": float(loss)}

    def choose(self, group, loss_fn) -> dict:
        """Selects the fastest available attention kernel, and the faster batch size of 1 and
        :data:`BATCH_MAX`. Returns seconds per response of each that fits memory.

        Selected once, eager, for all groups and for compiled runs: lengths are equal, and compiling
        each choice would take minutes.
        """
        if self._device.type == "cuda" and not self._taken:
            self._taken = self._choose(group, loss_fn)
        return self._taken

    def _choose(self, group, loss_fn) -> dict:
        taken = {name: self._try(group, loss_fn, name) for name in dense.KERNELS}
        taken = {name: seconds for name, seconds in taken.items() if seconds is not None}
        if not taken:
            return {}
        self._kernel = min(taken, key=taken.get)
        self._batch = BATCH_MAX
        together = self._try(group, loss_fn, self._kernel)
        if together is not None:
            taken[f"{BATCH_MAX} at once, {self._kernel}"] = together
        if together is None or together >= taken[self._kernel]:
            self._batch = 1
        return taken

    def _try(self, group, loss_fn, kernel: str) -> float | None:
        """Returns seconds per response; None if the kernel is unavailable or memory is short."""
        seconds = None
        with contextlib.suppress(RuntimeError), dense.kernel(kernel):
            for _ in range(2):  # the first is a warm-up
                start = time.monotonic()
                dense.backward(self._model, group, loss_fn, self._device, self._batch)
                torch.cuda.synchronize(self._device)
                seconds = (time.monotonic() - start) / len(group.responses)
        self.trim()
        return seconds

    def checkpoint(self, on: bool) -> None:
        """Switches activation checkpointing of every layer."""
        if on:
            options = {"use_reentrant": False}
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        else:
            self._model.gradient_checkpointing_disable()

    def rest(self) -> None:
        """Gives the weights' memory back: no step changes them; :meth:`wake` makes them anew."""
        if self._device.type == "cuda" and not self._rested:
            storages = [parameter.untyped_storage() for parameter in self._model.parameters()]
            self._rested = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)

    def wake(self) -> None:
        """Makes the weights again after :meth:`rest`."""
        if self._rested:
            for parameter, count in zip(self._model.parameters(), self._rested, strict=True):
                parameter.untyped_storage().resize_(count)
            models.fill(self._model)
            self._rested = []

    def trim(self) -> None:
        """Releases cached memory."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class Ours:
    """The shared schedule, asleep or awake; dormouse is the process's allocator."""

    def __init__(self, model, geometry: Geometry, runtime: dormouse.Runtime):
        self._model = model
        self._microbatch_tokens = geometry.microbatch_tokens
        self._runtime = runtime
        self._budget_bytes = runtime.info()["alloc_budget_bytes"]
        self._layers = Layers(model)
        # One per way: a check holds for the layers as they run.
        self._shared: dict[tuple[str, bool], dormouse.hf.SharedPrefix] = {}

    def step(
        self,
        group,
        loss_fn,
        way: str,
        *,
        on_phase: Callable[[str], None],
        sleep: bool = True,
        microbatch_tokens: int | None = None,
    ) -> dict:
        """Adds the group's gradients. ``microbatch_tokens``: defaults to the geometry's."""
        self._layers.run(way)
        report = self._of(way, sleep).backward(
            group,
            loss_fn,
            microbatch_tokens=microbatch_tokens or self._microbatch_tokens,
            on_phase=on_phase,
        )
        return {
            "loss": report.loss,
            "counts": report.counts,
            "prefix": report.prefix,
            "notes": list(report.notes),
            "attention": dormouse.hf.attention_choices(),
        }

    def predict(self, group) -> dict:
        """Returns the plan's prediction without running a step."""
        return self._of("eager", True).predict(group, microbatch_tokens=self._microbatch_tokens)

    def checkpoint(self, on: bool) -> None:
        """Switches activation checkpointing: of the responses, since the prompt sleeps."""
        Dense.checkpoint(self, on)

    def limit(self, device_bytes: int | None) -> None:
        """Sets the runtime's device budget; None sets the one it was made with."""
        self._runtime.set_budget("device", device_bytes or self._budget_bytes)

    def rest(self) -> None:
        """Keeps the weights: the schedule's check compares the model with the one it saw."""

    def wake(self) -> None:
        """Nothing rests."""

    def trim(self) -> None:
        """Releases cached memory."""
        self._runtime.trim()

    def _of(self, way: str, sleep: bool) -> dormouse.hf.SharedPrefix:
        key = way, sleep
        if key not in self._shared:
            self._shared[key] = dormouse.hf.SharedPrefix(self._model, self._runtime, sleep=sleep)
        return self._shared[key]


class Layers:
    """A model's layers, run eager or compiled, each alone. Hooks and the schedule's attention stay
    outside. Lengths are few, and a graph of any length is slower."""

    def __init__(self, model):
        self._layers = model.model.layers
        self._compiled: list | None = None

    def run(self, way: str) -> None:
        """Selects how they run from now on."""
        if way == COMPILED and self._compiled is None:
            torch._dynamo.config.recompile_limit = GRAPHS_MAX
            self._compiled = [torch.compile(each.forward, dynamic=False) for each in self._layers]
        for index, layer in enumerate(self._layers):
            if way == COMPILED:
                layer.forward = self._compiled[index]
            else:
                layer.__dict__.pop("forward", None)


def make(side: str, geometry: Geometry, device: torch.device, options: dict):
    """Creates a side with its own model. ``options``: of the runtime, for the shared side."""
    if side == "dense":
        return Dense(models.build(models.config_of(geometry), device), geometry, device), None
    installed = dormouse.install("host" if device.type == "cpu" else device, **options)
    model = models.build(models.config_of(geometry), device)
    return Ours(model, geometry, installed.runtime), installed
