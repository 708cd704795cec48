"""Phase A: the prefix's forward, which keeps its graph and ends at the last layer's K and V."""

from __future__ import annotations

import threading

import torch

from .. import _native as native
from ..runtime import Prefix
from . import attention, checkpointing, dropout, graph, registry, support
from .probe import Probe, TouchRecorder
from .sharding import PrefixDone, ReplicatedWeights

KEY, VALUE = 0, 1


class PrefixForward:
    """Phase A's results: per layer the live K and V, their detached leaves, and the graph."""

    def __init__(self, view: support.ModelView, weights: ReplicatedWeights):
        self.view = view
        self.weights = weights
        self.live: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outputs: list[torch.Tensor] = []
        self.layer_of: dict[torch.nn.Module, int] = {}
        """The layer of each module that called attention."""
        self._running: int | None = None

    def attend(self, call: registry.Call) -> torch.Tensor:
        """Attention function during A: captures K and V, ends the forward at the last layer."""
        layer = self._running
        if layer is None or layer != len(self.live):
            raise support.UnsupportedModelError(
                f"{type(call.module).__name__} runs attention outside a layer or more than once "
                "in a layer; accepted: one attention per layer"
            )
        key, value = call.key, _apart(call.value)
        is_last = layer == len(self.view.layers) - 1
        if is_last:
            key, value = self.weights.seam(key, value)
        self.layer_of[call.module] = layer
        self.live.append((key, value))
        self.leaves.append((key.detach(), value.detach()))
        self.captured(layer, key, value)
        if is_last:
            raise PrefixDone
        return attention.causal(call.query, key, value, call.rules, call.sinks)

    def captured(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Called with each layer's K and V as soon as they exist."""

    def began(self, layer: int) -> None:
        """Called before a layer's forward."""

    def ended(self, layer: int, roots: list[torch.Tensor]) -> None:
        """Called after a layer's forward; ``roots``: its outputs that later layers read."""

    def forward(self, tokens: torch.Tensor) -> None:
        """Runs phase A over ``tokens`` (1-D) under autograd."""
        last = len(self.view.layers) - 1
        handles = []
        for index, layer in enumerate(self.view.layers):
            handles.append(layer.register_forward_pre_hook(self._pre_hook(index)))
            handles.append(layer.register_forward_hook(self._hook(index)))
        self._thread = threading.get_ident()
        positions = torch.arange(len(tokens), device=tokens.device)
        try:
            with (
                registry.use(self.attend),
                # The graph is kept: what it saved sleeps instead of being computed again.
                checkpointing.use(self.view.model, None),
                dropout.of_prompt(self.view),
            ):
                self.weights.run_prefix(
                    self.view,
                    lambda: self.view.run(tokens, positions),
                    lambda: self.live[last],
                )
        finally:
            for handle in handles:
                handle.remove()
        if len(self.live) <= last:
            raise support.UnsupportedModelError(
                f"the model runs {len(self.live)} of its {last + 1} layers; accepted: every layer "
                "once, in order"
            )
        self.ended(last, list(self.live[last]))

    def _pre_hook(self, index):
        @torch.compiler.disable
        def hook(module, args):
            # Another thread evaluates the model meanwhile.
            if threading.get_ident() != self._thread:
                return
            if index != len(self.live):
                raise support.UnsupportedModelError(
                    f"layer {index} runs after {len(self.live)} layers; accepted: every layer "
                    "once, in order"
                )
            self._running = index
            self.began(index)

        return hook

    def _hook(self, index):
        @torch.compiler.disable
        def hook(module, args, output):
            if threading.get_ident() != self._thread:
                return
            self._running = None
            if len(self.live) != index + 1:
                raise support.UnsupportedModelError(
                    f"layer {index} ({type(module).__name__}) runs no attention through "
                    "transformers' AttentionInterface; accepted: softmax attention through it, "
                    "once per layer"
                )
            if index == len(self.view.layers) - 1:
                return
            hidden = output[0] if isinstance(output, tuple) else output
            self.outputs.append(hidden)
            self.ended(index, [hidden])

        return hook


def _apart(value: torch.Tensor) -> torch.Tensor:
    """Returns ``value`` in memory of its own: part of a fused projection would keep the whole of
    it awake."""
    own_bytes = value.numel() * value.element_size()
    return value if value.untyped_storage().nbytes() == own_bytes else value.clone()


class PlannedForward(PrefixForward):
    """Phase A that names to the runtime's prefix what each layer saved."""

    def __init__(
        self,
        view: support.ModelView,
        weights: ReplicatedWeights,
        prefix: Prefix,
        probe: Probe | None,
    ):
        super().__init__(view, weights)
        self._prefix = prefix
        self._probe = probe
        self._visited: set = set()
        self._awake = _owned_storages(view)
        self.notes: list[str] = []

    def captured(self, layer, key, value):
        for slot, tensor in ((KEY, key), (VALUE, value)):
            storage = tensor.untyped_storage()
            self._prefix.boundary(
                layer, slot, storage.data_ptr(), storage.nbytes(), tensor.numel(), tensor.dtype
            )

    def began(self, layer):
        self._prefix.mark(native.Edge.FORWARD_BEGIN, layer)

    def ended(self, layer, roots):
        if self._probe is not None:
            self._name_dormant(layer, graph.collect(roots, self._visited))
        self._prefix.mark(native.Edge.FORWARD_END, layer)

    def _name_dormant(self, layer: int, saved: graph.LayerGraph) -> None:
        awake = self._probe.awake(layer, saved)
        if awake is None:
            self.notes.append(f"layer {layer} stays awake: its graph is not the probed one")
            return
        self._awake |= awake
        addresses = set(saved.storages.values()) - self._awake - self.weights.gathered_storages()
        addresses = sorted(addresses)
        # A layer saves its input, which the layer before it allocated.
        if layer > 0:
            self._prefix.dormant(layer - 1, addresses)
        self._prefix.dormant(layer, addresses)


class ProbeForward(PrefixForward):
    """Phase A of the miniature: keeps each layer's graph, names nothing."""

    def __init__(
        self, view: support.ModelView, weights: ReplicatedWeights, recorder: TouchRecorder
    ):
        """``recorder``: active during the forward."""
        super().__init__(view, weights)
        self._visited: set = set()
        self._recorder = recorder
        self.graphs: list[graph.LayerGraph] = []
        self.touched: list[set[int]] = []
        """Addresses touched since the layer before ended, per layer."""

    def ended(self, layer, roots):
        self.graphs.append(graph.collect(roots, self._visited))
        self.touched.append(self._recorder.take())


def _owned_storages(view: support.ModelView) -> set[int]:
    """Storages of parameters and buffers: a step never puts them to sleep."""
    tensors = (*view.model.parameters(), *view.model.buffers())
    return {graph.storage_address(t) for t in tensors}
