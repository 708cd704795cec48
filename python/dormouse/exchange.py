"""Which prefixes ranks share in a step, and which rank computes each (decision 0026).

Every rank plans from the stems of all ranks, so all have the same plan without a coordinator. A
stem is the part of a sequence before its first label. A node of their prefix tree that several
ranks need is exchanged: one rank computes it, forward and backward, for all.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from . import _native as native
from .schedule import Forest, Machine, rates

# In a message: a stem that shares no row with its label.
_NO_LABEL = -1


class Stem(NamedTuple):
    """The tokens of a sequence before its first label, in host memory."""

    tokens: torch.Tensor
    label: int | None
    """The first label, if its row may be shared within the rank."""


class ExchangedNode(NamedTuple):
    """A prefix that one rank computes for several."""

    tokens: torch.Tensor
    """All tokens up to its end, in host memory; the last one's row is not part of it."""
    rows: range
    parent: int | None
    """Its place in the plan; None: nothing comes before its rows."""
    ranks: tuple[int, ...]
    owner: int


def packed(stems: Sequence[Stem]) -> torch.Tensor:
    """Returns stems as numbers, each once."""
    distinct = {(stem.label, as_bytes(stem.tokens)): stem for stem in stems}.values()
    head = [len(distinct)]
    for stem in distinct:
        head += [len(stem.tokens), _NO_LABEL if stem.label is None else stem.label]
    return torch.cat([torch.tensor(head, device="cpu"), *(stem.tokens for stem in distinct)])


def unpacked(numbers: torch.Tensor) -> list[Stem]:
    """Reverses :func:`packed`."""
    count = int(numbers[0])
    head = numbers[1 : 1 + 2 * count].view(count, 2).tolist()
    tokens = numbers[1 + 2 * count :].split([length for length, _ in head])
    return [
        Stem(own, None if label == _NO_LABEL else label)
        for own, (_, label) in zip(tokens, head, strict=True)
    ]


def plan(
    stems: Sequence[Sequence[Stem]], vocab: int, pays: Callable[[range], bool] = lambda rows: True
) -> list[ExchangedNode]:
    """Returns the prefixes to exchange, each after its parent. ``stems``: of each rank. ``pays``:
    whether rows are received sooner than computed.

    What a rank shares beyond a stem carries labels, and their losses are that rank's own. Such rows
    are not exchanged, nor is anything below them.
    """
    flat = [(rank, stem) for rank, own in enumerate(stems) for stem in own]
    if len({rank for rank, _ in flat}) < 2:
        return []
    # An id of its own after each stem ends a node there.
    ended = [
        torch.cat([stem.tokens, torch.tensor([vocab + i], device="cpu")]) for i, (_, stem) in enumerate(flat)
    ]
    with Forest.from_ids(ended, vocab=vocab + len(flat)) as forest:
        nodes, endings = forest.nodes(), forest.endings()
    holders: list[set[int]] = [set() for _ in nodes]
    labels: list[set[int]] = [set() for _ in nodes]
    for (rank, stem), ending in zip(flat, endings, strict=True):
        node = nodes[ending.node].parent
        # Else no other stem continues where this one ends.
        if node is not None and nodes[node].tokens.stop == len(stem.tokens):
            labels[node].add(stem.label)
        while node is not None:
            holders[node].add(rank)
            node = nodes[node].parent
    found: list[ExchangedNode] = []
    place: dict[int | None, int | None] = {None: None}
    for number, node in enumerate(nodes):
        if len(holders[number]) < 2 or node.parent not in place:
            continue
        first = int(ended[node.sequence][node.tokens.start])
        if node.parent is not None and first in labels[node.parent]:
            continue
        # A row predicts the next token: the last one's row belongs to what follows.
        rows = range(max(node.tokens.start - 1, 0), node.tokens.stop - 1)
        if not rows:
            place[number] = place[node.parent]
        elif pays(rows):
            place[number] = len(found)
            tokens = ended[node.sequence][: node.tokens.stop]
            ranks = tuple(sorted(holders[number]))
            found.append(ExchangedNode(tokens, rows, place[node.parent], ranks, ranks[0]))
    return _owned(found)


class Beginnings:
    """Finds the nodes that a stem begins with, without a comparison with each node."""

    def __init__(self, nodes: Sequence[tuple[int, ExchangedNode]]):
        """``nodes``: with their places in the plan; their parents are among them."""
        tokens = {at: as_bytes(node.tokens) for at, node in nodes}
        self._parents = {at: node.parent for at, node in nodes}
        self._places = sorted(tokens, key=tokens.get)
        self._tokens = tokens
        self._sorted = [tokens[at] for at in self._places]

    def of(self, stem: torch.Tensor) -> list[int]:
        """Returns the places of the nodes."""
        own = as_bytes(stem)
        # What the stem begins with is in order before it, and begins all that is in between.
        last = bisect.bisect_right(self._sorted, own) - 1
        at = self._places[last] if last >= 0 else None
        found = []
        while at is not None:
            if own.startswith(self._tokens[at]):
                found.append(at)
            at = self._parents[at]
        return found


def as_bytes(tokens: torch.Tensor) -> bytes:
    """Returns tokens in host memory as bytes, of which equal tokens have equal ones."""
    return tokens.numpy().tobytes()


def _owned(prefixes: list[ExchangedNode]) -> list[ExchangedNode]:
    """Gives each prefix, the one with the most rows first, to its least loaded rank."""
    load: dict[int, int] = {}
    owned = list(prefixes)
    for at in sorted(range(len(owned)), key=lambda at: (-len(owned[at].rows), at)):
        owner = min(owned[at].ranks, key=lambda rank: (load.get(rank, 0), rank))
        load[owner] = load.get(owner, 0) + len(owned[at].rows)
        owned[at] = owned[at]._replace(owner=owner)
    return owned


def sooner(model: native.ModelShape, machine: Machine | None) -> Callable[[range], bool]:
    """Returns whether rows of a prefix and their gradients are transferred sooner than computed;
    without a known rate, that they are."""
    if machine is None or not machine.flops_per_s or not machine.link_bytes_per_s:
        return lambda rows: True
    cost = rates(model, machine)
    width = 2 * model.layers * model.kv_heads * model.head_dim
    row_bytes = width * (model.dtype_bytes + max(model.dtype_bytes, 4))

    def pays(rows: range) -> bool:
        count = len(rows)
        computed_s = cost["nodes"] + cost["rows"] * count
        computed_s += cost["prefix_pairs"] * rows.start * count
        computed_s += cost["causal_pairs"] * count * (count + 1) / 2
        return row_bytes * count / machine.link_bytes_per_s < computed_s

    return pays
