"""Histories of dialogues through Python, the order of passages, and a step on what turns read."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import threading

import pytest
import torch
from conftest import ROOT
from models import dense_tree_backward, distance, take_gradients, tiny
from transformers import LlamaForCausalLM

import dormouse
from dormouse.hf import SharedPrefix
from dormouse.history import Dialogue, Turn, distinct_tokens, order, order_for_sharing

FP64_BOUND = 1e-10


def turn(embedding, time_s, name="a query"):
    return Turn(embedding, name, f"passage of {name} – ü", f"answer to {name}", time_s)


def test_turns_are_weighed_by_relevance_and_recency(tmp_path):
    embeddings = torch.eye(4)[[0, 1, 0, 1]] * 5
    with Dialogue(4, alpha=0.25, decay_s=10, dir=tmp_path) as history:
        first = history.record(turn(e, 3.0 * t, f"{t}") for t, e in enumerate(embeddings))
        assert first == 0 and history.record([]) == 4
        found = history.retrieve([1, 1, 0, 0], 12.0, 3)
        assert [each.id for each in found] == [3, 2, 1]
        for each in found:
            recency = math.exp(-(12 - each.time_s) / 10)
            assert each.recency == pytest.approx(recency, rel=1e-6)
            assert each.relevance == pytest.approx(0.5**0.5, rel=1e-6)
            assert each.weight == pytest.approx(0.25 * 0.5**0.5 + 0.75 * recency, rel=1e-6)
        assert found[0].passage == "passage of 3 – ü" and found[0].response == "answer to 3"
        chain = history.chain(embeddings[0].double(), 12.0)
        assert [each.id for each in chain] == [2, 0]
        with pytest.raises(dormouse.StateError, match="is in use by process"):
            Dialogue(4, dir=tmp_path)
    log = tmp_path / "dialogue.dormouse"
    log.write_bytes(log.read_bytes()[:-1])
    with Dialogue(4, dir=tmp_path, entries_max=2, synced=False) as history:
        assert "record" in history.torn()
        assert history.stats()["entries"] == 2
        assert [each.id for each in history.retrieve(embeddings[0], 9.0)] == [2, 0]
        assert history.record([turn(embeddings[1], 9.0, "")]) == 3


def test_turns_come_whole_while_others_are_recorded():
    """One entry is kept, so each record forgets what a retrieval may have found."""
    long = "long " * 40_000
    with Dialogue(2, entries_max=1) as history:
        history.record([turn([1, 0], 0.0, "0")])
        stopped = threading.Event()

        def record():
            number = 0
            while not stopped.is_set():
                number += 1
                name = f"{number}{long if number % 50 == 0 else ''}"
                history.record([turn([1, 0], float(number), name)])

        recorder = threading.Thread(target=record)
        recorder.start()
        try:
            for _ in range(300):
                [found] = history.retrieve([1, 0], 0.0)
                assert found.query.startswith(f"{found.time_s:.0f}")
                assert found.passage == f"passage of {found.query} – ü"
                assert found.response == f"answer to {found.query}"
        finally:
            stopped.set()
            recorder.join()


def test_refused_arguments_are_named():
    for options, said in (
        ({"dimension": 0}, "dimension is 0"),
        ({"alpha": -1}, "alpha is -1"),
        ({"decay_s": 0}, "decay_s is 0"),
        ({"entries_max": 0}, "entries_max is 0"),
    ):
        with pytest.raises(dormouse.ArgumentError, match=said):
            Dialogue(**{"dimension": 4} | options)
    with Dialogue(4) as history:
        with pytest.raises(dormouse.ArgumentError, match="embedding has 3 numbers"):
            history.record([turn([1, 2, 3], 0.0)])
        with pytest.raises(dormouse.ArgumentError, match=r"embedding is \[1, 4\]"):
            history.retrieve(torch.ones(1, 4), 0.0)
        with pytest.raises(dormouse.ArgumentError, match="count is 1025"):
            history.retrieve([1, 0, 0, 0], 0.0, 1025)


def cases():
    """Few rows of few passages, and lengths: all orders can be tried."""
    for seed in range(60):
        drawn = random.Random(seed)
        passages = "abcde"[: drawn.randint(2, 5)]
        rows = [
            drawn.sample(passages, drawn.randint(0, min(3, len(passages))))
            for _ in range(drawn.randint(1, 4))
        ]
        lengths = {p: drawn.choice([1, 1, 5, 20]) for p in passages}
        yield rows, lengths.__getitem__


def test_passages_are_ordered_nearly_as_the_best_of_all_orders():
    best_total = own_total = given_total = equal = count = 0
    for rows, length in cases():
        ordered = order_for_sharing(rows, length)
        assert [sorted(row) for row in ordered] == [sorted(row) for row in rows]
        every = itertools.product(*(list(itertools.permutations(row)) for row in rows))
        best = min(distinct_tokens(choice, length) for choice in every)
        own, given = distinct_tokens(ordered, length), distinct_tokens(rows, length)
        assert best <= own <= given
        best_total, own_total = best_total + best, own_total + own
        given_total, equal, count = given_total + given, equal + (own == best), count + 1
    assert own_total <= 1.02 * best_total and equal >= 0.9 * count
    assert given_total > 1.2 * best_total


def order_by_definition(rows, length):
    """The same order without an index."""

    def best(left):
        found, saved = ([], []), 0
        for passage in dict.fromkeys(p for own in left.values() for p in own):
            members = [row for row, own in left.items() if passage in own]
            if len(members) < 2:
                continue
            first, *others = (left[row] for row in members)
            common = [p for p in first if all(p in own for own in others)]
            own = (len(members) - 1) * sum(length(p) for p in common)
            if own > saved:
                found, saved = (common, members), own
        return found

    given = [list(row) for row in rows]
    ordered = [[] for _ in rows]
    groups = [list(range(len(rows)))]
    while groups:
        group = groups.pop()
        left = {row: [p for p in given[row] if p not in ordered[row]] for row in group}
        common, members = best(left)
        if not common:
            for row in group:
                ordered[row] += left[row]
            continue
        for row in members:
            ordered[row] += common
        groups += [members, [row for row in group if row not in members]]
    return min(given, ordered, key=lambda rows: distinct_tokens(rows, length))


def test_an_order_is_that_of_its_definition():
    for seed in range(300):
        drawn = random.Random(seed)
        passages = range(drawn.randint(1, 30))
        rows = [
            drawn.sample(passages, drawn.randint(0, min(8, len(passages))))
            for _ in range(drawn.randint(0, 40))
        ]
        lengths = [drawn.choice([0, 1, 1, 5, 20]) for _ in passages]
        wanted = order_by_definition(rows, lengths.__getitem__)
        assert order_for_sharing(rows, lengths.__getitem__) == wanted, seed


class Passage:
    """A passage that counts how often it is looked at."""

    looks = 0

    def __init__(self, name: int) -> None:
        self.name = name

    def __hash__(self) -> int:
        Passage.looks += 1
        return hash(self.name)

    def __eq__(self, other) -> bool:
        Passage.looks += 1
        return self.name == other.name


def looks(rows: list[list[int]]) -> int:
    # An object each, as of a retrieval for each row.
    passages = [[Passage(name) for name in row] for row in rows]
    Passage.looks = 0
    order_for_sharing(passages, lambda passage: 1000 if passage.name > 0 else 1)
    return Passage.looks


def test_an_order_looks_at_passages_in_proportion_to_rows():
    """Pairs of rows that share a long passage, and a short one with all others: half as many groups
    as rows. Without an index each would look at all passages of all rows."""
    few, many = ([[0, 1 + at // 2, -1 - at] for at in range(rows)] for rows in (40, 160))
    assert looks(many) < 5 * looks(few)
    assert looks(many) < 50 * 3 * len(many)


def test_rows_beyond_the_limit_keep_their_order(monkeypatch):
    rows = [["x", "y", f"{at}"] for at in range(20)] + [["y", "x"]] * 5
    assert order_for_sharing(rows)[-1] == ["x", "y"]
    monkeypatch.setattr(order, "COMPARISONS_MAX", 100)
    assert order_for_sharing(rows) == rows
    monkeypatch.setattr(order, "COMPARISONS_MAX", 10_000)
    assert order_for_sharing(rows)[-1] == ["x", "y"]


def test_distinct_tokens_are_the_nodes_of_the_prefix_tree():
    assert distinct_tokens([]) == 0 and distinct_tokens([[], []]) == 0
    assert distinct_tokens(["ab", "ab", "ac", "ba"]) == 5
    assert distinct_tokens(["ab", "ac"], {"a": 10, "b": 3, "c": 2}.__getitem__) == 15
    assert order_for_sharing([["x", "y"], ["y"], []]) == [["y", "x"], ["y"], []]
    with pytest.raises(dormouse.ArgumentError, match="row 1 has a passage twice"):
        order_for_sharing(["ab", "aba"])


@pytest.fixture(scope="module")
def example():
    path = ROOT / "examples" / "history" / "multi_turn.py"
    spec = importlib.util.spec_from_file_location("multi_turn", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with Dialogue(module.DIMENSION, alpha=0.8) as history:
        module.fill(history)
        yield module, history


def test_turns_that_read_in_order_share_more(example):
    module, history = example
    given, ordered = (module.batch(history, order) for order in (False, True))
    bags = [[sorted(each.tokens.tolist()) for each in some] for some in (given, ordered)]
    assert bags[0] == bags[1]
    given_tokens, plain = module.computed(given)
    ordered_tokens, other = module.computed(ordered)
    assert plain == other == sum(len(each.tokens) for each in given)
    assert ordered_tokens < 0.8 * given_tokens < 0.8 * plain


@pytest.mark.parametrize("ordered", [False, True])
def test_a_step_through_what_turns_read_has_the_dense_gradients(example, ordered, runtime):
    module, history = example
    model = tiny(vocab_size=module.VOCAB, num_hidden_layers=2)
    assert isinstance(model, LlamaForCausalLM)
    conversations = module.batch(history, ordered)
    wanted = dense_tree_backward(model, conversations, module.loss)
    dense = take_gradients(model)
    report = SharedPrefix(model, runtime).backward(conversations, module.loss)
    assert report.loss == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert distance(take_gradients(model), dense) <= FP64_BOUND
    tokens, _ = module.computed(conversations)
    run = report.counts["prefix_tokens"] + report.counts["microbatch_tokens"]
    # Last tokens predict nothing, and a response of the mean reward has no weight.
    assert tokens - 2 * len(conversations) <= run < tokens
