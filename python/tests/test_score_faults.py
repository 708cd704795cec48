"""Errors between the forward and the backward of a differentiable call, and batches at its edges.

What one rank's error does to the others is in test_failures_ranks.py.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from models import distance, take_gradients, tiny
from rank_workers import RANKS, run_ranks
from test_token_scores import GRAPHS, a_batch, dense, padded

from dormouse.hf import SharedPrefix
from dormouse.hf.step import Step


WORKER = Path(__file__).with_name("score_faults_worker.py")
WORKER_SECONDS_MAX = 300


class Share(NamedTuple):
    """What one rank computes of :func:`a_longer_batch`."""

    rows: slice
    weight: float = 1.0
    """Of its loss."""
    evaluates: bool = False
    """Evaluates and saves a checkpoint between the call and its backward."""


SHARES = {
    "an empty share": (Share(slice(0, None)), Share(slice(0, 0))),
    "groups split over ranks": (Share(slice(0, None, 2)), Share(slice(1, None, 2))),
    "all responses of a rank are masked": (Share(slice(0, 3)), Share(slice(3, None), 0.0)),
    "evaluation and checkpoint in a step": (
        Share(slice(0, 3), evaluates=True),
        Share(slice(3, None), evaluates=True),
    ),
}


class LossError(Exception):
    """Of a trainer's loss."""


def a_longer_batch():
    """Whose prompts are long enough to sleep."""
    return padded([200, 150, 200, 200, 150], [4, 6, 1, 8, 3])


def in_use(runtime) -> tuple[int, int]:
    """Bytes awake and asleep."""
    gc.collect()
    stats = runtime.stats()
    return stats["allocated"]["current_bytes"], stats["asleep"]["current_bytes"]


def nothing_stays(model, found: list[tuple[int, int]]) -> bool:
    """Whether of each case nothing is asleep, and none leaves as much as one set of gradients in
    use. Not equal bytes: what the interpreter and other threads hold changes by blocks."""
    gradients_bytes = sum(each.nbytes for each in model.parameters())
    awake = [each for each, _ in found]
    return not any(asleep for _, asleep in found) and max(awake) - min(awake) < gradients_bytes


def sum_gradients(model, batch) -> dict[str, torch.Tensor]:
    dense(model, *batch, 1.0)[0].sum().backward()
    return take_gradients(model)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_an_error_in_the_loss_leaves_nothing_behind(graphs, runtime):
    model, (ids, mask, keep) = tiny(dtype=torch.float32), a_longer_batch()
    shared = SharedPrefix(model, runtime)
    shared.score(ids, mask, keep=keep, graphs=graphs).log_probabilities.sum().backward()
    wanted = take_gradients(model)

    def fails():
        scores = shared.score(ids, mask, keep=keep, graphs=graphs)
        assert (runtime.stats()["asleep"]["current_bytes"] > 0) == (graphs == "kept")
        loss = scores.log_probabilities.sum()
        raise LossError(loss)

    found = []
    for _ in range(3):
        with pytest.raises(LossError):
            fails()
        found.append(in_use(runtime))
    assert nothing_stays(model, found)
    assert all(p.grad is None for p in model.parameters())
    shared.score(ids, mask, keep=keep, graphs=graphs).log_probabilities.sum().backward()
    got = take_gradients(model)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_an_error_in_the_backward_leaves_nothing_behind(graphs, monkeypatch, runtime):
    """Gradients of parameters stay as they were: they are added after the last pass."""
    model, batch = tiny(), a_longer_batch()
    ids, mask, keep = batch
    wanted = sum_gradients(model, batch)
    shared = SharedPrefix(model, runtime)
    shared.score(ids, mask, keep=keep, graphs=graphs).log_probabilities.sum().backward()
    before, own = take_gradients(model), Step._prefix_backward

    def fails(self, node, is_last):
        raise LossError

    found = []
    for _ in range(3):
        monkeypatch.setattr(Step, "_prefix_backward", fails)
        with pytest.raises(LossError):
            shared.score(ids, mask, keep=keep, graphs=graphs).log_probabilities.sum().backward()
        monkeypatch.setattr(Step, "_prefix_backward", own)
        assert all(p.grad is None for p in model.parameters())
        found.append(in_use(runtime))
    assert nothing_stays(model, found)
    shared.score(ids, mask, keep=keep, graphs=graphs).log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10
    assert distance(before, wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_batch_without_shared_prompts(graphs, runtime):
    """No token runs twice, and the counts say that nothing is shared."""
    batch = padded([17, 11, 13, 9], [4, 6, 1, 8])
    model, (ids, mask, keep) = tiny(), batch
    wanted = sum_gradients(model, batch)
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs=graphs)
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10
    counts = scores.counts
    assert counts["groups"] == counts["responses"] == 4
    # The last token of a sequence predicts nothing.
    assert counts["prefix_tokens"] + counts["microbatch_tokens"] == int(mask.sum()) - 4


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_batch_without_rows(graphs, runtime):
    """A rank's empty share."""
    model, (ids, mask, keep) = tiny(), a_batch()
    scores = SharedPrefix(model, runtime).score(ids[:0], mask[:0], keep=keep, graphs=graphs)
    assert scores.log_probabilities.shape == (0, keep)
    scores.log_probabilities.sum().backward()
    # As a dense run of rows that the loss does not read.
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("graphs", GRAPHS)
def test_all_responses_masked_by_the_loss(graphs, runtime):
    """Gradients are zeros."""
    model, (ids, mask, keep) = tiny(), a_batch()
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs=graphs)
    (scores.log_probabilities * 0.0).sum().backward()
    assert not any(p.grad.any() for p in model.parameters())


@pytest.fixture(scope="module")
def gradients(tmp_path_factory) -> list[dict]:
    """Of each rank, by case and mode."""
    directory = tmp_path_factory.mktemp("ranks")
    assert run_ranks(WORKER, directory, seconds_max=WORKER_SECONDS_MAX) == [0] * RANKS
    return [torch.load(directory / f"gradients.{rank}") for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_ranks(name, graphs, gradients):
    model, (ids, mask, keep) = tiny(num_hidden_layers=2), a_longer_batch()
    values, _ = dense(model, ids, mask, keep, 1.0)
    losses = [values[share.rows].sum() * share.weight for share in SHARES[name]]
    (sum(losses) / RANKS).backward()
    wanted = take_gradients(model)
    for own in gradients:
        assert distance(own[name, graphs], wanted) < 1e-10
