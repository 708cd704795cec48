"""What a step runs: token sequences on the device, their plan, and the losses of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from .. import _native as native
from ..exchange import Stem
from ..group import Group
from ..rank_plan import RankPlan
from ..schedule import Forest, Machine, Plan
from ..tree import Conversation, Tree
from .outputs import Losses, Output, Request

# Rows of a microbatch where a caller names no number. Fewer cost time, as each repeats what does not
# depend on its rows; more take memory. A GPU repeats more: the launches, and the sums into weight
# gradients, which take as long as 150 rows (docs/evidence/gpu.md).
DEFAULT_MICROBATCH_TOKENS = {"cpu": 512, "cuda": 4096}

LossFn = Callable[[torch.Tensor | Output, torch.Tensor, int], torch.Tensor]
PromptLossFn = Callable[[torch.Tensor | Output, torch.Tensor], torch.Tensor]
TokenLossFn = Callable[[torch.Tensor | Output, torch.Tensor, int, range], torch.Tensor]


class Sample(NamedTuple):
    """Tokens of a batch, from which a probe takes its rows."""

    tokens: torch.Tensor
    experts: torch.Tensor | None
    """Recorded for the first of them."""


class Batch(Protocol):
    """Sequences by number, as in the plan."""

    def plan(
        self,
        model: native.ModelShape,
        microbatch_tokens: int,
        cuts: Sequence[torch.Tensor] = (),
    ) -> Plan:
        """Creates the plan of the sequences. ``cuts``: beginnings of its stems, in host memory; a
        node ends where each of them does. Raises :class:`dormouse.ArgumentError`."""

    def dense_runs(self) -> list[tuple[int, int]]:
        """Returns the rows that a dense run of each sequence has, and those of them with logits."""

    def stems(self) -> list[Stem]:
        """Returns the beginnings of sequences that other ranks may compute."""

    def beginning(self, sequence: int, tokens: int) -> torch.Tensor:
        """Returns the first tokens of a sequence, in host memory."""

    def to(self, device: torch.device) -> None:
        """Moves all tokens to the device in one copy, so that passes need no synchronisation."""

    def tokens(self, sequence: int, positions: range) -> torch.Tensor:
        """Returns the tokens of a sequence at ``positions``, on the device."""

    def experts(self, sequence: int, positions: range) -> torch.Tensor | None:
        """Returns the recorded experts of a sequence at ``positions``, on the device; None: routers
        select by themselves."""

    def loss(
        self, sequence: int, given: torch.Tensor | Output, positions: range
    ) -> torch.Tensor:
        """Returns the loss of the labels at ``positions``, unweighted: a tensor of one element. The
        loss function gets labels of its own: later passes read the tokens. ``given``: what else it
        receives of their rows."""

    def prompt_loss(self, given: torch.Tensor | Output, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss of the prompt's rows, if ``request`` has one."""

    request: Request
    """What losses read."""
    has_loss: bool
    """Without, every microbatch is a dummy."""
    is_empty: bool
    """No token carries loss."""
    longest_tokens: int
    """Length of the longest sequence."""

    def longest_rows(self, microbatch_tokens: int) -> int:
        """Returns at least the rows of the longest microbatch with the prefixes before it."""

    def sample(self) -> Sample:
        """Returns tokens of the batch, in host memory."""

    def prefix_is_longer(self, microbatch_tokens: int) -> bool:
        """Returns whether a prefix has at least as many rows as what runs after it."""


class GroupBatch:
    """A group. Its responses of weight 0 are not run."""

    def __init__(self, group: Group, losses: Losses = Losses()):
        kept = [i for i, weight in enumerate(group.weights) if weight != 0.0]
        # Other ranks may wait for the passes of a group without weights. One response stands there,
        # of which none runs.
        self.numbers = kept or [0]
        """The place of each sequence among the responses."""
        self.group = Group(
            group.prompt,
            [group.responses[i] for i in self.numbers],
            [group.weights[i] for i in self.numbers],
            routed_experts=group.routed_experts
            and [group.routed_experts[i] for i in self.numbers],
        )
        self._losses = losses
        self._experts = _Experts(self.group.routed_experts)
        self.request = losses.request
        self.has_loss = losses.loss_fn is not None and bool(kept)
        self.is_empty = not kept and not self.request.has_prompt_loss
        self.longest_tokens = len(group.prompt) + max(map(len, self.group.responses))

    def longest_rows(self, microbatch_tokens):
        responses = sum(map(len, self.group.responses))
        rows = len(self.group.prompt) + min(responses, microbatch_tokens)
        return max(rows, self.longest_tokens)

    def sample(self):
        return Sample(self.group.prompt, self._experts.of_first())

    def experts(self, sequence, positions):
        return self._experts.at(sequence, positions)

    def prefix_is_longer(self, microbatch_tokens):
        longest = max(map(len, self.group.responses))
        return len(self.group.prompt) - 1 >= max(longest, microbatch_tokens)

    def plan(self, model, microbatch_tokens, cuts=()):
        return Plan.of_group(
            self.group,
            cuts=list(map(len, cuts)),
            microbatch_rows=microbatch_tokens,
            model=model,
            last_layer_dead=not self.request.runs_prompt_to_end,
        )

    def dense_runs(self):
        prompt = len(self.group.prompt) - 1
        return [(prompt + len(each), len(each)) for each in self.group.responses]

    def stems(self):
        return [Stem(self.group.prompt, None)]

    def beginning(self, sequence, tokens):
        return self.group.prompt[:tokens]

    def to(self, device):
        lengths = [len(self.group.prompt), *map(len, self.group.responses)]
        moved = torch.cat([self.group.prompt, *self.group.responses]).to(device)
        self._prompt, *self._responses = moved.split(lengths)
        self._experts.to(device)

    def tokens(self, sequence, positions):
        shared = len(self._prompt)
        prompt = self._prompt[positions.start : positions.stop]
        first, end = (max(0, at - shared) for at in (positions.start, positions.stop))
        return torch.cat([prompt, self._responses[sequence][first:end]])

    def labels(self, sequence: int) -> torch.Tensor:
        """Returns the tokens of a response, on the device."""
        return self._responses[sequence]

    def loss(self, sequence, given, positions):
        number = self.numbers[sequence]
        loss = self._losses.loss_fn(given, self.labels(sequence).clone(), number)
        return _scalar(loss, "loss_fn", f" for response {number}")

    def prompt_loss(self, given, labels):
        return _scalar(self._losses.prompt_loss_fn(given, labels), "prompt_loss_fn")


class TreeBatch:
    """A tree. Tokens after a conversation's last label are not run."""

    has_loss = True

    def __init__(
        self,
        tree: Tree,
        losses: Losses = Losses(),
        *,
        machine: Machine | None = None,
        block_tokens: int = 0,
        device_bytes: int = 0,
        plan: RankPlan | None = None,
    ):
        """``machine``: its rates decide which short prefixes are not worth sharing; None: all are
        shared. ``block_tokens``: longer prefixes run in blocks; 0: whole. ``device_bytes``: limit
        for what the plan counts; the plan then decides what sleeps and what runs forward again. 0:
        the runtime decides. ``plan``: made before, of these conversations in this order; without
        the other options. It runs every conversation to its end."""
        used = [each.used_tokens for each in tree.conversations]
        self._planned = plan
        if plan is not None:
            if machine is not None or block_tokens or device_bytes:
                raise TypeError(
                    "plan with machine, block_tokens or device_bytes; accepted: plan alone"
                )
            plan.check(
                [each.tokens for each in tree.conversations],
                [each.labels for each in tree.conversations],
                [each.weight for each in tree.conversations],
            )
            used = [len(each.tokens) for each in tree.conversations]
        self.numbers = [i for i, count in enumerate(used) if count]
        self._used = [used[i] for i in self.numbers]
        self._conversations: list[Conversation] = [tree.conversations[i] for i in self.numbers]
        if losses.request.runs_prompt_to_end:
            raise TypeError(
                f"losses of a tree read {losses.request.description}, and a tree has no prompt; "
                "accepted: outputs, and labels on the tokens of a prompt"
            )
        self.request = losses.request
        self._loss_fn = losses.loss_fn
        experts = tree.routed_experts
        self._experts = _Experts(experts and [experts[i] for i in self.numbers])
        self._options = {
            "machine": machine,
            "block_rows": block_tokens,
            "device_bytes": device_bytes,
            "runtime_residency": device_bytes == 0,
        }

        self.is_empty = not self._conversations
        self.longest_tokens = max(self._used, default=0)

    def longest_rows(self, microbatch_tokens):
        if self._planned is not None:
            microbatch_tokens = self._planned.microbatch_rows
        return self.longest_tokens + min(sum(self._used), microbatch_tokens)

    def sample(self):
        return Sample(self._conversations[0].tokens, self._experts.of_first())

    def experts(self, sequence, positions):
        return self._experts.at(sequence, positions)

    def prefix_is_longer(self, microbatch_tokens):
        # The longer prefix leaves caches that later passes read, so its probe finds more.
        return True

    def plan(self, model, microbatch_tokens, cuts=()):
        if self._planned is not None:
            return self._planned.plan_for(model)
        sequences = [
            each.tokens[:count]
            for each, count in zip(self._conversations, self._used, strict=True)
        ]
        with self._forest(sequences, model.vocab, cuts) as forest:
            return Plan(
                forest,
                model=model,
                spans=[each.labels for each in self._conversations],
                weights=[each.weight for each in self._conversations],
                microbatch_rows=microbatch_tokens,
                last_layer_dead=True,
                always_share=bool(cuts),
                **self._options,
            )

    def _forest(self, sequences: Sequence[torch.Tensor], vocab: int, cuts) -> Forest:
        if not cuts:
            return Forest.from_ids(sequences, vocab=vocab)
        # An id of its own after each cut ends a node there.
        ended = [torch.cat([cut, torch.tensor([vocab], device="cpu")]) for cut in cuts]
        with Forest.from_ids([*sequences, *ended], vocab=vocab + 1) as whole:
            return whole.part(range(len(sequences)))

    def dense_runs(self):
        labels = [sum(end - begin for begin, end in each.labels) for each in self._conversations]
        return list(zip((count - 1 for count in self._used), labels, strict=True))

    def stems(self):
        firsts = [each.labels[0][0] for each in self._conversations]
        return [
            Stem(each.tokens[:first], int(each.tokens[first]))
            for each, first in zip(self._conversations, firsts, strict=True)
        ]

    def beginning(self, sequence, tokens):
        return self._conversations[sequence].tokens[:tokens]

    def to(self, device):
        moved = torch.cat([each.tokens for each in self._conversations]).to(device)
        self._tokens = moved.split([len(each.tokens) for each in self._conversations])
        self._experts.to(device)

    def tokens(self, sequence, positions):
        return self._tokens[sequence][positions.start : positions.stop]

    def loss(self, sequence, given, positions):
        number = self.numbers[sequence]
        labels = self.tokens(sequence, positions).clone()
        losses = self._loss_fn(given, labels, number, positions)
        if not isinstance(losses, torch.Tensor) or losses.shape != (len(positions),):
            raise TypeError(
                f"loss_fn returned {_named(losses)} for labels {positions.start} to "
                f"{positions.stop} of conversation {number}; accepted: a tensor of shape "
                f"[{len(positions)}], the loss of each label"
            )
        return losses.sum()


class _Experts:
    """Recorded experts by sequence; None: routers select by themselves."""

    def __init__(self, recorded: list[torch.Tensor] | None):
        self._recorded = recorded

    def of_first(self) -> torch.Tensor | None:
        """Returns those of the first sequence."""
        return self._recorded[0] if self._recorded else None

    def to(self, device: torch.device) -> None:
        """Moves all to the device in one copy."""
        if self._recorded:
            moved = torch.cat(self._recorded).to(device)
            self._recorded = list(moved.split(list(map(len, self._recorded))))

    def at(self, sequence: int, positions: range) -> torch.Tensor | None:
        """Returns those of a sequence at ``positions``."""
        if not self._recorded:
            return None
        return self._recorded[sequence][positions.start : positions.stop]


def batch_of(
    batch: Group | Tree | Sequence[Conversation], losses: Losses, **options
) -> Batch:
    """Returns what a step runs. ``options``: of :class:`TreeBatch`."""
    if isinstance(batch, Group):
        if options:
            raise TypeError(f"{', '.join(options)} with a Group; accepted: with a Tree")
        return GroupBatch(batch, losses)
    return TreeBatch(tree_of(batch), losses, **options)


def tree_of(batch: Tree | Sequence[Conversation]) -> Tree:
    """Returns a tree, or that of a list of conversations."""
    return batch if isinstance(batch, Tree) else Tree(batch)


def recorded_experts(
    batch: Group | Tree | Sequence[Conversation],
) -> list[torch.Tensor | None]:
    """Returns the recorded experts of every sequence of a batch."""
    if isinstance(batch, Group):
        return batch.routed_experts or [None]
    return [each.routed_experts for each in tree_of(batch).conversations]


def has_tree(batches: Sequence[Batch]) -> bool:
    """Returns whether any of them is a tree."""
    return any(isinstance(batch, TreeBatch) for batch in batches)


def _scalar(loss, function: str, rows: str = "") -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(
            f"{function} returned {_named(loss)}{rows}; accepted: a tensor of one element"
        )
    return loss.reshape(())


def _named(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
