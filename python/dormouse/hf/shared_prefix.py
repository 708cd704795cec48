"""One shared-prefix step of a transformers model: phases A, B and C (docs/method.md §1).

The plan says what to do next, the node knows what may sleep and when; this module runs the model
and tells them where layers begin and end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .. import _native as native
from ..group import Group
from ..runtime import Node, Plan, Runtime
from . import attention, graph, support
from .probe import PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS, Probe, TouchRecorder

LossFn = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

KEY, VALUE = 0, 1


@dataclass
class StepReport:
    """What one step did."""

    loss: float
    """``Σ weights[i] · loss_fn(...)`` over the group."""
    counts: dict = field(default_factory=dict)
    """Tokens and waves run."""
    node: dict = field(default_factory=dict)
    """The node's own account: bytes per tier, stall and bound in nanoseconds, why it declined."""
    notes: list[str] = field(default_factory=list)
    """Layers that stayed awake, and why."""


class _PrefixDone(Exception):
    """Ends phase A at the last layer's K and V: what follows is dead work (method §4)."""


class SharedPrefix:
    """Computes a group's prompt once, forward and backward, for all its responses.

    ``model``: a Llama, Qwen2 or Qwen3 causal language model (LoRA adapters and frozen parameters
    included), unchanged, all of it on the runtime's device. ``runtime``: what sleeps goes through
    it. ``sleep=False`` runs the same schedule with everything awake. On a GPU only memory that
    torch had from dormouse can sleep: ``dormouse.install()`` before the first CUDA tensor.

    Not thread-safe: one step at a time per model.
    """

    def __init__(self, model: torch.nn.Module, runtime: Runtime, *, sleep: bool = True):
        self._model = model
        self._runtime = runtime
        self._sleep = sleep
        self._view = support.resolve(model)
        self._probes: dict[tuple, Probe] = {}

    def backward(
        self,
        group: Group,
        loss_fn: LossFn,
        *,
        wave_tokens: int = 256,
        on_phase: Callable[[str], None] | None = None,
    ) -> StepReport:
        """Adds to every parameter's ``.grad`` what the dense loop over the group would.

        ``loss_fn(logits, labels, i)`` gets response ``i``'s logits ``[len(S_i), vocab]`` and
        labels ``[len(S_i)]`` (the response's own tokens), both on the model's device, and returns a
        scalar; the total loss is ``Σ weights[i] · loss_fn(...)``. ``wave_tokens``: rows of
        responses run at once. ``on_phase``, if given, is called with ``"A"``, ``"B"``, ``"C"`` as
        each begins and ``"end"`` after the last.

        Raises :class:`UnsupportedModelError` before anything ran; a :class:`DormouseError` in
        between leaves gradients partly added: zero them before trying again.
        """
        support.check_step(self._model, self._view, self._runtime.device)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a shared-prefix step needs autograd; inference mode is on")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._registry())
            plan = stack.enter_context(self._plan(group, wave_tokens))
            probe = self._probe(group, loss_fn, wave_tokens) if self._sleep else None
            node = stack.enter_context(Node(self._runtime, plan, len(self._view.layers)))
            tokens = _Tokens(group, self._runtime.device)
            step = _Step(self._view, tokens, loss_fn, node, probe, on_phase or (lambda name: None))
            # Before the node ends, whatever the step still holds is freed, asleep or not.
            stack.callback(step.release)
            report = step.run(plan)
            report.node = node.report()
            return report

    def predict(self, group: Group, *, wave_tokens: int = 256) -> dict:
        """What the plan expects of a step: FLOPs, speedup, token ratio, bytes; nothing is run."""
        with self._plan(group, wave_tokens) as plan:
            return plan.predict()

    def _plan(self, group: Group, wave_tokens: int) -> Plan:
        return Plan(group, wave_tokens=wave_tokens, model=_model_shape(self._view))

    @contextlib.contextmanager
    def _registry(self):
        config = self._view.config
        before = config._attn_implementation
        config._attn_implementation = attention.NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    def _probe(self, group: Group, loss_fn: LossFn, wave_tokens: int) -> Probe:
        kind = self._runtime.device.type
        longest = max(len(response) for response in group.responses)
        prefix_is_longer = len(group.prompt) - 1 >= max(longest, wave_tokens)
        key = (
            prefix_is_longer,
            self._model.training,
            tuple((p.dtype, p.requires_grad) for p in self._model.parameters()),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        )
        if key not in self._probes:
            self._probes[key] = _probe_step(
                self._view, group.prompt, prefix_is_longer, self._runtime.device
            )
        return self._probes[key]


class _Prefix:
    """Phase A's results: per layer the live K and V, their detached leaves, and the graph."""

    def __init__(self, view: support.ModelView):
        self.view = view
        self.live: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outputs: list[torch.Tensor] = []

    def attend(self, layer, query, key, value, scale):
        """Registry door during A: captures K and V, ends the forward at the last layer."""
        self.live.append((key, value))
        self.leaves.append((key.detach(), value.detach()))
        self.captured(layer, key, value)
        if layer == len(self.view.layers) - 1:
            raise _PrefixDone
        return attention.causal(query, key, value, scale)

    def captured(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Told of each layer's K and V as soon as they exist."""

    def began(self, layer: int) -> None:
        """Told before a layer's forward."""

    def ended(self, layer: int, roots: list[torch.Tensor]) -> None:
        """Told after a layer's forward; ``roots`` are what later layers get from it."""

    def forward(self, tokens: torch.Tensor) -> None:
        """Runs phase A over ``tokens`` (1-D) under autograd."""
        handles = []
        for index, layer in enumerate(self.view.layers):
            handles.append(layer.register_forward_pre_hook(self._pre_hook(index)))
            handles.append(layer.register_forward_hook(self._hook(index)))
        positions = torch.arange(len(tokens), device=tokens.device).unsqueeze(0)
        try:
            with attention.use(self.attend):
                self.view.decoder(
                    input_ids=tokens.unsqueeze(0), position_ids=positions, use_cache=False
                )
        except _PrefixDone as done:
            # The traceback holds the last layer's frame, and with it its dead query.
            done.__traceback__ = None
        finally:
            for handle in handles:
                handle.remove()
        last = len(self.view.layers) - 1
        self.ended(last, list(self.live[last]))

    def _pre_hook(self, index):
        def hook(module, args):
            self.began(index)

        return hook

    def _hook(self, index):
        def hook(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            self.outputs.append(hidden)
            self.ended(index, [hidden])

        return hook


class _PlannedPrefix(_Prefix):
    """Phase A that names to the node what each layer saved."""

    def __init__(self, view: support.ModelView, node: Node, probe: Probe | None):
        super().__init__(view)
        self._node = node
        self._probe = probe
        self._visited: set = set()
        self._owned = _owned_storages(view)
        self.notes: list[str] = []

    def captured(self, layer, key, value):
        for slot, tensor in ((KEY, key), (VALUE, value)):
            storage = tensor.untyped_storage()
            self._node.boundary(
                layer, slot, storage.data_ptr(), storage.nbytes(), tensor.numel(), tensor.dtype
            )

    def began(self, layer):
        self._node.mark(native.Edge.FORWARD_BEGIN, layer)

    def ended(self, layer, roots):
        if self._probe is not None:
            self._name_dormant(layer, graph.collect(roots, self._visited))
        self._node.mark(native.Edge.FORWARD_END, layer)

    def _name_dormant(self, layer: int, saved: graph.LayerGraph) -> None:
        addresses = self._probe.may_sleep(layer, saved)
        if addresses is None:
            self.notes.append(f"layer {layer} stays awake: its graph is not the probed one")
            return
        addresses = sorted(addresses - self._owned)
        # A layer saves its input, which the layer before it allocated.
        if layer > 0:
            self._node.dormant(layer - 1, addresses)
        self._node.dormant(layer, addresses)


class _ProbePrefix(_Prefix):
    """Phase A of the miniature: keeps each layer's graph, names nothing."""

    def __init__(self, view: support.ModelView):
        super().__init__(view)
        self._visited: set = set()
        self.graphs: list[graph.LayerGraph] = []

    def ended(self, layer, roots):
        self.graphs.append(graph.collect(roots, self._visited))


class _Tokens:
    """A group's tokens on the model's device, moved in one copy: waves make the host wait for
    nothing."""

    def __init__(self, group: Group, device: torch.device):
        lengths = [len(group.prompt), *map(len, group.responses)]
        moved = torch.cat([group.prompt, *group.responses]).to(device)
        self.prompt, *self.responses = moved.split(lengths)
        self.weights = group.weights
        self.device = device


class _Step:
    """One A/B/C step over one group."""

    def __init__(self, view, group: _Tokens, loss_fn: LossFn, node: Node, probe, on_phase):
        self._view = view
        self._group = group
        self._loss_fn = loss_fn
        self._node = node
        self._on_phase = on_phase
        self._prefix = _PlannedPrefix(view, node, probe)
        self._phase = None
        # Summed on the device, and read once after the last phase.
        self._loss = torch.zeros((), dtype=torch.float64, device=group.device)
        self._counts = {"prefix_tokens": 0, "wave_tokens": 0, "waves": 0}

    def run(self, plan: Plan) -> StepReport:
        """Does what the plan says, in its order."""
        for op in plan.ops():
            if op.kind is native.OpKind.PREFIX_FORWARD:
                self._enter("A")
                self._prefix.forward(self._group.prompt[op.token_begin : op.token_end])
                self._counts["prefix_tokens"] += op.token_end - op.token_begin
                self._enter("B")
            elif op.kind is native.OpKind.WAVE:
                self._wave(op.members)
            elif op.kind is native.OpKind.NODE_BACKWARD:
                self._enter("C")
                self._prefix_backward()
        self._on_phase("end")
        return StepReport(float(self._loss), self._counts, notes=self._prefix.notes)

    def release(self) -> None:
        """Lets go of the prefix graph, in whatever phase the step ended."""
        self._prefix = None

    def _enter(self, phase: str) -> None:
        self._node.enter(native.Phase[phase])
        self._on_phase(phase)

    def _wave(self, members) -> None:
        tokens, positions, segments = _pack(self._group, members)
        hidden = _wave_hidden(
            self._view, self._prefix.leaves, tokens, positions, segments, self._accumulator
        )
        # Split, not sliced: the gradients of the parts then meet in one copy. The whole is used by
        # nobody else, so a loss may change its part in place, which views of a split forbid.
        lengths = [end - start for start, end in segments]
        logits = torch.unsafe_split_with_sizes(self._view.head(hidden), lengths)
        total = None
        for member, own_logits in zip(members, logits, strict=True):
            i = member.sequence
            loss = self._loss_fn(own_logits, self._group.responses[i], i)
            weighted = self._group.weights[i] * loss
            total = weighted if total is None else total + weighted
        del logits, own_logits, hidden, loss, weighted
        total.backward()
        self._loss += total.detach().reshape(())
        self._counts["wave_tokens"] += len(tokens)
        self._counts["waves"] += 1

    def _accumulator(self, layer: int):
        key, value = self._prefix.live[layer]
        wanted = [(KEY, key.requires_grad), (VALUE, value.requires_grad)]
        if not any(needed for _, needed in wanted):
            return None

        def add(*grads):
            for (slot, needed), grad in zip(wanted, grads, strict=True):
                if needed:
                    self._node.accumulate(layer, slot, _tokens_first(grad))

        return add

    def _prefix_backward(self) -> None:
        prefix, node = self._prefix, self._node
        last = len(prefix.live) - 1
        roots, seeds = [], []
        for layer, pair in enumerate(prefix.live):
            for slot, live in enumerate(pair):
                if live.requires_grad:
                    roots.append(live)
                    seeds.append(_seed(node.gradient(layer, slot), live))
        marks = _BackwardMarks(node)
        for layer, hidden in enumerate(prefix.outputs):
            if hidden.grad_fn is not None:
                hidden.grad_fn.register_prehook(marks.hook(layer))
        # From here the graph alone owns what A saved: each layer is freed as it is consumed.
        prefix.live, prefix.leaves, prefix.outputs = [], [], []
        marks.begin(last)
        if roots:
            torch.autograd.backward(roots, seeds)
        marks.end()


class _BackwardMarks:
    """Marks layers as backward reaches them; layers without a graph are never reached."""

    def __init__(self, node: Node):
        self._node = node
        self._open: int | None = None

    def begin(self, layer: int) -> None:
        self.end()
        self._node.mark(native.Edge.BACKWARD_BEGIN, layer)
        self._open = layer

    def end(self) -> None:
        if self._open is not None:
            self._node.mark(native.Edge.BACKWARD_END, self._open)
            self._open = None

    def hook(self, layer: int):
        """A prehook of the node that made the layer's output: its gradient is complete."""
        return lambda grads: self.begin(layer)


def _tokens_first(grad: torch.Tensor) -> torch.Tensor:
    """``[1, kv_heads, tokens, head_dim]`` as contiguous ``[1, tokens, kv_heads, head_dim]``."""
    return grad.transpose(1, 2).contiguous()


def _seed(accumulator: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The accumulated gradient, shaped and typed as the boundary tensor it belongs to."""
    one, heads, tokens, width = live.shape
    return accumulator.view(one, tokens, heads, width).transpose(1, 2).to(live.dtype)


def _pack(group: _Tokens, members):
    """A wave's tokens and positions, and each member's rows: ``[P[-1]] + S_i[:-1]`` packed."""
    tokens, positions, segments, row, device = [], [], [], 0, group.device
    for member in members:
        response = group.responses[member.sequence]
        tokens += [group.prompt[-1:], response[:-1]]
        first = member.first_position
        positions.append(torch.arange(first, first + len(response), device=device))
        segments.append((row, row + len(response)))
        row += len(response)
    return torch.cat(tokens), torch.cat(positions), segments


def _wave_hidden(view, leaves, tokens, positions, segments, accumulator) -> torch.Tensor:
    """Final hidden states ``[tokens, hidden]`` of packed responses over the prefix leaves."""
    runs = attention.runs_of(segments)

    def attend(layer, query, key, value, scale):
        prefix_key, prefix_value = leaves[layer]
        return attention.WaveAttention.apply(
            query, key, value, prefix_key, prefix_value, runs, scale, accumulator(layer)
        )

    with attention.use(attend):
        output = view.decoder(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
    return output.last_hidden_state[0]


def _owned_storages(view: support.ModelView) -> set[int]:
    """Storages of parameters and buffers: a step never puts them to sleep."""
    modules = (view.decoder, view.head)
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return {graph.storage_address(t) for t in tensors}


def _probe_step(
    view: support.ModelView, prompt: torch.Tensor, prefix_is_longer: bool, device: torch.device
) -> Probe:
    """Runs the miniature on the prompt's own first tokens; changes no ``.grad``."""
    long, short = PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS
    prefix_tokens, wave_tokens = (long, short) if prefix_is_longer else (short, long)
    sample = prompt[torch.arange(long) % len(prompt)].to(device)
    prefix = _ProbePrefix(view)
    prefix.forward(sample[:prefix_tokens])
    half = wave_tokens // 2
    segments = [(0, half), (half, wave_tokens)]
    positions = torch.cat([torch.arange(prefix_tokens, prefix_tokens + half, device=device)] * 2)
    with TouchRecorder() as recorder:
        hidden = _wave_hidden(
            view, prefix.leaves, sample[:wave_tokens], positions, segments, lambda layer: None
        )
        loss = view.head(hidden).float().logsumexp(-1).sum()
        # The lowest trainable parameters pull the gradient through every layer above them; their
        # own gradients are small, and nobody's .grad changes.
        lowest = _lowest_trainable(view)
        if lowest:
            torch.autograd.grad(loss, lowest, allow_unused=True)
    return Probe.from_step(prefix.graphs, recorder.addresses)


def _lowest_trainable(view: support.ModelView) -> list[torch.nn.Parameter]:
    for module in (*view.layers, view.decoder, view.head):
        parameters = [p for p in module.parameters() if p.requires_grad]
        if parameters:
            return parameters
    return []


def _model_shape(view: support.ModelView) -> native.ModelShape:
    """What the plan's arithmetic needs to know of the model."""
    linear = [m for m in view.layers[0].modules() if isinstance(m, torch.nn.Linear)]
    attn = view.layers[0].self_attn
    # In the last layer phase A runs K and V both ways and Q forward only: a third of its work.
    key_value = _weights(attn.k_proj) + _weights(attn.v_proj)
    dtype = next(view.layers[0].parameters()).dtype
    return native.ModelShape(
        layers=len(view.layers),
        heads=view.heads,
        kv_heads=view.kv_heads,
        head_dim=view.head_dim,
        vocab=view.vocab_size,
        layer_linear_weights=sum(m.weight.numel() for m in linear),
        kv_linear_weights=key_value,
        last_layer_prefix_weights=key_value + _weights(attn.q_proj) // 3,
        head_weights=view.head.weight.numel(),
        dtype_bytes=dtype.itemsize,
        saved_bytes_per_token_layer=_saved_bytes(view, dtype),
    )


def _weights(module: torch.nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))


def _saved_bytes(view: support.ModelView, dtype: torch.dtype) -> int:
    """Bytes a layer saves per token: an estimate for planning, from the eager modules' shapes.

    Two norms save their input, its square root's scale, and the normalised rows (4 rows of hidden
    size, FP32), q, k, v, the attention output and its sum, and the MLP's five intermediate rows.
    """
    hidden, inner = view.config.hidden_size, view.config.intermediate_size
    heads = (2 * view.heads + 2 * view.kv_heads) * view.head_dim
    return 4 * 4 * hidden + dtype.itemsize * (2 * hidden + 2 * heads + 4 * inner)
