"""One shared-prefix step over one group: phases A, B and C (docs/method.md §1).

The plan defines the order of ops, the prefix what may sleep and when. This module runs the model
and reports the begin and end of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .. import _native as native
from ..runtime import Prefix
from ..schedule import Plan
from . import attention, checkpointing, registry, support
from .check import Checked
from .prefix import KEY, VALUE, PlannedForward, PrefixForward
from .sharding import ReplicatedWeights

LossFn = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


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
    checked: Checked | None = None
    """The last check of the model: when, why and how closely the step equals the dense one."""


class GroupTokens:
    """A group's tokens on the model's device, moved in one copy, so that microbatches need no host
    synchronisation."""

    def __init__(self, group: Group, device: torch.device):
        lengths = [len(group.prompt), *map(len, group.responses)]
        moved = torch.cat([group.prompt, *group.responses]).to(device)
        self.prompt, *self.responses = moved.split(lengths)
        self.weights = group.weights
        self.device = device


class GroupStep:
    """One A/B/C step over one group."""

    def __init__(
        self,
        view,
        weights: ReplicatedWeights,
        group: GroupTokens,
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
        logits = microbatch_logits(self._forward, *pack, self._accumulator)
        if is_last:
            self._weights.reduce_in_next_backward()
        if is_dummy:
            # Not a loss times zero, which is NaN if the loss is not finite.
            logits.backward(torch.zeros_like(logits))
            self._counts["dummy_microbatches"] += 1
            return
        tokens, _, segments = pack
        total = self._weighted_loss(logits, members, segments)
        if total.requires_grad:
            del logits
            total.backward()
        else:
            # Every loss is constant. The backward still runs: it may hold collectives.
            logits.backward(torch.zeros_like(logits))
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
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError(
                    f"loss_fn returned {_named(loss)} for response {i}; accepted: a tensor of one "
                    "element"
                )
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
        # After the last layer that makes K and V of its own, outputs get no gradient: such a layer
        # begins with its K and V. Reversed: later layers may hold the same tensors.
        owners = {x.grad_fn: layer for layer, x in reversed(_numbered(forward.live)) if x.grad_fn}
        for node, layer in owners.items():
            node.register_prehook(marks.hook(layer))
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
        if self._open == layer:
            return
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


def _numbered(live) -> list[tuple[int, torch.Tensor]]:
    return [(layer, tensor) for layer, pair in enumerate(live) for tensor in pair]


def _tokens_first(grad: torch.Tensor) -> torch.Tensor:
    """``[1, kv_heads, tokens, head_dim]`` as contiguous ``[1, tokens, kv_heads, head_dim]``."""
    return grad.transpose(1, 2).contiguous()


def _seed(accumulator: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """The accumulated gradient, shaped and typed as the boundary tensor it belongs to."""
    one, heads, tokens, width = live.shape
    return accumulator.view(one, tokens, heads, width).transpose(1, 2).to(live.dtype)


def _pack(group: GroupTokens, members):
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


def _named(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _dummy(group: GroupTokens):
    """Packs a response of one token: a dummy microbatch that matches other ranks' passes."""
    position = torch.arange(len(group.prompt) - 1, len(group.prompt), device=group.device)
    return group.prompt[-1:], position, [(0, 1)]


def microbatch_logits(
    prefix: PrefixForward, tokens, positions, segments, accumulator, *, checkpoints: bool = True
) -> torch.Tensor:
    """Returns logits ``[tokens, vocab]`` of packed responses over the prefix leaves.

    ``checkpoints``: whether parts that the model checkpoints are computed again in backward.
    """
    packed = attention.Packed.of(segments)
    left = set(range(len(prefix.leaves)))

    def attend(call: registry.Call):
        layer = prefix.layer_of.get(call.module)
        if layer not in left:
            raise support.UnsupportedModelError(
                f"{type(call.module).__name__} runs attention that did not run once over the "
                "prompt; accepted: the same attention once in every forward"
            )
        left.remove(layer)
        return attend_again(call)

    def attend_again(call: registry.Call):
        layer = prefix.layer_of[call.module]
        return attention.PackedAttention.apply(
            call.query,
            call.key,
            call.value,
            *prefix.leaves[layer],
            call.sinks,
            packed,
            call.rules,
            accumulator(layer),
        )

    again = functools.partial(registry.use, attend_again) if checkpoints else None
    with registry.use(attend), checkpointing.use(prefix.view.model, again):
        output = prefix.view.run(tokens, positions)
    if left:
        raise support.UnsupportedModelError(
            f"attention of layer {min(left)} ran over the prompt and not over the responses; "
            "accepted: the same attention once in every forward"
        )
    return support.logits_of(output)[0]
