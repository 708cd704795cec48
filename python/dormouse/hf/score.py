"""Values of a group's or a tree's responses: what they share runs once, forward only.

The passes are those of a step, with the same microbatches and kernels, so that equal weights give
equal bits. Without a graph only K and V of the prefixes that are read and one microbatch's logits
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from .. import _native as native
from ..group import Group
from ..schedule import Op, Plan, PlanNode, Score
from .batch import Batch, GroupBatch, TreeBatch
from .check import Checked
from .microbatch import dummy_pack, microbatch_output, pack_members
from .outputs import Output
from .prefix import PrefixForward
from .prompt_rows import PromptRows
from .score_values import Measure, Values
from .sharding import ReplicatedWeights
from .step import KeptRows, scores_of_prefixes
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


Put = Callable[[int, int, Values], None]
"""Receives the number of a response, the position of a token in its sequence, and values from there
on."""


def score_batches(
    view: ModelView,
    weights: ReplicatedWeights,
    batches: Sequence[GroupBatch | TreeBatch],
    plan_of: Callable[[Batch], Plan],
    device: torch.device,
    measure: Measure,
    put: Put,
    *,
    microbatches: int = 0,
) -> dict[str, int]:
    """Runs the forward passes of steps; returns the number of tokens and microbatches. ``batches``:
    a tree, or groups with one prompt, which runs once. ``microbatches``: dummies follow up to so
    many."""
    forwards = _Forwards(view, weights, measure, put)
    with torch.no_grad():
        for batch in batches:
            batch.to(device)
            with plan_of(batch) as plan:
                forwards.run(batch, plan)
        for _ in range(forwards.counts["microbatches"], microbatches):
            root = forwards.live[0]
            microbatch_output(view, [root], dummy_pack(batch, 0, root.end))
    return forwards.counts


def batches_of(group: Group) -> list[GroupBatch]:
    """Returns what a step runs of the group, and the responses of weight 0 that it leaves out."""
    batches = [GroupBatch(group)]
    left = set(range(len(group.responses))) - set(batches[0].numbers)
    if left:
        weights = [float(i in left) for i in range(len(group.responses))]
        others = Group(
            group.prompt, group.responses, weights, routed_experts=group.routed_experts
        )
        batches.append(GroupBatch(others))
    return batches


class _Forwards:
    """Passes without a graph."""

    def __init__(self, view: ModelView, weights: ReplicatedWeights, measure: Measure, put: Put):
        self._view, self._weights, self._measure, self._put = view, weights, measure, put
        self.live: dict[int, PrefixForward] = {}
        """Prefixes that are read, by node. A root stays: later batches begin with it too."""
        self.counts = dict.fromkeys(COUNTS, 0)

    def run(self, batch: GroupBatch | TreeBatch, plan: Plan) -> None:
        """Runs the forwards of a plan."""
        nodes, scores = plan.nodes(), scores_of_prefixes(plan)

        def path_of(node: int | None) -> list[PrefixForward]:
            path = []
            while node is not None:
                path.append(self.live[node])
                node = nodes[node].parent
            return path[::-1]

        for op in plan:
            path = path_of(op.reads)
            if op.kind is native.OpKind.PREFIX_FORWARD and op.node not in self.live:
                self._prefix(batch, op.node, nodes[op.node], path, scores.get(op.node, ()))
            elif op.kind is native.OpKind.MICROBATCH:
                self._microbatch(batch, op, path)
            elif op.kind is native.OpKind.PREFIX_BACKWARD and path:
                del self.live[op.node]

    def _prefix(
        self,
        batch: GroupBatch | TreeBatch,
        number: int,
        node: PlanNode,
        path: list[PrefixForward],
        scores: Sequence[Score],
    ) -> None:
        forward = self.live[number] = PrefixForward(self._view, self._weights, path)
        tokens = batch.tokens(node.sequence, node.rows)
        kept = self._kept(scores, tokens)

        def read(rows: PromptRows) -> None:
            output = replace(rows.output(), logits=rows.take_logits())
            self._values(batch, scores, kept, output, None)

        forward.forward(
            tokens,
            node.rows.start,
            batch.request.of_labels if scores else batch.request,
            read if scores else None,
            logits_rows=kept.index,
            experts=batch.experts(node.sequence, node.rows),
        )
        self.counts["prefix_tokens"] += len(tokens)

    def _microbatch(
        self, batch: GroupBatch | TreeBatch, op: Op, path: list[PrefixForward]
    ) -> None:
        pack = pack_members(batch, op.members)
        kept = self._kept(op.scores, pack.tokens)
        output = microbatch_output(self._view, path, pack, batch.request, kept.index)
        prompt = path[-1].rows.output() if batch.request.prompt else None
        self._values(batch, op.scores, kept, output, prompt)
        self.counts["microbatch_tokens"] += len(pack.tokens)
        self.counts["microbatches"] += 1

    def _kept(self, scores: Sequence[Score], tokens: torch.Tensor) -> KeptRows:
        return KeptRows(scores, tokens, selects=self._view.selects_logits)

    def _values(
        self,
        batch: GroupBatch | TreeBatch,
        scores: Sequence[Score],
        kept: KeptRows,
        output: Output,
        prompt: Output | None,
    ) -> None:
        kept.check(output.logits)
        output = kept.of(output)
        for score in scores:
            # Each response by itself, as loss functions see it: the sum over a single row may be
            # split among threads, which changes its rounding.
            place = kept.place(score.rows)
            own, labels = output.rows(place.start, place.stop), labels_of(batch, score)
            of_logits = self._measure.differentiable_values(own.logits, labels)
            number = batch.numbers[score.sequence]
            self._put(number, score.first_label, Values.of(of_logits, own, prompt))


def labels_of(batch: Batch, score: Score) -> torch.Tensor:
    """Returns the labels of a score, on the device."""
    first = score.first_label
    return batch.tokens(score.sequence, range(first, first + len(score.rows)))
