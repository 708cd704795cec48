"""Keyword arguments of the adapters' ``share()``, and what becomes of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import tiny
from test_nemo_rl import a_module
from test_openrlhf import StandInActor, a_batch, computed, copy_of
from test_trl import Trainer

import dormouse.nemo_rl
import dormouse.openrlhf
import dormouse.trainers.options
import dormouse.trl
from dormouse.hf import SharedPrefix
from dormouse.trainers import runtimes

REFUSED = {
    "temperature": (0.5, r"share\(\) got temperature; accepted: runtime, sleep, prompt_dropout, "),
    "graphs": ("once", "graphs is 'once'; accepted: 'auto', 'kept', 'twice'"),
    "microbatch_tokens": (0, "microbatch_tokens is 0; accepted: 1 and above, or None"),
    "sleep": ("no", "sleep is 'no'; accepted: True, False"),
    "prompt_dropout": (0, "prompt_dropout is 0; accepted: True, False"),
    "runtime": (SimpleNamespace(), "runtime is of SimpleNamespace; accepted: dormouse.Runtime"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("share", [dormouse.trl.share, dormouse.openrlhf.share])
def test_what_is_not_accepted_is_refused_before_a_batch(share, name):
    value, message = REFUSED[name]
    own = Trainer if share is dormouse.trl.share else copy_of(StandInActor)
    before = dict(vars(own))
    with pytest.raises(dormouse.ArgumentError, match=message):
        share(own, **{name: value})
    assert dict(vars(own)) == before


@pytest.mark.parametrize(
    ("gpus", "reason", "wanted"), [(1, None, "pool"), (1, "a reason", "copy"), (0, None, None)]
)
def test_torch_keeps_its_allocator_beside_ipc(gpus, reason, wanted, runtime, monkeypatch):
    modes = []

    def install(mode):
        modes.append(mode)
        return SimpleNamespace(runtime=runtime)

    monkeypatch.setattr(runtimes, "installed", lambda: None)
    monkeypatch.setattr(runtimes, "install", install)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(runtimes.pool, "unavailable_because", lambda: reason)
    dormouse.nemo_rl.share(a_module())
    assert modes == [wanted]


def test_what_is_installed_is_used_beside_ipc(runtime, monkeypatch):
    monkeypatch.setattr(runtimes, "installed", lambda: SimpleNamespace(runtime=runtime))
    assert runtimes.runtime_beside_ipc() is runtime


def test_what_is_accepted_reaches_the_model_and_its_scores(runtime, monkeypatch):
    seen = {}

    class Recorded(SharedPrefix):
        def __init__(self, *args, **named):
            seen.update(named)
            super().__init__(*args, **named)

        def score_packed(self, *args, **named):
            seen.update(named)
            return super().score_packed(*args, **named)

    monkeypatch.setattr(dormouse.trainers.options, "SharedPrefix", Recorded)
    given = {"sleep": False, "prompt_dropout": False, "microbatch_tokens": 7, "graphs": "twice"}
    shared_class = dormouse.openrlhf.share(copy_of(StandInActor), runtime=runtime, **given)
    computed(shared_class(tiny()), a_batch(), entropy=False)
    assert given.items() <= seen.items()
