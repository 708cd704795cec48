"""The plan of an exchange, against counting beginnings token by token. No ranks run here."""

from __future__ import annotations

import random

import pytest
import torch

from dormouse import exchange
from dormouse import _native as native
from dormouse.exchange import Stem
from dormouse.hf.exchange import Exchange
from dormouse.schedule import Machine

VOCAB = 5
MODEL = native.ModelShape(
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=8,
    vocab=VOCAB,
    dtype_bytes=2,
    layer_linear_weights=3000,
    kv_linear_weights=512,
    last_layer_prefix_weights=1000,
    head_weights=80,
    saved_bytes_per_token_layer=512,
)


def drawn(seed: int) -> list[list[Stem]]:
    """Stems of three ranks, many with common beginnings."""
    source = random.Random(seed)
    base = [[source.randrange(2) for _ in range(12)] for _ in range(2)]

    def stem() -> Stem:
        tokens = source.choice(base)[: source.randint(1, 12)]
        tokens = tokens + [source.randrange(VOCAB) for _ in range(source.choice([0, 0, 3]))]
        return Stem(torch.tensor(tokens), source.choice([None, source.randrange(2)]))

    return [[stem() for _ in range(source.randint(0, 4))] for _ in range(3)]


def needed(stems) -> dict[tuple, set[int]]:
    """Which ranks need the last row of each beginning, without those that labels stop."""
    stopped = {
        (*stem.tokens.tolist(), stem.label)
        for own in stems
        for stem in own
        if stem.label is not None
    }
    ranks: dict[tuple, set[int]] = {}
    for rank, own in enumerate(stems):
        for stem in own:
            tokens = tuple(stem.tokens.tolist())
            for end in range(2, len(tokens) + 1):
                if any(tokens[:n] in stopped for n in range(1, end + 1)):
                    break
                ranks.setdefault(tokens[:end], set()).add(rank)
    return {tokens: own for tokens, own in ranks.items() if len(own) > 1}


@pytest.mark.parametrize("seed", range(40))
def test_every_row_that_several_ranks_need_is_in_one_node(seed):
    stems = drawn(seed)
    planned = exchange.plan(stems, VOCAB)
    found = {}
    for at, node in enumerate(planned):
        assert node.parent is None or node.parent < at
        begin = 0 if node.parent is None else planned[node.parent].rows.stop
        assert node.rows.start == begin and node.rows.stop == len(node.tokens) - 1
        assert node.owner in node.ranks
        for row in node.rows:
            tokens = tuple(node.tokens[: row + 2].tolist())
            assert tokens not in found
            found[tokens] = set(node.ranks)
    assert found == needed(stems)


@pytest.mark.parametrize("seed", range(5))
def test_stems_survive_a_message_each_once(seed):
    for own in drawn(seed):
        for stem, back in zip(
            {(s.label, tuple(s.tokens.tolist())): s for s in own}.values(),
            exchange.unpacked(exchange.packed([*own, *own])),
            strict=True,
        ):
            assert stem.label == back.label and torch.equal(stem.tokens, back.tokens)


@pytest.mark.parametrize("seed", range(30))
def test_nodes_that_a_stem_begins_with(seed):
    stems = drawn(seed)
    nodes = exchange.plan(stems, VOCAB)
    for rank, own in enumerate(stems):
        beginnings = exchange.Beginnings(
            [(at, node) for at, node in enumerate(nodes) if rank in node.ranks]
        )
        for stem in own:
            wanted = [
                at
                for at, node in enumerate(nodes)
                if torch.equal(node.tokens, stem.tokens[: len(node.tokens)])
            ]
            assert sorted(beginnings.of(stem.tokens)) == wanted


def test_tokens_of_each_node_are_read_once_for_all_stems(monkeypatch):
    read, own = [], exchange.as_bytes
    monkeypatch.setattr(exchange, "as_bytes", lambda tokens: read.append(tokens) or own(tokens))
    stems = [[Stem(torch.tensor([i % 4, i, 3]), None) for i in range(40)] for _ in range(2)]
    nodes = exchange.plan(stems, 40)
    beginnings = exchange.Beginnings(list(enumerate(nodes)))
    assert sum(len(beginnings.of(stem.tokens)) for stem in stems[0]) >= 40
    assert len(read) == len(nodes) + 40


def test_what_is_computed_sooner_is_not_exchanged():
    stems = [[Stem(torch.arange(4), None)], [Stem(torch.arange(4), None)]]
    rates = {"flops_per_s": 10**9, "link_bytes_per_s": 10**9}
    (node,) = exchange.plan(stems, VOCAB, exchange.sooner(MODEL, Machine(**rates)))
    assert node.rows == range(3)
    for machine, count in ((Machine(**rates | {"link_bytes_per_s": 10**3}), 0), (Machine(), 1)):
        assert len(exchange.plan(stems, VOCAB, exchange.sooner(MODEL, machine))) == count
    assert exchange.plan(stems, VOCAB, lambda rows: False) == []


def test_rows_are_owned_evenly():
    stems = [[Stem(torch.tensor([i, i + 1, 3]), None) for i in range(4)] for _ in range(2)]
    owners = [node.owner for node in exchange.plan(stems, VOCAB)]
    assert sorted(owners) == [0, 0, 1, 1]


def test_a_receive_needs_a_contiguous_tensor():
    with pytest.raises(ValueError, match=r"strides \(1, 3\) to receive; accepted: a contiguous"):
        Exchange._receive(None, torch.empty(2, 3).T, 0)
