"""The differentiable call on sequences that are packed one after another."""

from __future__ import annotations

import pytest
import torch
from models import distance, take_gradients, tiny
from test_token_scores import GRAPHS, a_batch, dense, loss_of

from dormouse import ArgumentError
from dormouse.hf import SharedPrefix


def packed(ids, mask, keep):
    """The rows of a padded batch: ids, bounds, lengths of prompts; and where their responses are in
    both layouts."""
    has = mask.bool()
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), has.sum(1).cumsum(0)])
    is_response = torch.zeros_like(has)
    is_response[:, -keep:] = has[:, -keep:]
    prompts = (has & ~is_response).sum(1)
    return ids[has], bounds.to(torch.int32), prompts, is_response[has], is_response[:, -keep:]


@pytest.mark.parametrize("graphs", GRAPHS)
def test_gradients_are_those_of_the_dense_batch(graphs, runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    values = dense(model, ids, mask, keep, 0.7)
    loss_of(*values, mask[:, -keep:]).backward()
    wanted = take_gradients(model)
    tokens, bounds, prompts, of_packed, of_padded = packed(ids, mask, keep)
    options = {"temperature": 0.7, "entropy": True, "graphs": graphs, "microbatch_tokens": 7}
    shared = SharedPrefix(model, runtime)
    scores = shared.score_packed(tokens, bounds, prompt_lengths=prompts, **options)
    assert scores.graphs == graphs and scores.counts["prefix_tokens"] == 16 + 10
    found = []
    for got, own in zip((scores.log_probabilities, scores.entropies), values, strict=True):
        assert got.shape == tokens.shape and not got[~of_packed].any()
        torch.testing.assert_close(got[of_packed], own[of_padded].detach(), rtol=0, atol=1e-11)
        found.append(torch.zeros_like(own).masked_scatter(of_padded, got[of_packed]))
    loss_of(*found, mask[:, -keep:]).backward()
    assert distance(take_gradients(model), wanted) < 1e-10


def test_values_are_those_of_the_padded_batch(runtime):
    """The same bits: the same groups in the same order."""
    model = tiny(dtype=torch.float32)
    ids, mask, keep = a_batch()
    tokens, bounds, prompts, of_packed, of_padded = packed(ids, mask, keep)
    shared = SharedPrefix(model, runtime)
    with torch.no_grad():
        got = shared.score_packed(tokens, bounds, prompt_lengths=prompts)
        own = shared.score(ids, mask, keep=keep)
    assert got.entropies is None and got.graphs == "none"
    assert torch.equal(got.log_probabilities[of_packed], own.log_probabilities[of_padded])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(2, 30, dtype=torch.int64)}, "shape \\[2, 30\\]; accepted: integers \\["),
        ({"ids": torch.zeros(30)}, "ids are torch.float32"),
        ({"cu_seqlens": torch.tensor([1, 30])}, "cu_seqlens are \\[1, 30\\] with 30 tokens"),
        ({"cu_seqlens": torch.tensor([0, 29])}, "from 0 to the number of tokens"),
        ({"cu_seqlens": torch.tensor([0, 20, 10, 30])}, "accepted: ascending"),
        ({"prompt_lengths": torch.tensor([3])}, "are 1 for 2 sequences"),
        ({"prompt_lengths": torch.tensor([3, 1])}, "prompt_lengths\\[1\\] is 1; accepted: at least 2"),
        ({"graphs": "some"}, "graphs is 'some'"),
    ],
)
def test_arguments(change, message, runtime):
    own = {
        "ids": torch.zeros(30, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 12, 30]),
        "prompt_lengths": torch.tensor([4, 4]),
    } | change
    with pytest.raises(ArgumentError, match=message):
        SharedPrefix(tiny(), runtime).score_packed(own.pop("ids"), own.pop("cu_seqlens"), **own)
