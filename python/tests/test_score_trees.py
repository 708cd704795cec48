"""Rows of a differentiable call whose prompts or responses begin alike run as a tree."""

from __future__ import annotations

import gc

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import VOCAB, distance, take_gradients, tiny
from test_dropout import adapted
from test_outputs import value_head
from test_score_outputs import CHOSEN, HIDDEN, ROUTERS, Dense, dense, of_scores, with_holes
from test_token_scores import GRAPHS

import dormouse.hf.scored_model
from dormouse.hf import SharedPrefix
from dormouse.hf.padded import Places
from dormouse.hf.score_trees import with_trees
from dormouse.hf.step import Step

TURNS = 4


def batch_of(rows, left: int = 1, right: int = 2):
    """Prompts and responses as a padded batch: ids, mask, number of kept columns."""
    keep = max(len(response) for _, response in rows) + right
    start = left + max(len(prompt) for prompt, _ in rows)
    ids = torch.full((len(rows), start + keep), 5)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(rows):
        tokens = torch.cat([prompt, response])
        at = slice(start - len(prompt), start + len(response))
        ids[row, at], mask[row, at] = tokens, 1
    return ids, mask, keep


def a_conversation():
    """Each turn as a row, in no order; two samples of the last turn, one of them twice; branches of
    a search after a long thought; a row without a response; a prompt of its own."""
    generator = torch.Generator().manual_seed(3)

    def draw(count):
        return torch.randint(VOCAB, (count,), generator=generator)

    tokens, rows = draw(220), []
    for _ in range(TURNS):
        response = draw(12)
        rows.append((tokens, response))
        tokens = torch.cat([tokens, response, draw(40)])
    rows += [(rows[-1][0], draw(7)), rows[-1]]
    question, thought = draw(200), draw(190)
    branches = [(question, torch.cat([thought, draw(n)])) for n in (3, 9, 1)]
    rows += branches
    rows += [(draw(33), draw(4)) for _ in range(2)]
    order = [4, 0, 7, 2, 9, 8, 1, 5, 3, 6, 10]
    ids, mask, keep = batch_of([rows[i] for i in order])
    mask[order.index(9), -keep:] = 0
    return ids, mask, keep


def loss_of(values: Dense, head, mask):
    critic = head(values.last_hidden_state).squeeze(-1)
    scale = torch.linspace(0.5, 2, len(mask), dtype=torch.float64)[:, None]
    policy = (values.log_probabilities - critic.detach()).clamp(-2, 2).exp() * scale
    total = ((policy + critic.square() - 0.1 * values.entropies) * mask).sum() / mask.sum()
    return total + (values.chosen_logits * mask).tanh().sum() * 0.3


@pytest.fixture
def seen(monkeypatch):
    """The places of each call."""
    found = []

    def recorded(*arguments):
        found.append(with_trees(*arguments))
        return found[-1]

    monkeypatch.setattr(dormouse.hf.scored_model, "with_trees", recorded)
    return found


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("apart", [True, False])
def test_gradients_are_those_of_the_dense_batch(apart, graphs, runtime, seen):
    model, head, (ids, mask, keep) = tiny(), value_head(96), a_conversation()
    if not apart:
        # Logits of all rows, not of selected ones.
        model.register_forward_hook(lambda module, args, output: None)
    own = with_holes(mask, keep)
    wanted = dense(model, ids, mask, keep, 0.7)
    loss_of(wanted, head, own).backward()
    gradients = take_gradients(model), take_gradients(head)
    options = {"entropy": True, "outputs": [HIDDEN, CHOSEN], "temperature": 0.7}
    shared = SharedPrefix(model, runtime)
    scores = shared.score(ids, mask, keep=keep, graphs=graphs, microbatch_tokens=64, **options)
    assert scores.graphs == graphs and scores.counts["trees"] == 2
    (places,) = seen
    assert sorted(len(each.rows) for each in places) == [1, 3, 6]
    # Rows of a tree run once, of one sequence a part that its planner does not share.
    run = scores.counts["prefix_tokens"] + scores.counts["microbatch_tokens"]
    assert run < 0.4 * int(mask.sum())
    found = of_scores(scores)
    for name in ("log_probabilities", "entropies", "chosen_logits", "last_hidden_state"):
        torch.testing.assert_close(
            getattr(found, name), getattr(wanted, name), rtol=0, atol=1e-10, msg=name
        )
    loss_of(found, head, own).backward()
    assert distance(take_gradients(model), gradients[0]) < 1e-10
    assert distance(take_gradients(head), gradients[1]) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_routers(graphs, runtime):
    with in_fp64():
        model, (ids, mask, keep) = zoo_model("mixtral"), a_conversation()

        def loss(values):
            return sum(each.logsumexp(-1).square().sum() for each in values.router_logits)

        loss(dense(model, ids, mask, keep, routers=True)).backward()
        zeros = (keep - mask[:, -keep:].sum(1)).sum()
        wanted = take_gradients(model)
        shared = SharedPrefix(model, runtime)
        scores = shared.score(ids, mask, keep=keep, outputs=[ROUTERS], graphs=graphs)
        assert scores.counts["trees"] == 2 and zeros > 0
        loss(scores).backward()
        assert distance(take_gradients(model), wanted) < 1e-10


def test_values_are_the_same_bits_in_all_modes(runtime):
    model, (ids, mask, keep) = tiny(dtype=torch.float32), a_conversation()
    shared = SharedPrefix(model, runtime)
    options = {"keep": keep, "entropy": True, "outputs": [HIDDEN, CHOSEN], "microbatch_tokens": 64}
    with torch.no_grad():
        alone = shared.score(ids, mask, **options)
    assert alone.counts["trees"] == 2
    for graphs in GRAPHS:
        found = shared.score(ids, mask, graphs=graphs, **options)
        assert found.counts == alone.counts
        assert all(map(torch.equal, found.tensors(), alone.tensors()))


@pytest.mark.parametrize("graphs", GRAPHS)
def test_hooks_see_one_gradient_and_prefixes_sleep(graphs, runtime):
    model, (ids, mask, keep) = tiny(dtype=torch.float32), a_conversation()
    called = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: called.append(1))
    shared, found = SharedPrefix(model, runtime), []
    for sleeps in (True, False):
        shared = SharedPrefix(model, runtime, sleep=sleeps)
        scores = shared.score(ids, mask, keep=keep, graphs=graphs)
        assert not called
        if graphs == "kept":
            assert (runtime.stats()["asleep"]["current_bytes"] > 0) == sleeps
        scores.log_probabilities.square().sum().backward()
        assert len(called) == len(list(model.parameters()))
        called.clear()
        found.append(take_gradients(model))
    assert distance(*found) == 0


@pytest.mark.parametrize("graphs", GRAPHS)
def test_rows_that_no_loss_reads(graphs, runtime):
    """A turn whose label is in a prefix of others, one row of two that are equal, and one value."""
    model, (ids, mask, keep) = tiny(), a_conversation()
    weights = torch.zeros(len(ids), 1, dtype=torch.float64)
    weights[[1, 8]] = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    (dense(model, ids, mask, keep).entropies.square() * weights).sum().backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    options = {"entropy": True, "outputs": [HIDDEN, CHOSEN], "graphs": graphs}
    scores = shared.score(ids, mask, keep=keep, **options)
    (scores.entropies.square() * weights).sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_an_error_leaves_nothing_behind(graphs, runtime, monkeypatch):
    model, (ids, mask, keep) = tiny(), a_conversation()
    shared = SharedPrefix(model, runtime)

    def loss():
        return shared.score(ids, mask, keep=keep, graphs=graphs).log_probabilities.square().sum()

    loss().backward()
    wanted = take_gradients(model)

    def fails(self, node, is_last):
        raise KeyError(node)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(Step, "_prefix_backward", fails)
        loss().backward()
    loss()
    gc.collect()
    assert runtime.stats()["asleep"]["current_bytes"] == 0
    assert all(p.grad is None for p in model.parameters())
    loss().backward()
    got = take_gradients(model)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", GRAPHS)
def test_parts_of_a_window(graphs, runtime):
    """Turns of a conversation in several microbatches."""
    model, (ids, mask, keep) = tiny(), a_conversation()
    parts = (slice(0, 4), slice(4, 7), slice(7, 11))
    for rows in parts:
        dense(model, ids, mask, keep).log_probabilities[rows].square().mean().backward()
    wanted = take_gradients(model)
    window = SharedPrefix(model, runtime).window(ids, mask, keep=keep, graphs=graphs)
    assert window.scores.counts["trees"] == 2
    for rows in parts:
        part = window.part(rows, is_last=rows is parts[-1])
        part.log_probabilities.square().mean().backward()
    assert distance(take_gradients(model), wanted) < 1e-10


def test_groups_stay_groups_where_a_tree_saves_little(runtime, seen):
    """Nothing in common, and a beginning that is a fifth of the prompts."""
    model = tiny()
    shared = SharedPrefix(model, runtime)
    generator = torch.Generator().manual_seed(7)

    def draw(count):
        return torch.randint(VOCAB, (count,), generator=generator)

    def counts(rows) -> dict:
        ids, mask, keep = batch_of(rows)
        with torch.no_grad():
            return shared.score(ids, mask, keep=keep).counts

    begin = draw(100)
    prompts = [torch.cat([begin, draw(400)]) for _ in range(2)]
    assert counts([(each, draw(20)) for each in prompts for _ in range(3)])["trees"] == 0
    assert counts([(draw(300), draw(20)), (draw(200), draw(9))])["trees"] == 0
    assert all(isinstance(each, Places) for places in seen for each in places)


def test_what_is_not_worth_a_pass_is_not_shared(runtime):
    """Responses that begin alike, as they often do, and short ends of prompts."""
    shared = SharedPrefix(tiny(), runtime)
    generator = torch.Generator().manual_seed(7)

    def draw(count):
        return torch.randint(VOCAB, (count,), generator=generator)

    begin, word = draw(600), draw(3)
    prompts = [torch.cat([begin, torch.tensor([i]), draw(9)]) for i in range(2)]
    ids, mask, keep = batch_of([(each, torch.cat([word, draw(5)])) for each in prompts * 2])
    with torch.no_grad():
        counts = shared.score(ids, mask, keep=keep).counts
    assert counts["trees"] == 1 and counts["prefix_tokens"] == 600 - 1
    assert counts["groups"] == 1 and counts["prompts"] == 2
    assert counts["microbatch_tokens"] == 4 * (10 + 8)


@pytest.mark.slow
def test_models_that_drop_in_rows_of_responses_run_as_groups(runtime):
    """In a tree other rows are shared, and those drop nothing."""
    model, (ids, mask, keep) = adapted(), a_conversation()
    shared = SharedPrefix(model, runtime, prompt_dropout=False)
    with torch.no_grad():
        assert shared.score(ids, mask, keep=keep).counts["trees"] == 0
        model.eval()
        assert shared.score(ids, mask, keep=keep).counts["trees"] == 2


def test_calls_that_read_prompts_run_as_groups(runtime):
    """A tree has no prompt of its own."""
    model, (ids, mask, keep) = tiny(), a_conversation()
    shared = SharedPrefix(model, runtime)
    with torch.no_grad():
        scores = shared.score(ids, mask, keep=keep, prompt_outputs=[HIDDEN])
    assert scores.counts["trees"] == 0 and scores.counts["groups"] == TURNS + 2
    found = dense(model, ids, mask, keep)
    torch.testing.assert_close(
        scores.log_probabilities, found.log_probabilities.detach(), rtol=0, atol=1e-10
    )
