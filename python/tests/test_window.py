"""One call for the rows of several microbatches, and a trainer that goes through them one by one."""

from __future__ import annotations

import pytest
import torch
from models import distance, take_gradients, tiny
from test_token_scores import GRAPHS, a_batch, check_ranks, dense, loss_of

from dormouse.errors import StateError
from dormouse.hf import SharedPrefix

PARTS = (slice(0, 2), slice(2, 5), slice(5, 7))


def losses(values, mask, keep, rows):
    """Each microbatch's loss has a normaliser of its own."""
    return loss_of(*(each[rows] for each in values), mask[rows, -keep:])


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_gradients_are_those_of_dense_microbatches(graphs, order, runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    for at in order:
        losses(dense(model, ids, mask, keep, 0.7), mask, keep, PARTS[at]).backward()
    wanted = take_gradients(model)
    options = {"entropy": True, "temperature": 0.7, "graphs": graphs, "microbatch_tokens": 7}
    window = SharedPrefix(model, runtime).window(ids, mask, keep=keep, **options)
    for at in order:
        assert not any(p.grad is not None for p in model.parameters())
        rows = PARTS[at]
        part = window.part(rows, is_last=at == order[-1])
        assert part.graphs == graphs and part.counts["groups"] == 2
        loss_of(part.log_probabilities, part.entropies, mask[rows, -keep:]).backward()
    assert distance(take_gradients(model), wanted) < 1e-10
    with pytest.raises(RuntimeError, match="after its last"):
        window.part(PARTS[0], is_last=False)


def test_a_loss_overwrites_values_of_any_part(runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    values, _ = dense(model, ids, mask, keep, 1.0)
    (values**2 * (mask[:, -keep:] != 0)).sum().backward()
    wanted = take_gradients(model)
    window = SharedPrefix(model, runtime).window(ids, mask, keep=keep)
    for rows in PARTS:
        values = window.part(rows, is_last=rows == PARTS[-1]).log_probabilities
        values.masked_fill_(mask[rows, -keep:] == 0, 0)
        (values**2).sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_parts_that_no_loss_reads_have_no_gradient(graphs, runtime):
    """Of entropies that are only logged, and of microbatches that the trainer leaves out."""
    model = tiny()
    ids, mask, keep = a_batch()
    values = dense(model, ids, mask, keep, 1.0)
    (values[0][PARTS[0]].sum() + (values[0][PARTS[2]] ** 2).sum()).backward()
    wanted = take_gradients(model)
    window = SharedPrefix(model, runtime).window(ids, mask, keep=keep, entropy=True, graphs=graphs)
    window.part(PARTS[0], is_last=False).log_probabilities.sum().backward()
    window.part(PARTS[1], is_last=False)
    (window.part(PARTS[2], is_last=True).log_probabilities ** 2).sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_window_is_finished_without_its_last_part(graphs, is_taken, runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    dense(model, ids, mask, keep, 1.0)[0][PARTS[0]].sum().backward()
    wanted = take_gradients(model)
    window = SharedPrefix(model, runtime).window(ids, mask, keep=keep, entropy=True, graphs=graphs)
    first = window.part(PARTS[0], is_last=False).log_probabilities
    assert not window.waits
    first.sum().backward(retain_graph=True)
    window.part(PARTS[1], is_last=is_taken)
    assert window.waits
    window.finish()
    assert distance(take_gradients(model), wanted) < 1e-10
    window.finish()
    assert take_gradients(model) == {} and not window.waits
    first.sum().backward()
    with pytest.raises(StateError, match="backward after the window's passes did"):
        window.finish()


@pytest.mark.parametrize("graphs", GRAPHS)
def test_gradients_of_entropies_alone(graphs, runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    (dense(model, ids, mask, keep, 1.0)[1] ** 2).sum().backward()
    wanted = take_gradients(model)
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, entropy=True, graphs=graphs)
    (scores.entropies**2).sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10


def test_without_a_graph(runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    with torch.no_grad():
        window = shared.window(ids, mask, keep=keep)
        whole = window.scores.log_probabilities
        for rows in PARTS:
            part = window.part(rows, is_last=rows is PARTS[-1])
            assert torch.equal(part.log_probabilities, whole[rows])
            assert part.entropies is None and not part.log_probabilities.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("graphs", GRAPHS)
def test_distributed_data_parallel_reduces_the_last_part(graphs, tmp_path):
    check_ranks(graphs, tmp_path, "window")
