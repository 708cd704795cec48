"""Phase A: the forward of a prefix, which keeps its graph.

A prefix is the prompt of a group or one node of a tree. If no loss reads its own rows its forward
ends at the last layer's K and V, or at the layer's end if it is recurrent. Otherwise it runs to the
model's end, and the gradients of its rows wait for phase C (:mod:`.prompt_rows`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch

from .. import _native as native
from ..runtime import Prefix
from . import (
    attention,
    cached,
    checkpointing,
    compiled_layers,
    dropout,
    graph,
    mixers,
    outputs,
    recurrent,
    registry,
    support,
)
from .late_reads import Touches, storages_of
from .mixers import Handlers
from .outputs import PLAIN, Request
from .probe import Probe, TouchRecorder
from .prompt_rows import HeadInput, PromptRows
from .ring_attention import RingAttention, rows_behind, rows_of_ranges
from .row_ranges import RangeAttention
from .sharding import PrefixDone, ReplicatedWeights

KEY, VALUE = 0, 1


class PrefixForward:
    """Results of phase A: per layer the live K and V, their detached leaves, and the graph; and the
    states of recurrent layers."""

    def __init__(
        self,
        view: support.ModelView,
        weights: ReplicatedWeights,
        path: Sequence[PrefixForward] = (),
    ):
        """``path``: the prefixes that this one follows, the root first."""
        self.view = view
        self.weights = weights
        self.path = tuple(path)
        self.mixers = path[0].mixers if path else mixers.of(view)
        self.end = 0
        """The position after the last token."""
        self.live: list[tuple[torch.Tensor, ...]] = []
        """K and V of each layer; empty for a layer without attention."""
        self.leaves: list[tuple[torch.Tensor, ...]] = []
        self.states = recurrent.States()
        self.indexers: dict[int, torch.Tensor] = {}
        """Keys by which a layer selects others, by the index of its cache."""
        self.outputs: dict[int, torch.Tensor] = {}
        """The output of each layer before the last that has a graph."""
        self.layer_of: dict[torch.nn.Module | int, int] = {}
        """The layer of each module that called attention, or of each index in a cache."""
        self.rows: PromptRows | None = None
        """What losses read of the prefix; None if nothing."""
        self.has_graph = False
        self._running: int | None = None
        self._request = PLAIN
        self._last_output: torch.Tensor | None = None

    @property
    def needs_backward(self) -> bool:
        """Whether anything that later passes or losses read depends on a trainable parameter."""
        if self.states.need_backward or (self.rows is not None and self.rows.need_backward):
            return True
        return any(tensor.requires_grad for pair in self.live for tensor in pair)

    def attend(self, call: registry.AttentionCall) -> torch.Tensor:
        """Attention function during A."""
        key, value = self._keep(call.module, call.key, call.value)
        if call.ring is not None:
            rows = rows_of_ranges(call.ring, call.ranges)
            return RingAttention.apply(call.query, key, value, call.rules, rows, call.ring)
        if call.ranges is not None:
            return RangeAttention.apply(call.query, key, value, call.rules, call.ranges)
        if not self.path:
            return attention.causal(call.query, key, value, call.rules, call.sinks)
        layer = self.layer_of[call.module]
        return over_path(self.path, layer, call._replace(key=key, value=value), self._packed)

    def update(self, key: torch.Tensor, value: torch.Tensor, index: int):
        """Update of the cache during A."""
        key, value = self._keep(index, key, value)
        return joined(self.path, self.layer_of[index], key, value) if self.path else (key, value)

    def update_indexer(self, keys: torch.Tensor, index: int) -> torch.Tensor:
        """Update of an indexer's cache during A."""
        if keys.requires_grad:
            raise support.UnsupportedModelError(
                f"layer {index} selects keys by others that need gradients; accepted: an indexer "
                "that runs without gradients"
            )
        # In memory of its own: the prefix's may fall asleep.
        self.indexers[index] = keys.clone()
        if self._is_last and len(self.live) == len(self.view.layers):
            raise PrefixDone
        return joined_indexers(self.path, index, keys)

    def _keep(self, caller: torch.nn.Module | int, key: torch.Tensor, value: torch.Tensor):
        """Captures K and V; if no loss reads rows, ends the forward at the last layer."""
        layer = self._running
        if layer is None or layer != len(self.live):
            raise support.UnsupportedModelError(
                f"{named(caller)} runs attention outside a layer or more than once in a layer; "
                "accepted: one attention per layer"
            )
        value = _apart(value)
        module = self.view.layers[layer]
        is_end = self._is_last and not self.mixers.are_recurrent_in(module)
        if is_end and self.mixers.select_keys_in(module):
            # Those by which it selects may come before or after.
            is_end = caller in self.indexers
        if is_end:
            key, value = self.weights.seam(key, value)
        self.layer_of[caller] = layer
        self.live.append((key, value))
        self.leaves.append((key.detach(), value.detach()))
        self.captured(layer, key, value)
        if is_end:
            raise PrefixDone
        return key, value

    @property
    def _is_last(self) -> bool:
        """Whether nothing after the running layer's boundary tensors is read."""
        if self._request.runs_prompt_to_end or not self.mixers.ends_at_keys:
            return False
        return self._running == len(self.view.layers) - 1

    accepts_gradients = True
    """Whether a backward that runs now may add to the gradients of boundary tensors."""

    def check_accepts(self, *grads) -> None:
        """Refuses backwards that are not the step's own."""
        if not self.accepts_gradients:
            raise support.UnsupportedModelError(
                "the loss function ran a backward through the layers, whose gradients lack the "
                "prompt's part; accepted: gradients by logits and by what comes after the last "
                "attention or recurrent layer, or, if it reads rows of the prompt, after the last "
                "hidden states"
            )

    def accumulate(self, layer: int, slot: int, grad: torch.Tensor) -> None:
        """Receives a gradient of K or V, shaped as it is."""

    def captured(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Receives each layer's K and V as soon as they exist."""

    def began(self, layer: int) -> None:
        """Called before a layer's forward."""

    def ended(self, layer: int, roots: list[torch.Tensor]) -> None:
        """Called after a layer's forward; ``roots``: its outputs that later layers read."""

    def forward(
        self,
        tokens: torch.Tensor,
        first: int = 0,
        request: Request = PLAIN,
        read: Callable[[PromptRows], None] | None = None,
        *,
        logits_rows: torch.Tensor | None = None,
        experts: torch.Tensor | None = None,
    ) -> None:
        """Runs phase A over ``tokens`` (1-D), under autograd if it is enabled.

        ``first``: the position of the first token. ``request``: what losses read. If that are rows
        of this prefix, ``read(rows)`` is called before the last layer may fall asleep.
        ``logits_rows``: see :meth:`.support.ModelView.run`. ``experts``: recorded for the rows.
        """
        self._request = request
        self.has_graph = torch.is_grad_enabled()
        self.end = first + len(tokens)
        self._packed = attention.Packed.of([(0, len(tokens))]) if self.path else None
        last = len(self.view.layers) - 1
        handles = []
        for index, layer in enumerate(self.view.layers):
            handles.append(layer.register_forward_pre_hook(self._pre_hook(index)))
            handles.append(layer.register_forward_hook(self._hook(index)))
        self._thread = threading.get_ident()
        positions = torch.arange(first, first + len(tokens), device=tokens.device)
        before = self.path[-1].states if self.path else None
        record = self.states.recorder(lambda: self._running, before)
        handlers = Handlers(
            self.attend, self.update, self.update_indexer, record, is_prefix=True
        )
        try:
            with (
                self.mixers.taken_over(handlers, self._packed, first, experts) as arguments,
                # The graph is kept: what it saved sleeps instead of being computed again.
                checkpointing.use(self.view.model, None, arguments.get("past_key_values")),
                dropout.of_prompt(self.view),
            ):
                if request.runs_prompt_to_end:
                    self.rows = self._run_to_end(tokens, positions, arguments, logits_rows)
                else:
                    self.weights.run_prefix(
                        self.view,
                        lambda: self.view.run(tokens, positions, arguments),
                        lambda: self.live[last],
                    )
                    self.rows = self.mixers.rows_of_prefix()
        finally:
            for handle in handles:
                handle.remove()
        if experts is not None:
            self.mixers.routers.check_prefix()
        if len(self.live) <= last:
            raise support.UnsupportedModelError(
                f"the model runs {len(self.live)} of its {last + 1} layers; accepted: every layer "
                "once, in order"
            )
        roots = [*self.live[last], *self.states.of(last)]
        if self.rows is not None:
            if self._last_output is not None:
                roots.append(self._last_output)
                self._last_output = None
            roots += self.rows.roots()
            if read is not None:
                read(self.rows)
        self.ended(last, roots)

    def _run_to_end(self, tokens, positions, arguments: dict, logits_rows) -> PromptRows:
        names = self._request.prompt
        head = HeadInput(self.view, self._request)
        arguments = arguments | outputs.arguments_of(names)
        with head.replaced():
            output = self.view.run(tokens, positions, arguments, logits_rows)
        return PromptRows(head, outputs.read(output, names, len(tokens)))

    def boundary(self) -> list[torch.Tensor]:
        """Returns tensors of this prefix that phase B reads, of the layers so far."""
        pairs = itertools.chain.from_iterable(self.leaves)
        return [*pairs, *self.states.leaves(), *self.indexers.values()]

    def clear(self) -> None:
        """Drops every reference to the graph and to K and V."""
        self.live, self.leaves, self.outputs = [], [], {}
        self.states.clear()
        self.indexers = {}
        self.rows = None

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
            if self.mixers.are_recurrent and len(self.live) == index:
                # Recurrent, or without mixing of tokens.
                self.live.append(())
                self.leaves.append(())
            if len(self.live) != index + 1:
                raise support.UnsupportedModelError(
                    f"layer {index} ({type(module).__name__}) runs no attention through "
                    "transformers' AttentionInterface; accepted: attention once per layer through "
                    "it, torch's scaled_dot_product_attention or a cache, and transformers' "
                    "functions for convolutions and scans"
                )
            hidden = output[0] if isinstance(output, tuple) else output
            if index == len(self.view.layers) - 1:
                if self._request.runs_prompt_to_end:
                    self._last_output = hidden
                elif self.mixers.are_recurrent or self.indexers:
                    # Which of its states is the last is not known before.
                    raise PrefixDone
                return
            # Megatron adds biases under `enable_grad`, in forwards without a graph too.
            if self.has_graph and hidden.grad_fn is not None:
                self.outputs[index] = hidden
            self.ended(index, [hidden, *self.states.of(index)])

        return hook


def over_path(
    path: Sequence[PrefixForward],
    layer: int,
    call: registry.AttentionCall,
    packed: attention.Packed,
) -> torch.Tensor:
    """Attention of packed rows over the prefixes of a path and over themselves; their gradients go
    to :meth:`PrefixForward.accumulate`."""
    if call.ring is not None:
        (prefix,) = path
        rows = rows_behind(call.ring, packed, prefix.end)
        own = call.query, call.key, call.value, call.rules, rows, call.ring
        return RingAttention.apply(*own, prefix.leaves[layer], _adder(path, layer))
    return attention.PackedAttention.apply(
        call.query,
        call.key,
        call.value,
        call.sinks,
        packed,
        call.rules,
        tuple(prefix.leaves[layer] for prefix in path),
        _adder(path, layer),
    )


def joined(
    path: Sequence[PrefixForward], layer: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of the prefixes of a path before those of the rows that follow."""
    past = tuple(prefix.leaves[layer] for prefix in path)
    return cached.Joined.apply(key, value, past, _adder(path, layer))


def joined_indexers(path: Sequence[PrefixForward], index: int, keys: torch.Tensor) -> torch.Tensor:
    """Returns the keys of an indexer over the prefixes of a path before those of the rows that
    follow, ``[1, tokens, width]``."""
    return torch.cat([*(prefix.indexers[index] for prefix in path), keys], 1)


def _adder(path: Sequence[PrefixForward], layer: int) -> attention.Add:
    """Returns what passes gradients of K and V on to the prefixes of a path."""

    def add(index: int, *grads: torch.Tensor) -> None:
        prefix = path[index]
        for slot, grad in enumerate(grads):
            # K and V of a forward without a graph: phase C knows whether they need a gradient.
            live = prefix.live[layer][slot] if prefix.has_graph else None
            if live is None or live.requires_grad:
                prefix.accumulate(layer, slot, grad)

    return add


def named(caller: torch.nn.Module | int) -> str:
    """Names a caller of attention in an error."""
    return f"layer {caller}" if isinstance(caller, int) else type(caller).__name__


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
        path: Sequence[PrefixForward] = (),
    ):
        """``probe``: of this kind of graph; None: everything stays awake."""
        super().__init__(view, weights, path)
        self.accepts_gradients = False
        self._prefix = prefix
        self._probe = probe
        self._visited: set = set()
        self._protected = self.path[-1].protected_below if self.path else owned_storages(view)
        self._awake = set(self._protected)
        self._buffers = buffers_of(view.model)
        self.notes: list[str] = []

    @property
    def is_to_sleep(self) -> bool:
        """Whether what the layers save may sleep."""
        return self._probe is not None

    @property
    def protected_below(self) -> set[int]:
        """Storages that never sleep while a prefix runs that follows this one: those of the model,
        and boundary tensors of the path."""
        leaves = [*itertools.chain.from_iterable(self.leaves), *self.states.leaves()]
        return self._protected.union(map(graph.storage_address, leaves))

    def accumulate(self, layer, slot, grad):
        self.check_accepts()
        self._prefix.accumulate(layer, slot, _tokens_first(grad))

    def gradient(self, layer: int, slot: int, live: torch.Tensor) -> torch.Tensor:
        """Returns the accumulated gradient, shaped and typed as ``live``."""
        one, heads, tokens, width = live.shape
        accumulator = self._prefix.gradient(layer, slot)
        return accumulator.view(one, tokens, heads, width).transpose(1, 2).to(live.dtype)

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
            try:
                self._name_dormant(layer, graph.collect(roots, self._visited))
            except graph.GraphTooLargeError as error:
                self.notes.append(f"layer {layer} stays awake: {error}")
        self._prefix.mark(native.Edge.FORWARD_END, layer)

    def _name_dormant(self, layer: int, saved: graph.LayerGraph) -> None:
        awake = self._probe.awake(layer, saved)
        if awake is None:
            reason = compiled_layers.why_awake(saved.signature, self._probe.late)
            if reason is not None:
                self.notes.append(f"layer {layer} stays awake: {reason}")
                return
            # A forward may have replaced a buffer.
            awake = set(map(graph.storage_address, self._buffers()))
        self._awake |= awake
        gathered = set(map(graph.storage_address, self.weights.gathered_now()))
        addresses = sorted(set(saved.storages.values()) - self._awake - gathered)
        # A layer saves its input, which the layer before it allocated.
        if layer > 0:
            self._prefix.dormant(layer - 1, addresses)
        self._prefix.dormant(layer, addresses)


class ProbeForward(PrefixForward):
    """Phase A of the miniature: keeps each layer's graph, names nothing."""

    def __init__(
        self,
        view: support.ModelView,
        weights: ReplicatedWeights,
        recorder: TouchRecorder,
        path: Sequence[PrefixForward] = (),
    ):
        """``recorder``: active during the forward."""
        super().__init__(view, weights, path)
        self._visited: set = set()
        self._recorder = recorder
        self._buffers = buffers_of(view.model)
        self.graphs: list[graph.LayerGraph] = []
        self.touched: list[Touches] = []
        """What was touched since the layer before ended, per layer; of the first since it began."""
        self.kept = storages_of(view.model.parameters())
        """Storages that a step keeps awake whatever a graph saved: those of the model, those made
        before the first layer, and what phase B reads."""

    def began(self, layer):
        if layer == 0:
            self.kept |= self._recorder.take().made

    def ended(self, layer, roots):
        self.graphs.append(graph.collect(roots, self._visited))
        self.touched.append(self._recorder.take())
        self.kept |= storages_of([*self._buffers(), *self.weights.gathered_now()])
        for each in (*self.path, self):
            self.kept |= storages_of(each.boundary())


def _tokens_first(grad: torch.Tensor) -> torch.Tensor:
    """``[1, kv_heads, tokens, head_dim]`` as contiguous ``[1, tokens, kv_heads, head_dim]``."""
    return grad.transpose(1, 2).contiguous()


def buffers_of(model: torch.nn.Module) -> Callable[[], list[torch.Tensor]]:
    """Returns a function that returns the buffers as they are when it is called, of the modules
    that have any now."""
    holders = [module for module in model.modules() if module._buffers]

    def buffers() -> list[torch.Tensor]:
        found = (each for module in holders for each in module._buffers.values())
        return [each for each in found if each is not None]

    return buffers


def owned_storages(view: support.ModelView) -> set[int]:
    """Storages of parameters and buffers: a step never puts them to sleep."""
    tensors = (*view.model.parameters(), *view.model.buffers())
    return {graph.storage_address(t) for t in tensors}
