"""Measured rates, and predictions from them."""

from __future__ import annotations

import random

import pytest
import torch
from model_zoo import zoo_model
from models import group, loss_fn, tiny

from dormouse import ArgumentError, Conversation, Group, Tree
from dormouse.hf import SharedPrefix, speed
from dormouse.hf.batch import batch_of
from dormouse.hf.model_shape import model_shape
from dormouse.hf.outputs import Losses

RATES = {
    "nodes": 0.4,
    "microbatches": 0.3,
    "rows": 4e-3,
    "prefix_pairs": 3e-6,
    "causal_pairs": 5e-6,
    "logit_rows": 1e-3,
}
LAYERS = 4


def naive_rows(conversations) -> tuple[set, set]:
    """Rows that run, by the tokens up to the next one, which a row predicts, and those of them with
    a label."""
    rows, scored = set(), set()
    for each in conversations:
        tokens = each.tokens.tolist()
        rows |= {tuple(tokens[: at + 1]) for at in range(1, each.used_tokens)}
        scored |= {tuple(tokens[: at + 1]) for a, b in each.labels for at in range(a, b)}
    return rows, scored


@pytest.mark.parametrize("seed", range(5))
def test_features_of_trees_are_those_of_distinct_prefixes(seed, runtime):
    """With labels on every token each node runs all its layers."""
    chance = random.Random(seed)
    stems = [[chance.randrange(5) for _ in range(chance.randrange(3, 9))] for _ in range(3)]
    conversations = []
    for _ in range(7):
        tokens = list(chance.choice(stems))
        tokens += [chance.randrange(3) for _ in range(chance.randrange(1, 6))]
        conversations.append(Conversation(tokens))
    shared = SharedPrefix(tiny(num_hidden_layers=LAYERS), runtime)
    batch = batch_of(Tree(conversations), Losses())
    with shared._plan(batch, 8) as plan:
        features = speed.of_plan(plan, model_shape(shared._view))
    rows, scored = naive_rows(conversations)
    assert features["rows"] == len(rows)
    assert features["logit_rows"] == len(scored)
    # A row sees its own key and those before it.
    pairs = features["prefix_pairs"] + features["causal_pairs"]
    assert pairs == sum(len(row) - 1 for row in rows)
    assert speed.of_dense(batch.dense_runs()) == {
        "microbatches": 7,
        "rows": sum(len(each.tokens) - 1 for each in conversations),
        "causal_pairs": sum(
            at for each in conversations for at in range(1, len(each.tokens))
        ),
        "logit_rows": sum(len(each.tokens) - 1 for each in conversations),
    }


def test_the_last_layer_of_a_prompt_counts_in_part(runtime):
    shared = SharedPrefix(tiny(num_hidden_layers=LAYERS), runtime)
    shape = model_shape(shared._view)
    batch = batch_of(group(21, (5, 1, 9)), Losses())
    with shared._plan(batch, 256) as plan:
        features = speed.of_plan(plan, shape)
    last = shape.last_layer_prefix_weights / shape.layer_linear_weights
    assert features["rows"] == round(20 * (LAYERS - 1 + last) / LAYERS + 5 + 1 + 9)
    assert features["causal_pairs"] == round(210 * (LAYERS - 1) / LAYERS + 15 + 1 + 45)
    assert features["prefix_pairs"] == 20 * 15
    assert (features["nodes"], features["microbatches"]) == (1, 1)


def timed(samples, seconds_of_features):
    """A clock that knows the features of what it times."""
    features = {id(sample.run): sample.features for sample in samples}
    return lambda run: seconds_of_features(features[id(run)])


def samples_of(shared, tokens: int) -> list[speed.Sample]:
    view, shape = shared._view, model_shape(shared._view)
    samples = speed.dense_samples(view, torch.device("cpu"), tokens, lambda loss: None)
    for case, microbatch in speed.shared_groups(view, tokens):
        with shared._plan(batch_of(case, Losses()), microbatch) as plan:
            samples.append(speed.Sample(speed.of_plan(plan, shape), lambda: None))
    return samples


@pytest.mark.parametrize("tokens", [48, 768, 4096])
def test_rates_of_a_known_machine_are_found(tokens, runtime):
    """The shapes tell all rates apart."""
    samples = samples_of(SharedPrefix(tiny(), runtime), tokens)
    machine = speed.Speed(RATES, 0.0)
    found = speed.fitted(samples, timed(samples, machine.seconds))
    assert {name: found.rates[name] for name in RATES} == pytest.approx(RATES, rel=1e-6)
    assert found.error < 1e-9


def test_the_first_round_does_not_count(runtime):
    samples = samples_of(SharedPrefix(tiny(), runtime), 96)
    machine, calls = speed.Speed(RATES, 0.0), []

    def seconds_of(run):
        calls.append(run)
        clock = timed(samples, machine.seconds)
        return clock(run) * (100 if len(calls) <= len(samples) else 1)

    assert speed.fitted(samples, seconds_of).error < 1e-9
    assert len(calls) == (speed.ROUNDS + 1) * len(samples)


def test_a_measurement_leaves_the_model_as_it_is(runtime):
    model = tiny(num_hidden_layers=2, dtype=torch.float32)
    shared, case = SharedPrefix(model, runtime), group(21, (5, 1, 9))
    shared.backward(case, loss_fn)
    before = {name: (p.clone(), p.grad.clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    measured = shared.measure_speed(tokens=48)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert torch.equal(parameter.grad, before[name][1])
    assert all(rate >= 0 for rate in measured.rates.values())
    predicted = shared.predict(case, measured=measured)
    assert predicted["speedup"] == predicted["seconds_dense"] / predicted["seconds_shared"]
    assert predicted["flops_dense"] == shared.predict(case)["flops_dense"]


def test_models_that_compute_all_logits_are_timed_so(runtime):
    model = zoo_model("bloom", torch.float32)
    forward = model.forward
    model.forward = lambda *args, **named: forward(*args, **named)
    shared = SharedPrefix(model, runtime)
    assert not shared._view.selects_logits
    samples = speed.dense_samples(shared._view, torch.device("cpu"), 48, lambda loss: None)
    assert [each.features["logit_rows"] for each in samples] == [1, 16, 16, 48]
    for sample in samples:
        sample.run()


def test_short_measurements_are_refused(runtime):
    with pytest.raises(ArgumentError, match="tokens is 47; accepted: at least 48"):
        SharedPrefix(tiny(num_hidden_layers=2), runtime).measure_speed(tokens=47)


def test_a_longer_prefix_is_predicted_to_pay_more(runtime):
    shared, machine = SharedPrefix(tiny(num_hidden_layers=2), runtime), speed.Speed(RATES, 0.0)

    def speedup(prompt: int) -> float:
        case = Group(torch.arange(prompt) % 90, [[1] * 20] * 8)
        return shared.predict(case, measured=machine)["speedup"]

    figures = [speedup(prompt) for prompt in (20, 100, 500, 2500)]
    assert figures == sorted(set(figures))
