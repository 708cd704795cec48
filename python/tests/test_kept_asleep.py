"""Kept graphs of microbatches sleep between their forward and their backward."""

from __future__ import annotations

import gc

import pytest
import torch
from models import distance, take_gradients, tiny
from test_offload import Net, left, same, seeded, share, sleep_until, step
from test_sleep import WIDE
from test_token_scores import dense, padded

import dormouse
from dormouse.activations.forwards import Forwards
from dormouse.activations.passes import InPlace
from dormouse.hf import SharedPrefix, scored_model
from dormouse.hf.held_step import HeldStep
from dormouse.hf.scored_model import ScoredModel
from dormouse.offload import in_place

LAYERS = 6
MICROBATCH_TOKENS = 160
# Rows of two prompts.
MICROBATCHES = 4


def wide(**changes):
    return tiny(dtype=torch.float32, num_hidden_layers=LAYERS, **(WIDE | changes))


def a_batch():
    """Microbatches whose activations are large enough to sleep."""
    return padded([90, 70, 90, 70], [150, 140, 130, 120])


def scored(shared, batch, **options):
    ids, mask, keep = batch
    options = {"graphs": "kept", "microbatch_tokens": MICROBATCH_TOKENS} | options
    return shared.score(ids, mask, keep=keep, **options)


def passes_of(scores) -> list[InPlace]:
    """The forwards of microbatches of a call without a backward so far."""
    asleep = scores.log_probabilities.grad_fn.call._asleep
    return [] if asleep is None else asleep._ended


@pytest.fixture
def reports(monkeypatch):
    """Those of the microbatches whose backward is over."""
    found = []
    monkeypatch.setattr(Forwards, "_finished", lambda self, ended: found.append(ended.report))
    return found


@pytest.fixture
def warm(runtime):
    """A model and what shares its prompts, after a first call, which checks."""
    model, batch = wide(), a_batch()
    shared = SharedPrefix(model, runtime)
    scored(shared, batch).log_probabilities.sum().backward()
    model.zero_grad()
    return model, shared, batch


def test_asleep_equals_awake_bit_for_bit(warm, runtime, reports, monkeypatch):
    model, shared, batch = warm
    scores = scored(shared, batch)
    saved = [each._prefix.report()["dormant_bytes"] for each in passes_of(scores)]
    assert len(saved) == MICROBATCHES
    sleep_until(runtime, sum(saved))
    scores.log_probabilities.square().sum().backward()
    asleep = take_gradients(model)
    del scores
    assert [each.prefix["dormant_bytes"] for each in reports] == saved
    assert all(each.stray_wakes == 0 for each in reports)
    # The report counts the prompt's K and V, which no microbatch puts to sleep.
    assert all(share(each) > 0.8 for each in reports)
    assert left(runtime) == 0
    with monkeypatch.context() as patched:
        patched.setattr(ScoredModel, "_asleep_in_place", lambda *_: None)
        scores = scored(shared, batch)
        assert passes_of(scores) == []
        scores.log_probabilities.square().sum().backward()
    awake = take_gradients(model)
    assert asleep.keys() == awake.keys()
    assert all(torch.equal(asleep[name], awake[name]) for name in awake)


def test_gradients_are_those_of_the_dense_batch(runtime, reports):
    model, batch = wide().double(), a_batch()
    dense(model, *batch, 1.0)[0].square().sum().backward()
    wanted = take_gradients(model)
    for graphs in ("kept", "twice"):
        scores = scored(SharedPrefix(model, runtime), batch, graphs=graphs)
        scores.log_probabilities.square().sum().backward()
        # Norms of transformers compute in FP32.
        assert distance(take_gradients(model), wanted) < 1e-5
    assert len(reports) == MICROBATCHES and reports[0].asleep_bytes > 0


def test_a_microbatch_wakes_while_the_one_after_it_ends(warm, monkeypatch):
    _, shared, batch = warm
    scores = scored(shared, batch)
    numbers = {id(each._prefix): number for number, each in enumerate(passes_of(scores))}
    prefix, events = dormouse.runtime.Prefix, []
    enter, mark = prefix.enter, prefix.mark

    def entered(self, phase):
        events.append((numbers.get(id(self)), phase.name))
        enter(self, phase)

    def marked(self, edge, layer):
        events.append((numbers.get(id(self)), edge.name, layer))
        mark(self, edge, layer)

    heads = HeldStep.backward_of_heads

    def in_heads(self, gradients_of):
        events.append("heads")
        heads(self, gradients_of)

    monkeypatch.setattr(HeldStep, "backward_of_heads", in_heads)
    monkeypatch.setattr(prefix, "enter", entered)
    monkeypatch.setattr(prefix, "mark", marked)
    scores.log_probabilities.sum().backward()
    last = MICROBATCHES - 1
    assert events[:2] == [(last, "C"), "heads"]
    for number in range(last):
        at = events.index((number, "C"))
        after = number + 1
        assert events.index((after, "BACKWARD_BEGIN", 1)) < at
        assert at < events.index((after, "BACKWARD_END", 1))


@pytest.mark.parametrize("why", ["sleep=False", "no tier", "compiled"])
def test_what_may_not_sleep_stays_awake(why, warm, runtime, monkeypatch):
    model, shared, batch = warm
    scored(shared, batch).log_probabilities.sum().backward()
    wanted = take_gradients(model)
    if why == "sleep=False":
        shared = SharedPrefix(model, runtime, sleep=False)
    elif why == "no tier":
        info = runtime.info() | {"tiers": []}
        monkeypatch.setattr(type(runtime), "info", lambda self: info)
    else:
        model.model.layers[2]._compiled_call_impl = model.model.layers[2]._call_impl
    scores = scored(shared, batch)
    assert passes_of(scores) == []
    scores.log_probabilities.sum().backward()
    got = take_gradients(model)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_what_is_small_beside_the_gradients_stays_awake(warm, monkeypatch):
    model, shared, _ = warm
    few = padded([90, 90], [20, 20])
    found = []
    for _ in range(2):
        scores = scored(shared, few)
        passes = passes_of(scores)
        scores.log_probabilities.square().sum().backward()
        found.append((len(passes), take_gradients(model)))
        monkeypatch.setattr(scored_model, "AWAKE_SHARE", 0.0)
    (awake, wanted), (asleep, got) = found
    assert (awake, asleep) == (0, 1)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_layers_that_are_called_more_often_than_expected(runtime, reports):
    """What the last expected call has made is read by one without marks."""
    model = seeded(Net, layers=4, order=[0, 1, 2, 3] * 2)
    plain = step(model)
    with in_place(model, runtime, list(model.blocks)) as asleep:
        for _ in range(2):

            def wait(out):
                saved = [each._prefix.report()["dormant_bytes"] for each in asleep._ended]
                sleep_until(runtime, sum(saved))

            assert same(step(model, between=wait), plain)
            asleep.finish()
    assert [each.layer_calls for each in reports] == [8, 8]
    assert [each.stray_wakes for each in reports] == [0, 0]
    assert left(runtime) == 0


def test_calls_that_wait_for_their_backward_are_small_together(warm, monkeypatch):
    _, shared, _ = warm
    few = padded([90, 90], [20, 20])
    first = scored(shared, few)
    (own_bytes,) = shared._awake.values()
    share_of_one = own_bytes / shared._gradient_bytes(shared._ready())
    monkeypatch.setattr(scored_model, "AWAKE_SHARE", 1.5 * share_of_one)
    second = scored(shared, few)
    assert [len(passes_of(each)) for each in (first, second)] == [0, 1]
    del first
    gc.collect()
    assert passes_of(scored(shared, few)) == []


@pytest.mark.filterwarnings("ignore:dormouse.offload")
def test_inside_the_context_of_activations_alone(warm, runtime):
    """Its hooks forbid that the head runs apart, so that gradients of the head are summed otherwise."""
    model, shared, batch = warm
    scored(shared, batch).log_probabilities.sum().backward()
    wanted = take_gradients(model)
    with dormouse.offload(model, runtime):
        scores = scored(shared, batch)
    assert passes_of(scores) == []
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-6


def test_a_call_without_a_backward_leaves_nothing_behind(warm, runtime):
    model, shared, batch = warm
    scores = scored(shared, batch)
    # Some sleep, some are on their way.
    assert runtime.stats()["asleep"]["current_bytes"] > 0
    del scores
    assert left(runtime) == 0
    with pytest.raises(ZeroDivisionError):
        _fail(scored(shared, batch))
    gc.collect()
    assert left(runtime) == 0
    assert all(p.grad is None for p in model.parameters())


def _fail(scores):
    raise ZeroDivisionError(scores.log_probabilities.sum())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_have_their_inputs_asleep(use_reentrant, runtime, reports):
    model, batch = wide().train(), a_batch()
    dense(model, *batch, 1.0)[0].sum().backward()
    wanted = take_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    scores = scored(SharedPrefix(model, runtime), batch)
    scores.log_probabilities.sum().backward()
    assert distance(take_gradients(model), wanted) < 1e-5
    assert all(each.stray_wakes == 0 for each in reports)
