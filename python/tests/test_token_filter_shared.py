"""Token filtering of shared steps, against dense rows whose gradients are multiplied by the mask at
every layer."""

from __future__ import annotations

import functools
import gc

import peft
import pytest
import torch
from masked_model import OWN_ATTENTION, masked_backward
from model_zoo import in_fp64, zoo_model
from models import KINDS, distance, take_gradients, tiny
from test_token_scores import GRAPHS, a_batch, padded
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dormouse import ArgumentError
from dormouse.demo import gradcheck
from dormouse.hf import SharedPrefix, UnsupportedModelError, top_share

FP64_BOUND = 1e-10


def some_tokens(ids, keep, seed: int = 5):
    """Kept tokens of every row; one row keeps none, one its first token alone, one all."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(len(ids), keep, generator=generator) < 0.5
    kept[2] = False
    kept[3] = False
    kept[3, 0] = True
    kept[4] = True
    return kept


def responses_of(kept, mask):
    """The kept tokens of each response."""
    columns = kept.shape[1]
    return [own[: int(of_row[-columns:].sum())] for own, of_row in zip(kept, mask, strict=True)]


def weights_of(kept, seed: int = 6):
    """A loss's factor of each token's log-probability: dropped tokens have one too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(kept.shape, generator=generator, dtype=torch.float64)


def dense_filtered(model, ids, mask, keep, kept, **options) -> None:
    """The gradients of each row by itself."""
    weights = weights_of(kept)
    for row in range(len(ids)):
        at = mask[row].nonzero().flatten()
        count = int(mask[row, -keep:].sum())
        if count == 0:
            continue
        tokens, own = ids[row, at], kept[row, :count]
        rows = torch.ones(1, len(tokens), dtype=torch.bool)
        # Row t predicts token t + 1; all rows of the prompt are kept.
        rows[0, -count:-1] = own[1:]
        rows[0, -1] = False

        def loss(logits, labels=tokens[-count:], factors=weights[row, :count] * own):
            found = functional.log_softmax(logits[0, -len(labels) - 1 : -1].double(), -1)
            return (found.gather(1, labels[:, None])[:, 0] * factors).sum()

        masked_backward(model, tokens[None], rows, loss, use_cache=False, **options)


def shared_filtered(shared, ids, mask, keep, kept, **options):
    scores = shared.score(ids, mask, keep=keep, token_filter=kept, **options)
    (scores.log_probabilities * weights_of(scores.log_probabilities)).sum().backward()
    return scores


def both(model, runtime, batch, kept, **options):
    """(scores, filtered, reference) gradients."""
    dense_filtered(model, *batch, kept)
    wanted = take_gradients(model)
    scores = shared_filtered(SharedPrefix(model, runtime), *batch, kept, **options)
    return scores, take_gradients(model), wanted


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("microbatch_tokens", [8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_dense_filtered_rows(kind, microbatch_tokens, graphs, runtime):
    batch = a_batch()
    kept = some_tokens(batch[0], batch[2])
    options = {"graphs": graphs, "microbatch_tokens": microbatch_tokens}
    scores, got, wanted = both(tiny(kind), runtime, batch, kept, **options)
    assert distance(got, wanted) <= FP64_BOUND
    assert all(report.kept_whole == {} for report in scores.filtered)
    # The row that predicts a response's first token is kept with any of its tokens.
    counts = (int(own[1:].sum()) + int(own.any()) for own in responses_of(kept, batch[1]))
    assert sum(report.kept_rows for report in scores.filtered) == sum(counts)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_function_chooses_by_log_probabilities(graphs, runtime):
    model, batch = tiny(), a_batch()
    reference = weights_of(torch.empty(len(batch[0]), batch[2]), seed=9)
    seen = {}

    def choose(row, log_probabilities):
        assert not log_probabilities.requires_grad
        seen[row] = log_probabilities.clone()
        own = reference[row, : len(log_probabilities)]
        return top_share(-log_probabilities, own, 0.6)

    shared = SharedPrefix(model, runtime)
    scores = shared_filtered(shared, *batch, choose, graphs=graphs)
    got = take_gradients(model)
    kept = torch.zeros(len(batch[0]), batch[2], dtype=torch.bool)
    for row, own in seen.items():
        assert torch.equal(own, scores.log_probabilities[row, : len(own)].detach())
        kept[row, : len(own)] = choose(row, own)
    # One row has no response.
    assert sorted(seen) == [0, 1, 2, 3, 4, 6]
    dense_filtered(model, *batch, kept)
    assert distance(got, take_gradients(model)) <= FP64_BOUND


@pytest.mark.parametrize("graphs", GRAPHS)
def test_forwards_do_not_change(graphs, runtime):
    model, batch = tiny(), a_batch()
    shared = SharedPrefix(model, runtime)
    plain = shared.score(*batch[:2], keep=batch[2], graphs=graphs)
    kept = some_tokens(batch[0], batch[2])
    filtered = shared.score(*batch[:2], keep=batch[2], graphs=graphs, token_filter=kept)
    assert torch.equal(plain.log_probabilities, filtered.log_probabilities)
    # Without a backward.
    del plain, filtered


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_response_with_no_kept_token_contributes_zero(graphs, runtime):
    model = tiny()
    ids, mask, keep = padded([9, 9, 9], [4, 6, 3])
    kept = torch.ones(3, keep, dtype=torch.bool)
    kept[1] = False
    shared = SharedPrefix(model, runtime)
    factors = weights_of(kept)

    def backward(rows, kept):
        scores = shared.score(
            ids[rows], mask[rows], keep=keep, graphs=graphs, token_filter=kept[rows]
        )
        (scores.log_probabilities * factors[rows]).sum().backward()
        return take_gradients(model)

    assert distance(backward([0, 1, 2], kept), backward([0, 2], kept)) <= FP64_BOUND
    nothing = shared.score(
        ids, mask, keep=keep, graphs=graphs, token_filter=torch.zeros_like(kept)
    )
    nothing.log_probabilities.sum().backward()
    assert all(not grad.any() for grad in take_gradients(model).values())


@pytest.mark.parametrize("graphs", GRAPHS)
def test_gradients_of_the_prompt_are_whole(graphs, runtime):
    """Prompt rows count as kept: a loss of kept tokens reaches the prompt's K and V in full."""
    model = tiny()
    ids, mask, keep = padded([30, 30], [5, 7])
    kept = torch.zeros(2, keep, dtype=torch.bool)
    kept[:, 3] = True
    _, got, wanted = both(model, runtime, (ids, mask, keep), kept, graphs=graphs)
    assert distance(got, wanted) <= FP64_BOUND
    prompt = ids[0][mask[0] != 0][:29].unique()
    assert bool(got["model.embed_tokens.weight"][prompt].any(1).all())


def mixed_loss(log_probabilities, entropies, chosen_logits, hidden, factors):
    """Of one response or of all: ``hidden`` are the rows that predict its tokens."""
    total = (log_probabilities + 0.3 * entropies + 0.1 * chosen_logits) * factors
    return (total + hidden.square().mean(-1) * factors).sum()


def dense_mixed(model, ids, mask, keep, kept, factors) -> None:
    """The gradients of :func:`mixed_loss` of kept tokens, each row by itself."""
    hidden = []
    handle = model.model.norm.register_forward_hook(lambda *each: hidden.append(each[2]))
    for row in range(len(ids)):
        count = int(mask[row, -keep:].sum())
        if count == 0:
            continue
        tokens, own = ids[row, mask[row].nonzero().flatten()], kept[row, :count]
        rows = torch.ones(1, len(tokens), dtype=torch.bool)
        rows[0, -count:-1], rows[0, -1] = own[1:], False

        def loss(logits, labels=tokens[-count:], factors=factors[row, :count] * own):
            own = slice(-len(labels) - 1, -1)
            found = logits[0, own].log_softmax(-1)
            chosen = [x.gather(1, labels[:, None])[:, 0] for x in (found, logits[0, own])]
            entropies = -(found.exp() * found).sum(-1)
            return mixed_loss(chosen[0], entropies, chosen[1], hidden.pop()[0, own], factors)

        masked_backward(model, tokens[None], rows, loss, use_cache=False)
    handle.remove()


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("is_apart", [True, False])
def test_entropies_chosen_logits_and_hidden_states(is_apart, graphs, runtime):
    """Of kept tokens: what a loss says of others does not count."""
    model = tiny().eval()
    ids, mask, keep = a_batch()
    kept = some_tokens(ids, keep)
    factors = weights_of(kept)
    dense_mixed(model, ids, mask, keep, kept, factors)
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    if not is_apart:
        shared._find_head = lambda weights: None
    options = {"graphs": graphs, "microbatch_tokens": 8, "token_filter": kept, "entropy": True}
    outputs = ("chosen_logits", "last_hidden_state")
    scores = shared.score(ids, mask, keep=keep, outputs=outputs, **options)
    values = scores.log_probabilities, scores.entropies, scores.chosen_logits
    mixed_loss(*values, scores.last_hidden_state, factors).backward()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


@pytest.mark.parametrize("holds_logits", [True, False])
def test_heads_that_hold_logits_or_compute_them_again(holds_logits, runtime):
    model, batch = tiny(tie_word_embeddings=False), a_batch()
    shared = SharedPrefix(model, runtime)
    shared._holds_logits = lambda *_: holds_logits
    kept = some_tokens(batch[0], batch[2])
    dense_filtered(model, *batch, kept)
    wanted = take_gradients(model)
    shared_filtered(shared, *batch, kept, graphs="kept", microbatch_tokens=8)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


@pytest.mark.parametrize("graphs", GRAPHS)
def test_adapters_of_frozen_weights(graphs, runtime):
    config = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(), config).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = a_batch()
    kept = some_tokens(batch[0], batch[2])
    _, got, wanted = both(model, runtime, batch, kept, graphs=graphs)
    assert len(got) == 2 * 7 * 4 and distance(got, wanted) <= FP64_BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_near_to_fp64_as_the_reference(dtype, runtime):
    batch = padded([21] * 6, [30, 24, 30, 17, 30, 28])
    kept = some_tokens(batch[0], batch[2])
    exact, model = tiny(), tiny(dtype=dtype)
    with torch.no_grad():
        for own, other in zip(exact.parameters(), model.parameters(), strict=True):
            own.copy_(other)
    dense_filtered(exact, *batch, kept)
    truth = take_gradients(exact)
    _, got, wanted = both(model, runtime, batch, kept, microbatch_tokens=64)
    error = gradcheck.compare(truth.items(), wanted, got)
    assert error.within_bounds, error


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("kind", ["gpt_neox", "phi", "cohere"])
def test_layers_whose_parts_are_parallel(kind, graphs, runtime):
    with in_fp64():
        model = zoo_model(kind)
        batch = padded([17, 17, 17, 17, 17], [12, 16, 11, 18, 13])
        kept = some_tokens(batch[0], batch[2])
        shared = SharedPrefix(model, runtime)
        shared_filtered(shared, *batch, kept, graphs=graphs)
        got = take_gradients(model)
        dense_filtered(model, *batch, kept)
        assert distance(got, take_gradients(model)) <= FP64_BOUND


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("sleep", [True, False])
@pytest.mark.parametrize("microbatch_tokens", [8, 64])
def test_every_microbatch_has_a_report(microbatch_tokens, sleep, graphs, runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    options = {"keep": keep, "graphs": graphs, "microbatch_tokens": microbatch_tokens}
    shared = SharedPrefix(model, runtime, sleep=sleep)
    shared.score(ids, mask, **options).log_probabilities.sum().backward()
    wanted = take_gradients(model)
    everything = torch.ones(len(ids), keep, dtype=torch.bool)
    scores = shared.score(ids, mask, token_filter=everything, **options)
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    assert len(scores.filtered) == scores.counts["microbatches"]
    assert all(report.kept_rows == report.rows > 0 for report in scores.filtered)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_gradients_of_dropped_tokens_that_are_not_finite(graphs, runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    kept = some_tokens(ids, keep)
    dense_filtered(model, ids, mask, keep, kept)
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    scores = shared.score(ids, mask, keep=keep, token_filter=kept, graphs=graphs)
    factors = weights_of(kept).masked_fill(~kept, torch.inf)
    (scores.log_probabilities * factors).sum().backward()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


@pytest.mark.parametrize("graphs", GRAPHS)
def test_saved_tensor_hooks(graphs, runtime):
    """What they hold keeps its rows."""
    model, batch = tiny(), a_batch()
    kept = some_tokens(batch[0], batch[2])
    options = {"graphs": graphs, "context": torch.autograd.graph.save_on_cpu}
    scores, got, wanted = both(model, runtime, batch, kept, **options)
    assert distance(got, wanted) <= FP64_BOUND
    assert all("PackedAttentionBackward" in report.kept_whole for report in scores.filtered)


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "gemma2"])
def test_windows_sinks_and_soft_caps_keep_the_rows_of_attention(kind, runtime):
    """The report says so; dropped rows get no gradient all the same."""
    with in_fp64():
        model = zoo_model(kind)
        batch = padded([17, 17, 17, 17, 17], [12, 16, 11, 18, 13])
        kept = some_tokens(batch[0], batch[2])
        shared = SharedPrefix(model, runtime)
        scores = shared_filtered(shared, *batch, kept)
        got = take_gradients(model)
        dense_filtered(model, *batch, kept, attention=OWN_ATTENTION)
        assert distance(got, take_gradients(model)) <= FP64_BOUND
    assert all("PackedAttentionBackward" in report.kept_whole for report in scores.filtered)


def test_packed_batches(runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    kept = some_tokens(ids, keep)
    shared = SharedPrefix(model, runtime)
    shared_filtered(shared, ids, mask, keep, kept)
    wanted = take_gradients(model)
    rows = [row for row in range(len(ids)) if mask[row, -keep:].any()]
    factors = weights_of(kept)
    tokens, prompts, own, weights = [], [], [], []
    for row in rows:
        at = mask[row].nonzero().flatten()
        count = int(mask[row, -keep:].sum())
        tokens.append(ids[row, at])
        prompts.append(len(at) - count)
        of_prompt = torch.zeros(prompts[-1], dtype=torch.bool)
        own.append(torch.cat([of_prompt, kept[row, :count]]))
        weights.append(torch.cat([of_prompt.double(), factors[row, :count]]))
    bounds = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    scores = shared.score_packed(
        torch.cat(tokens),
        bounds,
        prompt_lengths=torch.tensor(prompts),
        token_filter=torch.cat(own),
    )
    (scores.log_probabilities * torch.cat(weights)).sum().backward()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


@pytest.mark.parametrize(
    ("token_filter", "message"),
    [
        (torch.ones(7, 3, dtype=torch.bool), r"token_filter has shape \[7, 3\]; .*\[7, 9\]"),
        (torch.ones(7, 9), "token_filter is torch.float32; accepted: a tensor of torch.bool"),
        (0.5, "token_filter is float; accepted: a tensor of torch.bool, or a function"),
        (
            lambda row, own: torch.ones(len(own) + 1, dtype=torch.bool),
            r"token_filter\(0, log_probabilities\) has shape \[5\]; accepted: .* \[4\]",
        ),
        (lambda row, own: None, r"token_filter\(0, log_probabilities\) is NoneType; accepted"),
    ],
)
@pytest.mark.parametrize("graphs", GRAPHS)
def test_masks_of_another_shape_are_refused(token_filter, message, graphs, runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    shared = SharedPrefix(model, runtime)
    with pytest.raises(ArgumentError, match=message):
        shared.score(ids, mask, keep=keep, token_filter=token_filter, graphs=graphs)
    # The model runs as before.
    shared.score(ids, mask, keep=keep, graphs=graphs).log_probabilities.sum().backward()


def test_masks_of_packed_batches_have_one_element_per_token(runtime):
    shared = SharedPrefix(tiny(), runtime)
    lengths = torch.tensor([0, 9, 17])
    with pytest.raises(ArgumentError, match=r"token_filter has shape \[16\]; .*\[17\]"):
        shared.score_packed(
            torch.arange(17),
            lengths,
            prompt_lengths=torch.tensor([4, 4]),
            token_filter=torch.ones(16, dtype=torch.bool),
        )


def test_checkpointed_models_are_refused(runtime):
    model, (ids, mask, keep) = tiny().train(), a_batch()
    model.gradient_checkpointing_enable()
    kept = some_tokens(ids, keep)
    with pytest.raises(UnsupportedModelError, match="gradient checkpointing"):
        SharedPrefix(model, runtime).score(ids, mask, keep=keep, token_filter=kept)


def checkpointed_by_itself(use_reentrant: bool):
    """A model whose trainer checkpoints its layers."""
    model = tiny().train()
    for layer in model.model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner, **named: checkpoint(
            functools.partial(inner, **named), x, use_reentrant=use_reentrant
        )
    return model


@pytest.mark.parametrize("graphs", GRAPHS)
def test_layers_that_a_trainer_checkpoints_without_a_graph_are_refused(graphs, runtime):
    model, (ids, mask, keep) = checkpointed_by_itself(True), a_batch()
    kept = some_tokens(ids, keep)
    with pytest.raises(UnsupportedModelError, match="use_reentrant=True; accepted: .*False"):
        shared_filtered(SharedPrefix(model, runtime), ids, mask, keep, kept, graphs=graphs)
    assert not take_gradients(model)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_layers_that_a_trainer_checkpoints_with_a_graph(graphs, runtime):
    model, plain, batch = checkpointed_by_itself(False), tiny(), a_batch()
    kept = some_tokens(batch[0], batch[2])
    shared_filtered(SharedPrefix(model, runtime), *batch, kept, graphs=graphs)
    dense_filtered(plain, *batch, kept)
    assert distance(take_gradients(model), take_gradients(plain)) <= FP64_BOUND


def test_kept_rows_sleep_until_the_backward(runtime, monkeypatch):
    monkeypatch.setattr("dormouse.hf.filter.microbatch.ASLEEP_BYTES_MIN", 1 << 19)
    model, batch = tiny(), padded([40] * 4, [400, 380, 410, 400])
    kept = torch.rand(4, batch[2], generator=torch.Generator().manual_seed(2)) < 0.6
    dense_filtered(model, *batch, kept)
    wanted = take_gradients(model)
    before = runtime.stats()["asleep"]["current_bytes"]
    shared = SharedPrefix(model, runtime)
    options = {"keep": batch[2], "graphs": "kept", "microbatch_tokens": 900}
    scores = shared.score(*batch[:2], token_filter=kept, **options)
    asleep = runtime.stats()["asleep"]["current_bytes"] - before
    reports = scores.filtered
    assert len(reports) == 2
    for report in reports:
        assert 0 < report.asleep_bytes <= report.kept_bytes < 0.85 * report.saved_bytes
    assert asleep >= 0.9 * sum(report.asleep_bytes for report in reports)
    (scores.log_probabilities * weights_of(kept)).sum().backward()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    # Without a backward nothing is left asleep.
    scores = shared.score(*batch[:2], token_filter=kept, **options)
    del scores
    gc.collect()
    assert runtime.stats()["asleep"]["current_bytes"] == before
    awake = SharedPrefix(model, runtime, sleep=False)
    scores = awake.score(*batch[:2], token_filter=kept, **options)
    assert all(report.asleep_bytes == 0 for report in scores.filtered)
    (scores.log_probabilities * weights_of(kept)).sum().backward()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_microbatches_that_keep_everything_sleep_too(runtime, monkeypatch):
    monkeypatch.setattr("dormouse.hf.filter.microbatch.ASLEEP_BYTES_MIN", 1 << 19)
    model, batch = tiny(), padded([40] * 4, [400, 380, 410, 400])
    kept = torch.ones(4, batch[2], dtype=torch.bool)
    shared = SharedPrefix(model, runtime)
    options = {"keep": batch[2], "graphs": "kept", "microbatch_tokens": 900}
    shared.score(*batch[:2], **options).log_probabilities.sum().backward()
    wanted = take_gradients(model)
    scores = shared.score(*batch[:2], token_filter=kept, **options)
    assert len(scores.filtered) == 2
    for report in scores.filtered:
        assert report.kept_rows == report.rows
        assert report.asleep_bytes > 0.5 * report.kept_bytes
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_models_that_read_the_prompt_otherwise_are_refused(runtime):
    """This one's attention has no parts."""
    model = zoo_model("bloom", torch.float64)
    ids, mask, keep = a_batch()
    kept = some_tokens(ids, keep)
    with pytest.raises(UnsupportedModelError, match="token_filter of a model whose responses read"):
        SharedPrefix(model, runtime).score(ids, mask, keep=keep, token_filter=kept)
