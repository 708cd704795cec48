"""Conversations that share beginnings: a prefix tree, found from their token ids."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch

from .errors import ArgumentError
from .group import experts_of, records_of, tokens_of


class Conversation:
    """One token sequence and the tokens that carry loss.

    ``tokens``: a 1-D integer tensor or list. ``labels``: half-open ranges ``(begin, end)`` of the
    positions that carry loss, ascending, or a boolean mask ``[tokens]``; default: every token but
    the first, which no row predicts. ``weight``: a finite float; the step's loss is
    ``Σ weight · loss`` over all labels of all conversations. ``routed_experts``: as for
    :class:`dormouse.Group`, of this conversation's tokens; rows that conversations share follow the
    first of them.

    Raises :class:`dormouse.ArgumentError` naming the value and what is accepted.
    """

    def __init__(
        self,
        tokens: torch.Tensor | Sequence[int],
        labels: Sequence[tuple[int, int]] | torch.Tensor | None = None,
        weight: float = 1.0,
        *,
        routed_experts: torch.Tensor | None = None,
    ):
        self.tokens = tokens_of(tokens, "a conversation")
        self.labels = _spans(labels, len(self.tokens))
        self.weight = float(weight)
        if not math.isfinite(self.weight):
            raise ArgumentError(f"weight is {weight}; accepted: a finite number")
        self.routed_experts = None
        if routed_experts is not None:
            self.routed_experts = experts_of(routed_experts, len(self.tokens), "a conversation")

    @property
    def used_tokens(self) -> int:
        """Number of tokens up to the last label, which are all that a step needs; 0 if the weight
        is 0 or nothing carries loss."""
        return self.labels[-1][1] if self.labels and self.weight != 0.0 else 0

    def __repr__(self) -> str:
        return f"Conversation({len(self.tokens)} tokens, labels={self.labels})"


class Tree:
    """Conversations of one step; equal beginnings are computed once.

    A turn that several conversations share, with the same tokens before it, is one node of the
    tree: it runs once, forward and backward, and each conversation scores its labels with its own
    weight.
    """

    def __init__(self, conversations: Sequence[Conversation]):
        self.conversations = list(conversations)
        if not self.conversations:
            raise ArgumentError("0 conversations; accepted: at least 1")
        for each in self.conversations:
            if not isinstance(each, Conversation):
                raise TypeError(f"a {type(each).__name__}; accepted: Conversation")
        self.routed_experts = records_of([each.routed_experts for each in self.conversations])

    def __repr__(self) -> str:
        return f"Tree({len(self.conversations)} conversations)"


def _spans(labels, count: int) -> list[tuple[int, int]]:
    """Returns ascending ranges of positions that do not touch each other."""
    if labels is None:
        return [(1, count)] if count > 1 else []
    if isinstance(labels, torch.Tensor):
        if labels.dtype is not torch.bool or labels.shape != (count,):
            raise ArgumentError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}; accepted: a boolean "
                f"mask [{count}], or ranges"
            )
        outside = torch.zeros(1, dtype=torch.int, device="cpu")
        edges = torch.diff(labels.cpu().int(), prepend=outside, append=outside)
        begins = (edges == 1).nonzero().flatten().tolist()
        ends = (edges == -1).nonzero().flatten().tolist()
        labels = list(zip(begins, ends, strict=True))
    try:
        pairs = [(operator.index(begin), operator.index(end)) for begin, end in labels]
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"labels {labels!r}; accepted: a boolean tensor [{count}], or ranges (begin, end) of "
            "positions"
        ) from error
    spans: list[tuple[int, int]] = []
    for begin, end in pairs:
        lowest = spans[-1][1] if spans else 1
        if not lowest <= begin < end <= count:
            raise ArgumentError(
                f"labels ({begin}, {end}); accepted: ranges within {lowest} to {count}, ascending: "
                "no row predicts the first token"
            )
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return spans
