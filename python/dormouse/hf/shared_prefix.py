"""One shared-prefix step of a transformers model: phases A, B and C (docs/method.md §1).

The plan defines the order of ops, the prefix what may sleep and when. This module runs the model
and reports the begin and end of layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .. import _native as native
from .. import ranks
from ..group import Group
from ..runtime import Prefix, Runtime
from ..schedule import Plan
from . import attention, share, sharding, support
from .prefix import KEY, VALUE, PlannedForward, ProbeForward
from .probe import PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS, Probe, TouchRecorder
from .sharding import ReplicatedWeights

LossFn = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
GroupLossFn = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


@dataclass
class StepReport:
    """Results of one step."""

    loss: float
    """``Σ weights[i] · loss_fn(...)`` over the group."""
    counts: dict = field(default_factory=dict)
    """Number of tokens and microbatches run."""
    prefix: dict = field(default_factory=dict)
    """The prefix's report: bytes per tier, stall and its bound in ns, why it declined to sleep."""
    notes: list[str] = field(default_factory=list)
    """One sentence per layer that stayed awake, with the reason."""


@dataclass
class RanksReport:
    """Results of one rank in a step of all ranks."""

    loss: float
    """This rank's sum over its own groups."""
    groups: list[StepReport]
    """Results of the rank's groups, in their order."""
    dummy_microbatches: int
    """Microbatches run only to match other ranks: one token each, no loss, zero gradients."""
    dummy_groups: int
    """Groups run only to match other ranks; ``dummy_microbatches`` includes their microbatches."""
    microbatch_tokens: int
    """The minimum over ranks."""
    ranks: int


class SharedPrefix:
    """Computes a group's prompt once, forward and backward, for all its responses.

    ``model``: a Llama, Qwen2 or Qwen3 causal language model, LoRA adapters and frozen parameters
    included, on the runtime's device; plain, or, for :meth:`step`, in DistributedDataParallel or
    under ``fully_shard``. The model is not modified. ``runtime``: manages the memory that sleeps.
    ``sleep=False`` runs the same schedule with everything awake. On a GPU only memory allocated by
    dormouse can sleep: call ``dormouse.install()`` before the first CUDA tensor.

    Not thread-safe: one step at a time per model.
    """

    def __init__(self, model: torch.nn.Module, runtime: Runtime, *, sleep: bool = True):
        self._wrapped = model
        self._model = sharding.unwrapped(model)
        self._runtime = runtime
        self._sleep = sleep
        self._view = support.resolve(self._model)
        self._probes: dict[tuple, Probe] = {}

    def backward(
        self,
        group: Group,
        loss_fn: LossFn,
        *,
        microbatch_tokens: int = 256,
        on_phase: Callable[[str], None] | None = None,
    ) -> StepReport:
        """Adds the gradients of the group to every parameter's ``.grad``, as the dense loop would.

        ``loss_fn(logits, labels, i)`` receives response ``i``'s logits ``[len(S_i), vocab]`` and
        labels ``[len(S_i)]`` (the response's own tokens) on the model's device and returns a
        scalar; the total loss is ``Σ weights[i] · loss_fn(...)``. ``microbatch_tokens``: response
        rows per microbatch. ``on_phase`` is called with ``"A"``, ``"B"``, ``"C"`` at the begin of
        each phase and with ``"end"`` after the last.

        Raises :class:`UnsupportedModelError` before any pass. A :class:`DormouseError` during the
        step leaves gradients partly added: zero them before the next attempt.
        """
        weights = self._ready()
        if weights.passes_hold_collectives or self._wrapped is not self._model:
            raise support.UnsupportedModelError(
                "backward() runs one rank alone, and this model's gradients are reduced over "
                "ranks; accepted: step() with this rank's groups, on every rank"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._prepared())
            plan = stack.enter_context(self._plan(group, microbatch_tokens))
            probe = self._probe(weights, group, microbatch_tokens) if self._sleep else None
            step = self._step(stack, weights, group, plan, loss_fn, probe)
            return step.run(plan, on_phase=on_phase)

    def step(
        self,
        groups: Sequence[Group],
        loss_fn: GroupLossFn,
        *,
        process_group=None,
        microbatch_tokens: int = 256,
    ) -> RanksReport:
        """Adds to every parameter's ``.grad`` the mean over ranks of their groups' gradients.

        Collective: every rank of ``process_group`` calls it with its own groups, any number of any
        size. ``loss_fn(logits, labels, i, g)``: as for :meth:`backward`, for response ``i`` of
        ``groups[g]``. ``microbatch_tokens``: the minimum over ranks applies. ``process_group``: the
        data-parallel ranks; defaults to DDP's group, else to the default group, else to this
        process alone.

        Gradients are reduced once, after the last backward: by the reduce-scatter of
        ``fully_shard`` with its own divisor, or as the mean of ``.grad`` over ranks. Until then a
        sharded model holds unsharded gradients on each rank.

        Raises :class:`dormouse.ranks.RanksDifferError` on every rank before any pass if the ranks
        cannot run the step together; the rank that caused it raises its own error. After a later
        error the other ranks wait until the timeout of the process group, and gradients are partly
        added or lost: zero them.
        """
        with contextlib.ExitStack() as stack:
            if process_group is None:
                process_group = sharding.process_group_of(self._wrapped)
            offer, agreement = self._agree(stack, groups, process_group, microbatch_tokens)
            stack.enter_context(self._prepared())
            stack.enter_context(offer.weights.stepping())
            self._run_probes(offer, agreement.probes)
            slots = agreement.slots
            reports = [
                self._run_slot(offer, slot, groups, loss_fn, is_last=slot is slots[-1])
                for slot in slots
            ]
            offer.weights.average(process_group, self._runtime.device)
        ours = {slot.group: report for slot, report in zip(slots, reports, strict=True)}
        return RanksReport(
            loss=sum(report.loss for report in reports),
            groups=[ours[index] for index in range(len(groups))],
            dummy_microbatches=sum(report.counts["dummy_microbatches"] for report in reports),
            dummy_groups=len(slots) - len(groups),
            microbatch_tokens=agreement.budgets["microbatch_tokens"],
            ranks=agreement.ranks,
        )

    def predict(self, group: Group, *, microbatch_tokens: int = 256) -> dict:
        """Returns the plan's prediction for a step (:meth:`Plan.predict`) without running it."""
        with self._plan(group, microbatch_tokens) as plan:
            return plan.predict()

    def _plan(self, group: Group, microbatch_tokens: int) -> Plan:
        shape = _model_shape(self._view)
        return Plan.of_group(group, microbatch_rows=microbatch_tokens, model=shape)

    def _ready(self) -> ReplicatedWeights:
        """Checks that a step is possible; returns the placement of the weights."""
        support.check_step(self._model, self._view, self._runtime.device)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a shared-prefix step needs autograd; inference mode is on")
        return sharding.of(self._wrapped, self._view)

    @contextlib.contextmanager
    def _prepared(self):
        config = self._view.config
        before = config._attn_implementation
        config._attn_implementation = attention.NAME
        try:
            with torch.enable_grad():
                yield
        finally:
            config._attn_implementation = before

    def _agree(self, stack, groups, process_group, microbatch_tokens: int):
        """Returns this rank's :class:`_Offer` and the agreement; ``stack`` owns the plans."""
        device = self._runtime.device
        offer = self._offer(stack, groups, process_group, microbatch_tokens)
        agreement = ranks.agree(process_group, offer.share, device)
        if not agreement.settled:
            microbatch_tokens = agreement.budgets["microbatch_tokens"]
            offer = self._offer(stack, groups, process_group, microbatch_tokens)
            agreement = ranks.agree(process_group, offer.share, device)
        ranks.confirm(process_group, agreement.sequence(), device)
        return offer, agreement

    def _offer(self, stack, groups, process_group, microbatch_tokens: int) -> _Offer:
        try:
            if not isinstance(groups, Sequence):
                # The groups are read several times, the last time while other ranks wait.
                raise TypeError(f"groups is a {type(groups).__name__}; accepted: a list of Group")
            weights = self._ready()
            if weights.passes_hold_collectives:
                sharding.check_group(self._model, ranks.world_size(process_group))
            plans = [stack.enter_context(self._plan(group, microbatch_tokens)) for group in groups]
            # Groups with equal keys share a probe.
            missing = {}
            for group in groups if self._sleep else ():
                key = self._probe_key(group, microbatch_tokens)
                if key not in self._probes:
                    missing[key] = group.prompt
            offered = share.of(
                self._model,
                self._view,
                weights,
                plans,
                microbatch_tokens=microbatch_tokens,
                probes=len(missing),
            )
        except Exception as error:
            ranks.refuse(process_group, error, self._runtime.device)
            raise
        return _Offer(offered, weights, plans, missing)

    def _run_probes(self, offer: _Offer, count: int) -> None:
        """Runs this rank's probes, and dummies up to ``count``: a probe gathers weights too."""
        for key, prompt in offer.probes.items():
            self._probes[key] = self._run_probe(offer.weights, prompt, key[0])
        for _ in range(count - len(offer.probes)):
            self._run_probe(offer.weights, share.dummy_group().prompt, False)

    def _run_slot(self, offer: _Offer, slot: ranks.GroupSlot, groups, loss_fn, *, is_last: bool):
        with contextlib.ExitStack() as stack:
            if slot.group is None:
                group, own_loss, probe = share.dummy_group(), None, None
                plan = stack.enter_context(self._plan(group, microbatch_tokens=1))
            else:
                group, plan = groups[slot.group], offer.plans[slot.group]
                own_loss = functools.partial(_of_group, loss_fn, slot.group)
                microbatch_tokens = offer.share.budgets["microbatch_tokens"]
                probe = (
                    self._probe(offer.weights, group, microbatch_tokens) if self._sleep else None
                )
            step = self._step(stack, offer.weights, group, plan, own_loss, probe)
            return step.run(plan, microbatches=slot.microbatches, is_last=is_last)

    def _step(
        self, stack, weights: ReplicatedWeights, group: Group, plan: Plan, loss_fn, probe
    ) -> _Step:
        """Creates a step over one group; ``stack`` owns its prefix."""
        prefix = stack.enter_context(Prefix(self._runtime, plan, len(self._view.layers)))
        tokens = _Tokens(group, self._runtime.device)
        step = _Step(self._view, weights, tokens, loss_fn, prefix, probe)
        # Frees what the step still holds, asleep or not, before the prefix is closed.
        stack.callback(step.release)
        return step

    def _probe_key(self, group: Group, microbatch_tokens: int) -> tuple:
        kind = self._runtime.device.type
        longest = max(len(response) for response in group.responses)
        return (
            len(group.prompt) - 1 >= max(longest, microbatch_tokens),
            self._model.training,
            tuple((p.dtype, p.requires_grad) for p in self._model.parameters()),
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        )

    def _probe(self, weights: ReplicatedWeights, group: Group, microbatch_tokens: int) -> Probe:
        key = self._probe_key(group, microbatch_tokens)
        if key not in self._probes:
            self._probes[key] = self._run_probe(weights, group.prompt, key[0])
        return self._probes[key]

    def _run_probe(
        self, weights: ReplicatedWeights, prompt: torch.Tensor, prefix_is_longer: bool
    ) -> Probe:
        return _probe_step(self._view, weights, prompt, prefix_is_longer, self._runtime.device)


class _Offer(NamedTuple):
    """A rank's share and the objects it was created from."""

    share: ranks.Share
    weights: ReplicatedWeights
    plans: list[Plan]
    probes: dict[tuple, torch.Tensor]
    """Prompts of missing probes, by key."""


def _of_group(loss_fn: GroupLossFn, group: int, logits, labels, i: int):
    return loss_fn(logits, labels, i, group)


class _Tokens:
    """A group's tokens on the model's device, moved in one copy, so that microbatches need no host
    synchronisation."""

    def __init__(self, group: Group, device: torch.device):
        lengths = [len(group.prompt), *map(len, group.responses)]
        moved = torch.cat([group.prompt, *group.responses]).to(device)
        self.prompt, *self.responses = moved.split(lengths)
        self.weights = group.weights
        self.device = device


class _Step:
    """One A/B/C step over one group."""

    def __init__(
        self,
        view,
        weights: ReplicatedWeights,
        group: _Tokens,
        loss_fn: LossFn | None,
        prefix: Prefix,
        probe,
    ):
        """``loss_fn``: None if every microbatch is a dummy."""
        self._view = view
        self._weights = weights
        self._group = group
        self._loss_fn = loss_fn
        self._prefix = prefix
        self._forward = PlannedForward(view, weights, prefix, probe)
        self._on_phase = None
        # Summed on the device, and read once after the last phase.
        self._loss = torch.zeros((), dtype=torch.float64, device=group.device)
        self._counts = dict.fromkeys(
            ("prefix_tokens", "microbatch_tokens", "microbatches", "dummy_microbatches"), 0
        )

    def run(
        self,
        plan: Plan,
        *,
        microbatches: int = 0,
        is_last: bool = False,
        on_phase: Callable[[str], None] | None = None,
    ) -> StepReport:
        """Runs the plan's ops in order, then dummy microbatches up to ``microbatches``.

        ``is_last``: its last backward is the last one of the step.
        """
        self._on_phase = on_phase
        for op in plan:
            if op.kind is native.OpKind.PREFIX_FORWARD:
                self._enter("A")
                self._forward.forward(self._group.prompt[op.tokens.start : op.tokens.stop])
                self._counts["prefix_tokens"] += len(op.tokens)
                self._enter("B")
            elif op.kind is native.OpKind.MICROBATCH:
                self._microbatch(op.members, self._ends_with_microbatch(microbatches, is_last))
            elif op.kind is native.OpKind.PREFIX_BACKWARD:
                while self._microbatches_run < microbatches:
                    self._microbatch((), self._ends_with_microbatch(microbatches, is_last))
                self._enter("C")
                self._prefix_backward(is_last)
        if on_phase is not None:
            on_phase("end")
        report = self._prefix.report()
        return StepReport(float(self._loss), self._counts, report, self._forward.notes)

    def release(self) -> None:
        """Frees the prefix graph. Allowed in every phase."""
        self._forward = None

    def _enter(self, phase: str) -> None:
        self._prefix.enter(native.Phase[phase])
        if self._on_phase is not None:
            self._on_phase(phase)

    @property
    def _microbatches_run(self) -> int:
        return self._counts["microbatches"] + self._counts["dummy_microbatches"]

    def _ends_with_microbatch(self, microbatches: int, is_last: bool) -> bool:
        """Returns whether the next microbatch's backward is the last one: phase C has none if no K
        or V needs a gradient."""
        needed = any(tensor.requires_grad for pair in self._forward.live for tensor in pair)
        return is_last and not needed and self._microbatches_run == microbatches - 1

    def _microbatch(self, members, is_last: bool) -> None:
        """Runs one microbatch: a dummy without ``members`` or without a loss."""
        is_dummy = self._loss_fn is None or not members
        pack = _dummy(self._group) if is_dummy else _pack(self._group, members)
        logits = self._weights.run(
            lambda: _microbatch_logits(self._view, self._forward.leaves, *pack, self._accumulator)
        )
        if is_last:
            self._weights.reduce_in_next_backward()
        if is_dummy:
            # Not a loss times zero, which is NaN if the loss is not finite.
            logits.backward(torch.zeros_like(logits))
            self._counts["dummy_microbatches"] += 1
            return
        tokens, _, segments = pack
        total = self._weighted_loss(logits, members, segments)
        del logits
        total.backward()
        self._loss += total.detach().reshape(())
        self._counts["microbatch_tokens"] += len(tokens)
        self._counts["microbatches"] += 1

    def _weighted_loss(self, logits, members, segments) -> torch.Tensor:
        # Split, not sliced: the gradients of the parts are then joined in one copy. The logits have
        # no other use, so a loss may change its part in place, which a checked split forbids.
        lengths = [end - start for start, end in segments]
        total = None
        for member, own_logits in zip(
            members, torch.unsafe_split_with_sizes(logits, lengths), strict=True
        ):
            i = member.sequence
            loss = self._loss_fn(own_logits, self._group.responses[i], i)
            weighted = self._group.weights[i] * loss
            total = weighted if total is None else total + weighted
        return total

    def _accumulator(self, layer: int):
        key, value = self._forward.live[layer]
        wanted = [(KEY, key.requires_grad), (VALUE, value.requires_grad)]
        if not any(needed for _, needed in wanted):
            return None

        def add(*grads):
            for (slot, needed), grad in zip(wanted, grads, strict=True):
                if needed:
                    self._prefix.accumulate(layer, slot, _tokens_first(grad))

        return add

    def _prefix_backward(self, is_last: bool) -> None:
        forward, prefix = self._forward, self._prefix
        last = len(forward.live) - 1
        roots, seeds = [], []
        for layer, pair in enumerate(forward.live):
            for slot, live in enumerate(pair):
                if live.requires_grad:
                    roots.append(live)
                    seeds.append(_seed(prefix.gradient(layer, slot), live))
        marks = _BackwardMarks(prefix)
        for layer, hidden in enumerate(forward.outputs):
            if hidden.grad_fn is not None:
                hidden.grad_fn.register_prehook(marks.hook(layer))
        # From here the graph alone owns what A saved: each layer is freed as it is consumed.
        forward.live, forward.leaves, forward.outputs = [], [], []
        marks.begin(last)
        if roots:
            if is_last:
                self._weights.reduce_in_next_backward()
            torch.autograd.backward(roots, seeds)
        marks.end()


class _BackwardMarks:
    """Marks layers as backward reaches them; layers without a graph are never reached."""

    def __init__(self, prefix: Prefix):
        self._prefix = prefix
        self._open: int | None = None

    def begin(self, layer: int) -> None:
        self.end()
        self._prefix.mark(native.Edge.BACKWARD_BEGIN, layer)
        self._open = layer

    def end(self) -> None:
        if self._open is not None:
            self._prefix.mark(native.Edge.BACKWARD_END, self._open)
            self._open = None

    def hook(self, layer: int):
        """Returns a prehook for the graph node of the layer's output: its gradient is complete."""
        return lambda grads: self.begin(layer)


def _tokens_first(grad: torch.Tensor) -> torch.Tensor:
    """``[1, kv_heads, tokens, head_dim]`` as contiguous ``[1, tokens, kv_heads, head_dim]``."""
    return grad.transpose(1, 2).contiguous()


def _seed(accumulator: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The accumulated gradient, shaped and typed as the boundary tensor it belongs to."""
    one, heads, tokens, width = live.shape
    return accumulator.view(one, tokens, heads, width).transpose(1, 2).to(live.dtype)


def _pack(group: _Tokens, members):
    """Packs a microbatch as ``[P[-1]] + S_i[:-1]``; returns tokens, positions and member rows."""
    tokens, positions, segments, row, device = [], [], [], 0, group.device
    for member in members:
        response = group.responses[member.sequence]
        tokens += [group.prompt[-1:], response[:-1]]
        first = member.first_position
        positions.append(torch.arange(first, first + len(response), device=device))
        segments.append((row, row + len(response)))
        row += len(response)
    return torch.cat(tokens), torch.cat(positions), segments


def _dummy(group: _Tokens):
    """Packs a response of one token: a dummy microbatch that matches other ranks' passes."""
    position = torch.arange(len(group.prompt) - 1, len(group.prompt), device=group.device)
    return group.prompt[-1:], position, [(0, 1)]


def _microbatch_logits(view, leaves, tokens, positions, segments, accumulator) -> torch.Tensor:
    """Returns logits ``[tokens, vocab]`` of packed responses over the prefix leaves."""
    runs = attention.runs_of(segments)

    def attend(layer, query, key, value, scale):
        prefix_key, prefix_value = leaves[layer]
        return attention.MicrobatchAttention.apply(
            query, key, value, prefix_key, prefix_value, runs, scale, accumulator(layer)
        )

    with attention.use(attend):
        output = view.decoder(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
    return view.head(output.last_hidden_state[0])


def _probe_step(
    view: support.ModelView,
    weights: ReplicatedWeights,
    prompt: torch.Tensor,
    prefix_is_longer: bool,
    device: torch.device,
) -> Probe:
    """Runs the miniature step on the first tokens of the prompt. Does not change any ``.grad``."""
    long, short = PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS
    prefix_tokens, microbatch_tokens = (long, short) if prefix_is_longer else (short, long)
    sample = prompt[torch.arange(long) % len(prompt)].to(device)
    prefix = ProbeForward(view, weights)
    prefix.forward(sample[:prefix_tokens])
    half = microbatch_tokens // 2
    segments = [(0, half), (half, microbatch_tokens)]
    positions = torch.cat([torch.arange(prefix_tokens, prefix_tokens + half, device=device)] * 2)
    with TouchRecorder() as recorder:
        logits = weights.run(
            lambda: _microbatch_logits(
                view,
                prefix.leaves,
                sample[:microbatch_tokens],
                positions,
                segments,
                lambda layer: None,
            )
        )
        loss = logits.float().logsumexp(-1).sum()
        # The lowest trainable parameters pull the gradient through every layer above them; their
        # own gradients are small, and no .grad changes.
        lowest = _lowest_trainable(view, weights)
        if lowest:
            torch.autograd.grad(loss, lowest, allow_unused=True)
    return Probe.from_step(prefix.graphs, recorder.addresses)


def _lowest_trainable(
    view: support.ModelView, weights: ReplicatedWeights
) -> list[torch.nn.Parameter]:
    for module in (*view.layers, view.decoder, view.head):
        parameters = [p for p in weights.weights(module) if p.requires_grad]
        if parameters:
            return parameters
    return []


def _model_shape(view: support.ModelView) -> native.ModelShape:
    """Returns the model figures that the plan's arithmetic needs."""
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
    """Estimates the bytes a layer saves per token from the shapes of the eager modules.

    Two norms save their input, its square root's scale, and the normalised rows (4 rows of hidden
    size, FP32), q, k, v, the attention output and its sum, and the MLP's five intermediate rows.
    """
    hidden, inner = view.config.hidden_size, view.config.intermediate_size
    heads = (2 * view.heads + 2 * view.kv_heads) * view.head_dim
    return 4 * 4 * hidden + dtype.itemsize * (2 * hidden + 2 * heads + 4 * inner)
