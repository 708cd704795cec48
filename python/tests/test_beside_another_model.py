"""While a thread runs passes of a model, functions and attributes of its classes are replaced. That
is no change of another model of the same classes, whose passes run on another thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_zoo import zoo_model
from models import distance, group, take_gradients
from test_short_windows import LIMIT, on_another_thread
from test_token_scores import padded

from dormouse.hf import SharedPrefix, calls, short_windows
from dormouse.hf.fingerprint import Fingerprint


def recurrent_model():
    return zoo_model("qwen3_next", torch.float32)


def windowed_model():
    return zoo_model("gemma3_text", torch.float32, limit=LIMIT)


def calls_replaced(model):
    return calls.use(calls.callers([model], calls.RECURRENT), lambda call: None)


REPLACED = {
    "calls": (recurrent_model, calls_replaced),
    "windows": (windowed_model, lambda model: short_windows.use(model, 4)),
}


def test_a_backward_runs_forwards_again(runtime):
    one, other = recurrent_model(), recurrent_model()
    learner, scorer = (SharedPrefix(each, runtime, sleep=False) for each in (one, other))
    ids, mask, keep = padded([9, 9], [4, 3])

    def loss():
        return learner.score(ids, mask, keep=keep, graphs="twice").log_probabilities.sum()

    loss().backward()
    wanted = take_gradients(one)
    # Lists that a hook reads are compared.
    waiting, runs = deque(), deque()
    with ThreadPoolExecutor(1) as threads:

        def hook(module, args, output):
            if waiting:
                runs.append(threads.submit(waiting.pop().backward))
                runs[0].exception()

        other.model.layers[0].mlp.register_forward_hook(hook)
        scorer.score(group())
        waiting.append(loss())
        scorer.score(group())
    assert runs[0].exception() is None
    assert distance(take_gradients(one), wanted) == 0.0


@pytest.mark.parametrize("kind", REPLACED)
def test_nothing_is_checked_again(kind, runtime):
    model_of, replaced = REPLACED[kind]
    one, other = model_of(), model_of()
    shared = SharedPrefix(one.eval(), runtime)
    first = shared.score(group()).checked
    with replaced(other):
        checked, beside = on_another_thread(
            lambda: (shared.score(group()).checked, Fingerprint(one))
        )
        assert checked is first and beside.matches()
    assert shared.score(group()).checked is first and beside.matches()


@pytest.mark.parametrize("kind", REPLACED)
def test_what_a_trainer_replaces_meanwhile_is_seen(kind, monkeypatch):
    model_of, replaced = REPLACED[kind]
    one, other = model_of(), model_of()
    fingerprint = Fingerprint(one)
    with replaced(other):
        volatile = fingerprint.volatile()
    assert volatile == frozenset()
    attention = next(m for m in one.modules() if type(m).__name__.endswith("Attention"))
    with replaced(other):
        monkeypatch.setattr(type(attention), "forward", lambda self: None)
        assert not fingerprint.matches()
        assert fingerprint.difference() == f"{type(attention).__name__}.forward changed"
