"""Rows of a batch as trees, where prompts or responses of several rows begin alike.

Turns of one conversation as rows of their own, branches of a search, questions after one document:
their prompts differ, so groups would compute what they share once for each. A tree computes it
once, and costs more passes. The planner decides, by counting.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import _native as native
from ..schedule import Machine, Plan
from ..tree import Conversation, Tree
from .batch import TreeBatch
from .outputs import Losses
from .padded import Index, Places, RowPlaces

# Rows that begin alike for fewer tokens are not looked at together: templates of chats begin alike.
SHARED_TOKENS_MIN = 16
# A forward with its backward costs what so many rows do: launches, and sums into gradients of
# weights (docs/evidence/gpu.md).
PASS_ROWS = 150
# A tree runs if it takes at most this share of the groups' predicted time.
TREE_SHARE_MAX = 0.9
# Rates are relative: only their ratio matters.
FLOPS_PER_S = 10**9


@dataclass(frozen=True)
class TreePlaces(RowPlaces):
    """Rows of a batch that run as a tree, and where their responses are."""

    tokens: list[torch.Tensor]
    """Of each row, prompt and response."""
    prompt_tokens: list[int]
    rows: list[int]
    indices: list[Index]
    machine: Machine
    """Its rates decide which short beginnings are not worth sharing."""
    kept_tokens: int
    """All but those that rows share."""
    prompts: int
    microbatches: int = 0
    prefix_tokens: int = 0
    """Those of prefixes may be in microbatches."""

    @classmethod
    def of(cls, groups: Sequence[Places], machine: Machine) -> TreePlaces:
        """Returns the rows of several groups."""
        tokens, prompts = [], []
        for each in groups:
            tokens += [torch.cat([each.group.prompt, own]) for own in each.group.responses]
            prompts += [len(each.group.prompt)] * len(each.rows)
        rows = [row for each in groups for row in each.rows]
        indices = [index for each in groups for index in each.indices]
        keys = sorted(map(_key, tokens))
        shared = sum(itertools.starmap(_equal_tokens, itertools.pairwise(keys)))
        kept = sum(map(len, tokens)) - shared
        return cls(tokens, prompts, rows, indices, machine, kept, len(groups))

    def first_label(self, number):
        return self.prompt_tokens[number]

    def batch(self, losses=Losses(), weights=None):
        conversations = [
            Conversation(own, [(prompt, len(own))], weight)
            for own, prompt, weight in zip(
                self.tokens, self.prompt_tokens, weights or [1.0] * len(self.tokens), strict=True
            )
        ]
        return TreeBatch(Tree(conversations), losses, machine=self.machine)

    @property
    def label_tokens(self):
        return sum(map(len, self.tokens)) - sum(self.prompt_tokens)


def with_trees(
    places: Sequence[Places], shape: native.ModelShape, microbatch_tokens: int
) -> list[RowPlaces]:
    """Returns the same rows, those of groups that begin alike as a tree where that is predicted to
    be faster. It does not depend on how the passes run."""
    pass_flops = 3 * PASS_ROWS * shape.layers * shape.layer_linear_weights
    machine = Machine(flops_per_s=FLOPS_PER_S, op_overhead_ns=pass_flops)
    found: dict[int, RowPlaces] = {}
    for numbers in _alike(places):
        groups = [places[number] for number in numbers]
        tree = TreePlaces.of(groups, machine)
        if _saves(groups, tree) and _is_faster(groups, tree, shape, microbatch_tokens):
            found[numbers[0]] = tree
        else:
            found |= zip(numbers, groups, strict=True)
    return [found[number] for number in sorted(found)]


def _saves(groups: Sequence[Places], tree: TreePlaces) -> bool:
    """Returns whether a tree has so many tokens fewer that a plan is worth making."""
    tokens = sum(len(each.group.prompt) + each.label_tokens for each in groups)
    return tree.kept_tokens <= TREE_SHARE_MAX * tokens


def _is_faster(
    groups: Sequence[Places], tree: TreePlaces, shape: native.ModelShape, microbatch_tokens: int
) -> bool:
    def seconds(plan: Plan) -> float:
        with plan:
            return plan.predict()["seconds_shared"]

    options = {"model": shape, "microbatch_rows": microbatch_tokens, "machine": tree.machine}
    of_groups = sum(seconds(Plan.of_group(each.group, **options)) for each in groups)
    of_tree = seconds(tree.batch().plan(shape, microbatch_tokens))
    return of_tree <= TREE_SHARE_MAX * of_groups


def _alike(places: Sequence[Places]) -> list[list[int]]:
    """Returns sets of groups whose rows begin alike, by number."""
    keys = sorted(
        (_key(torch.cat([each.group.prompt, own])), number)
        for number, each in enumerate(places)
        for own in each.group.responses
    )
    first = list(range(len(places)))

    def find(number: int) -> int:
        while first[number] != number:
            number = first[number]
        return number

    for (key, number), (after, other) in itertools.pairwise(keys):
        if _equal_tokens(key, after) >= SHARED_TOKENS_MIN:
            both = sorted((find(number), find(other)))
            first[both[1]] = both[0]
    sets: dict[int, list[int]] = {}
    for number in range(len(places)):
        sets.setdefault(find(number), []).append(number)
    return list(sets.values())


def _key(tokens: torch.Tensor) -> bytes:
    """Returns bytes that order sequences by their tokens."""
    return tokens.numpy().astype(">i8").tobytes()


def _equal_tokens(key: bytes, other: bytes) -> int:
    """Returns the number of tokens with which two sequences begin alike."""
    a, b = (np.frombuffer(each, ">i8") for each in (key, other))
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
