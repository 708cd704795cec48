"""Log-probabilities of a group's responses: the prompt runs once, forward only.

The passes are those of a step, with the same microbatches and kernels, so that equal weights give
equal bits. Without a graph only K and V of the prompt and one microbatch's logits exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .. import _native as native
from ..group import Group
from ..schedule import Member, Plan
from .batch import GroupBatch
from .check import Checked
from .microbatch import dummy_pack, microbatch_output, pack_members
from .outputs import Losses, Request
from .prefix import PrefixForward
from .score_values import Measure, Values
from .sharding import ReplicatedWeights
from .support import ModelView

COUNTS = ("prefix_tokens", "microbatch_tokens", "microbatches")


@dataclass
class GroupScores:
    """Log-probabilities of a group's responses, on the model's device, without a graph."""

    log_probabilities: list[torch.Tensor]
    """Per response, of its own tokens, ``[len(S_i)]``; FP64 for FP64 models, else FP32."""
    entropies: list[torch.Tensor] | None
    """Per response, of the distributions its tokens were drawn from, in nats; None if not asked
    for."""
    counts: dict = field(default_factory=dict)
    """Number of tokens and microbatches run."""
    checked: Checked | None = None
    """The last check of the model."""


def score_group(
    view: ModelView,
    weights: ReplicatedWeights,
    group: Group,
    plan_of: Callable[[GroupBatch], Plan],
    device: torch.device,
    measure: Measure,
    put: Callable[[int, Values], None],
    *,
    microbatches: int = 0,
) -> dict[str, int]:
    """Runs the forward passes of a step, and those of the responses that a step leaves out; returns
    the number of tokens and microbatches. ``put(number, values)``: receives each response's.
    ``microbatches``: dummies follow up to so many."""
    counts = dict.fromkeys(COUNTS, 0)
    forward = PrefixForward(view, weights)
    with torch.no_grad():
        for batch in _batches(group, measure.asked.request):
            batch.to(device)
            with plan_of(batch) as plan:
                for op in plan:
                    if op.kind is native.OpKind.PREFIX_FORWARD and not forward.leaves:
                        experts = batch.experts(0, op.tokens)
                        tokens = batch.tokens(0, op.tokens)
                        forward.forward(tokens, request=batch.request, experts=experts)
                        counts["prefix_tokens"] += len(op.tokens)
                    elif op.kind is native.OpKind.MICROBATCH:
                        _microbatch(forward, batch, op.members, measure, put, counts)
        for _ in range(counts["microbatches"], microbatches):
            microbatch_output(view, [forward], dummy_pack(batch, 0, forward.end))
    return counts


def _batches(group: Group, request: Request) -> list[GroupBatch]:
    """Returns what a step runs of the group, and the responses of weight 0 that it leaves out."""
    losses = Losses(request=request)
    batches = [GroupBatch(group, losses)]
    left = set(range(len(group.responses))) - set(batches[0].numbers)
    if left:
        weights = [float(i in left) for i in range(len(group.responses))]
        others = Group(
            group.prompt, group.responses, weights, routed_experts=group.routed_experts
        )
        batches.append(GroupBatch(others, losses))
    return batches


def _microbatch(
    forward: PrefixForward,
    batch: GroupBatch,
    members: Sequence[Member],
    measure: Measure,
    put: Callable[[int, Values], None],
    counts: dict[str, int],
) -> None:
    """Runs one microbatch."""
    pack = pack_members(batch, members)
    output = microbatch_output(forward.view, [forward], pack, batch.request)
    prompt = forward.rows.output() if batch.request.prompt else None
    for member, (start, end) in zip(members, pack.segments, strict=True):
        # Each response by itself, as loss functions see it: the sum over a single row may be split
        # among threads, which changes its rounding.
        own, labels = output.rows(start, end), batch.labels(member.sequence)
        of_logits = measure.differentiable_values(own.logits, labels)
        put(batch.numbers[member.sequence], Values.of(of_logits, own, prompt))
    counts["microbatch_tokens"] += len(pack.tokens)
    counts["microbatches"] += 1
