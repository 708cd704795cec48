"""The differentiable call: any loss of a padded batch, and the trainer's own backward."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from models import VOCAB, distance, take_gradients, tiny
from padded_batch import padded_values
from rank_workers import RANKS, run_ranks
from test_dropout import adapted

from dormouse import ArgumentError, Group
from dormouse.hf import SharedPrefix, UnsupportedModelError, scored_model

GRAPHS = ("kept", "twice")
WORKER = Path(__file__).with_name("token_scores_worker.py")
WORKER_SECONDS_MAX = 200


def padded(prompts, lengths, *, left: int = 2, right: int = 1, seed: int = 3):
    """Rows of several prompts, interleaved, padded on both sides: ids, mask, number of kept
    columns. ``prompts``: length of each row's prompt; equal lengths are equal prompts."""
    generator = torch.Generator().manual_seed(seed)
    texts = {n: torch.randint(VOCAB, (n,), generator=generator) for n in sorted(set(prompts))}
    keep = max(lengths) + right
    columns = left + max(prompts) + keep
    ids = torch.full((len(prompts), columns), 5)
    mask = torch.zeros_like(ids)
    start = columns - keep
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[row, start - prompt : start] = texts[prompt]
        ids[row, start : start + length] = torch.randint(VOCAB, (length,), generator=generator)
        mask[row, start - prompt : start + length] = 1
    return ids, mask, keep


def a_batch():
    # The last row but one has no response.
    return padded([17, 11, 17, 17, 11, 23, 17], [4, 6, 1, 8, 3, 0, 5])


def dense(model, ids, mask, keep, temperature):
    """Each row by itself, without padding: log-probabilities and entropies in the same layout."""
    logps = torch.zeros(len(ids), keep, dtype=torch.float64)
    entropies = torch.zeros_like(logps)
    for row in range(len(ids)):
        at = mask[row].nonzero().flatten()
        tokens = ids[row, at]
        count = int(mask[row, -keep:].sum())
        if count == 0:
            continue
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, -count - 1 : -1]
        found = torch.log_softmax(logits.to(logps) / temperature, -1)
        labels = tokens[-count:]
        logps[row, :count] = found.gather(1, labels[:, None])[:, 0]
        entropies[row, :count] = -(found.exp() * found).sum(-1)
    return logps, entropies


def loss_of(logps, entropies, mask):
    """A loss over the whole batch that mixes rows and is not linear in the values."""
    count = mask.sum()
    advantage = torch.linspace(-1, 2, len(logps), dtype=logps.dtype)[:, None]
    ratio = (logps - 1.5 * logps.detach().roll(1, 0)).clamp(-2, 2).exp()
    total = (ratio * advantage * mask).sum() / count
    return total + ((logps * mask).sum(1) ** 2).mean() * 1e-2 - 0.1 * (entropies * mask).sum() / count


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_the_dense_batch(graphs, temperature, runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    values = dense(model, ids, mask, keep, temperature)
    loss = loss_of(*values, mask[:, -keep:])
    loss.backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    options = {"keep": keep, "temperature": temperature, "microbatch_tokens": 7}
    scores = shared.score(ids, mask, entropy=True, graphs=graphs, **options)
    assert scores.graphs == graphs
    assert scores.counts["groups"] == 2 and scores.counts["prefix_tokens"] == 16 + 10
    torch.testing.assert_close(scores.log_probabilities, values[0].detach(), rtol=0, atol=1e-11)
    torch.testing.assert_close(scores.entropies, values[1].detach(), rtol=0, atol=1e-11)
    got = loss_of(scores.log_probabilities, scores.entropies, mask[:, -keep:])
    assert abs(float(got.detach()) - float(loss.detach())) < 1e-11
    got.backward()
    assert distance(take_gradients(model), wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_one_backward_of_scaled_losses_adds_to_gradients(graphs, runtime):
    """Accumulation: two calls, outputs used twice in one of them, scaled losses."""
    model = tiny()
    ids, mask, keep = a_batch()
    first, second = (dense(model, ids, mask, keep, 1.0) for _ in range(2))
    (loss_of(*first, mask[:, -keep:]) / 2).backward()
    (second[0].sum() + (second[0] ** 2).sum()).backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    options = {"keep": keep, "graphs": graphs}
    a = shared.score(ids, mask, entropy=True, **options)
    (loss_of(a.log_probabilities, a.entropies, mask[:, -keep:]) / 2).backward()
    b = shared.score(ids, mask, **options)
    assert b.entropies is None
    (b.log_probabilities.sum() + (b.log_probabilities**2).sum()).backward()
    assert distance(take_gradients(model), wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_hooks_of_parameters_see_one_whole_gradient(graphs, runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    seen, after, ends = {}, [], []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: ends.append(1))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()))
        parameter.register_post_accumulate_grad_hook(lambda p: after.append(p))
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs=graphs)
    assert not seen and not after, "neither the check nor the forward reaches them"
    scores.log_probabilities.sum().backward()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
    assert len(after) == len(ends) == len(seen)
    for name, parameter in model.named_parameters():
        (only,) = seen[name]
        assert torch.equal(only, parameter.grad)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_tied_and_frozen_parameters(graphs, runtime):
    model = tiny(tie_word_embeddings=True)
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(False)
    ids, mask, keep = a_batch()
    dense(model, ids, mask, keep, 1.0)[0].sum().backward()
    wanted = take_gradients(model)
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs=graphs)
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-10
    assert all(p.grad is None for p in model.model.layers[1].parameters())


def test_prompts_that_cannot_sleep_count_for_kept_graphs(runtime, monkeypatch):
    """The budget has room for responses and half of the prompts."""
    model, prompts, lengths = tiny(), (200, 150), (3, 2)
    ids, mask, keep = padded(prompts, lengths)

    def graphs(**options) -> str:
        shared = SharedPrefix(model, runtime, **options)
        tokens = sum(lengths) + sum(prompts) / 2
        free_bytes = tokens * shared._saved_bytes_per_token / scored_model.KEPT_SHARE
        monkeypatch.setattr(scored_model.support, "free_bytes", lambda device: free_bytes)
        return shared.score(ids, mask, keep=keep).graphs

    assert graphs() == "kept"
    assert graphs(sleep=False) == "twice"
    for reason in ("why_not_in_place", "why_no_tier"):
        with monkeypatch.context() as patched:
            patched.setattr(scored_model, reason, lambda runtime: "a reason")
            assert graphs() == "twice"


def test_values_are_the_same_bits_in_all_modes(runtime):
    model = tiny(dtype=torch.float32)
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    options = {"keep": keep, "entropy": True}
    with torch.no_grad():
        plain = shared.score(ids, mask, **options)
    assert plain.graphs == "none" and not plain.log_probabilities.requires_grad
    for graphs in GRAPHS:
        scores = shared.score(ids, mask, graphs=graphs, **options)
        assert scores.log_probabilities.requires_grad
        assert torch.equal(scores.log_probabilities, plain.log_probabilities)
        assert torch.equal(scores.entropies, plain.entropies)
        del scores


def test_both_modes_give_the_same_gradients(runtime):
    model = tiny(dtype=torch.float32)
    ids, mask, keep = a_batch()
    found = []
    shared = SharedPrefix(model, runtime)
    for graphs in GRAPHS:
        scores = shared.score(ids, mask, keep=keep, entropy=True, graphs=graphs)
        loss_of(scores.log_probabilities, scores.entropies, mask[:, -keep:]).backward()
        found.append(take_gradients(model))
    assert found[0].keys() == found[1].keys()
    assert distance(*found) < 1e-6


def test_what_no_loss_depends_on_is_not_run_again(runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    weights = torch.zeros(len(ids), keep)
    weights[0] = 1.0
    (dense(model, ids, mask, keep, 1.0)[0] * weights).sum().backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    rows = []
    handle = model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: rows.append(args[0].numel())
    )
    # The first step looks for what may sleep.
    shared.score(ids, mask, keep=keep, graphs="twice").log_probabilities.sum().backward()
    model.zero_grad()
    scores = shared.score(ids, mask, keep=keep, graphs="twice")
    rows.clear()
    (scores.log_probabilities * weights).sum().backward()
    handle.remove()
    assert sum(rows) == 16 + 4, "the prompt of the first row and its response"
    assert distance(take_gradients(model), wanted) < 1e-10


def test_a_call_without_backward_leaves_nothing_behind(runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    scores = shared.score(ids, mask, keep=keep, graphs="kept")
    del scores
    gc.collect()
    assert all(p.grad is None for p in model.parameters())
    scores = shared.score(ids, mask, keep=keep, graphs="kept")
    scores.log_probabilities.sum().backward()
    got = take_gradients(model)
    dense(model, ids, mask, keep, 1.0)[0].sum().backward()
    assert distance(got, take_gradients(model)) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_misuse_is_refused(graphs, runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    scores = shared.score(ids, mask, keep=keep, graphs=graphs)
    scores.log_probabilities.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        scores.log_probabilities.sum().backward()
    scores = shared.score(ids, mask, keep=keep, graphs=graphs)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(UnsupportedModelError, match="weights were changed"):
        scores.log_probabilities.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": None}, "without mask or keep"),
        ({"mask": None}, "without mask or keep"),
        ({"keep": 0}, "keep is 0; accepted: 1 to"),
        ({"keep": 99}, "keep is 99"),
        ({"ids": torch.zeros(2, 30)}, "ids are torch.float32"),
        ({"ids": torch.zeros(30, dtype=torch.int64)}, "shape \\[30\\]"),
        ({"mask": torch.ones(2, 3)}, "mask has shape \\[2, 3\\]"),
        ({"graphs": "some"}, "graphs is 'some'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"keep": 26}, "tokens before the last 26 columns; accepted: a prompt of at least 2"),
    ],
)
def test_arguments(change, message, runtime):
    ids, mask, keep = a_batch()
    arguments = {"ids": ids, "mask": mask, "keep": keep} | change
    shared = SharedPrefix(tiny(), runtime)
    with pytest.raises(ArgumentError, match=message):
        shared.score(arguments.pop("ids"), arguments.pop("mask"), **arguments)


def test_a_hole_in_a_row_is_refused(runtime):
    ids, mask, keep = a_batch()
    mask[2, 10] = 0
    with pytest.raises(ArgumentError, match="row 2 has 17 tokens within"):
        SharedPrefix(tiny(), runtime).score(ids, mask, keep=keep)


def test_rows_without_tokens_give_zeros(runtime):
    model = tiny()
    ids, mask, keep = a_batch()
    scores = SharedPrefix(model, runtime).score(ids, torch.zeros_like(mask), keep=keep)
    assert scores.counts["groups"] == 0
    assert not scores.log_probabilities.any() and scores.log_probabilities.shape == (7, keep)
    scores.log_probabilities.sum().backward()
    assert not any(bool(p.grad.any()) for p in model.parameters())


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("rows", ["masked", "empty"])
def test_a_loss_of_no_token_gives_the_zeros_of_a_dense_run(rows, graphs, runtime):
    """An optimizer skips a parameter without a gradient, and moves one with zeros."""
    model = tiny()
    model.spare = torch.nn.Linear(2, 2)
    ids, mask, keep = a_batch()
    if rows == "empty":
        mask[:, -keep:] = 0
    (padded_values(model, ids, mask, keep)[0] * 0).sum().backward()
    wanted = take_gradients(model)
    assert 0 < len(wanted) < len(list(model.parameters()))
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, graphs=graphs)
    before = torch.get_rng_state()
    (scores.log_probabilities * 0).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    got = take_gradients(model)
    assert got.keys() == wanted.keys() and not any(bool(each.any()) for each in got.values())


def check_ranks(graphs, tmp_path, *more, values=lambda *batch: dense(*batch, 1.0)[0]):
    """Runs two ranks in DistributedDataParallel. Each leaves the gradients of the dense model.
    ``values(model, ids, mask, keep)``: what their losses sum up."""
    codes = run_ranks(WORKER, tmp_path, graphs, *more, seconds_max=WORKER_SECONDS_MAX)
    assert codes == [0] * RANKS
    model = tiny()
    ids, mask, keep = a_batch()
    # The second backward is of a step of its own.
    (2 * values(model, ids, mask, keep).sum() / RANKS).backward()
    wanted = take_gradients(model)
    for rank in range(RANKS):
        assert distance(torch.load(tmp_path / f"gradients.{rank}"), wanted) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("graphs", GRAPHS)
def test_distributed_data_parallel_reduces_the_gradients(graphs, tmp_path):
    check_ranks(graphs, tmp_path)


def test_dropout_draws_the_same_masks_twice(runtime):
    """Of the rows of responses: values and gradients are those of one forward that was kept. Each
    call is the first of its own: what is found out about the model draws nothing."""
    model = adapted()
    ids, mask, keep = a_batch()
    found = []
    for graphs in GRAPHS:
        shared = SharedPrefix(model, runtime, prompt_dropout=False)
        torch.manual_seed(7)
        scores = shared.score(ids, mask, keep=keep, graphs=graphs)
        drawn = torch.get_rng_state()
        torch.randn(3)
        before = torch.get_rng_state()
        (scores.log_probabilities**2).sum().backward()
        assert torch.equal(torch.get_rng_state(), before), "the backward draws nothing of its own"
        found.append((scores.log_probabilities.detach(), take_gradients(model), drawn))
    (kept, kept_grads, kept_drawn), (twice, twice_grads, twice_drawn) = found
    assert torch.equal(kept, twice) and torch.equal(kept_drawn, twice_drawn)
    assert distance(twice_grads, kept_grads) < 1e-12
    other = shared.score(ids, mask, keep=keep).log_probabilities
    assert not torch.equal(other, kept), "masks are drawn anew in each call"


def test_the_default_rows_of_a_microbatch_follow_what_it_saves(runtime, monkeypatch):
    model = tiny(num_hidden_layers=1, dtype=torch.float32)
    ids, mask, keep = padded([6] * 6, [400] * 6)
    shared = SharedPrefix(model, runtime)

    def microbatches(**options) -> int:
        return shared.score(ids, mask, keep=keep, **options).counts["microbatches"]

    assert microbatches() == 2
    with torch.no_grad():
        assert microbatches() == 2
    assert microbatches(microbatch_tokens=400) == 6
    # Those of other steps are the least.
    monkeypatch.setattr(scored_model, "SCORED_MICROBATCH_BYTES_MAX", 1)
    assert microbatches() == 6
    responses = [row[mask_of.bool()][6:] for row, mask_of in zip(ids, mask, strict=True)]
    group = Group(ids[0][mask[0].bool()][:6], responses)
    assert shared.score(group).counts["microbatches"] == 6
    monkeypatch.undo()
    assert shared.score(group).counts["microbatches"] == 6
