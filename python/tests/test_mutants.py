"""The four mistakes that must be seen (docs/method.md §10), made on purpose.

Each mutant breaks one thing. The comparison that the real code passes must fail on it, and the
check of the model must refuse the step.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny
from test_sleep import identical, long_group, step, wide

import dormouse
from dormouse import _native as native
from dormouse.hf import SharedPrefix, UnsupportedModelError, Way, mixers
from dormouse.hf import step as step_module

FP64_BOUND = 1e-10


def error(runtime) -> float:
    """Distance of the shared gradients from the dense ones, weights far from 1."""
    model, case = tiny(), group()
    dense_backward(model, case)
    dense = take_gradients(model)
    SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=8)
    return distance(take_gradients(model), dense)


def is_seen(runtime, monkeypatch) -> bool:
    """Whether the check refuses the step, and the comparison fails without the check."""
    # A response alone needs less of what is broken.
    monkeypatch.setattr(mixers, "ways_of", lambda view: [Way.PARTS])
    with pytest.raises(UnsupportedModelError, match="not exact.*differs from the dense run"):
        SharedPrefix(tiny(), runtime).check()
    monkeypatch.setattr(SharedPrefix, "_check_if_needed", lambda *_: None)
    return error(runtime) > 1e3 * FP64_BOUND


def test_unmutated(runtime):
    assert error(runtime) <= FP64_BOUND


def test_dropped_boundary_gradients(runtime, monkeypatch):
    monkeypatch.setattr(dormouse.Prefix, "accumulate", lambda self, layer, slot, grad: None)
    assert is_seen(runtime, monkeypatch)


def test_one_dropped_boundary_gradient(runtime, monkeypatch):
    real = dormouse.Prefix.accumulate

    def accumulate(self, layer, slot, grad):
        if (layer, slot) != (2, 1):
            real(self, layer, slot, grad)

    monkeypatch.setattr(dormouse.Prefix, "accumulate", accumulate)
    assert is_seen(runtime, monkeypatch)


def test_lost_first_response_token(runtime):
    """The row that predicts each response's first token goes without loss."""
    model, case = tiny(), group()
    dense_backward(model, case)
    dense = take_gradients(model)

    def without_first(logits, labels, i):
        if len(labels) == 1:
            return logits.sum() * 0
        kept = torch.nn.functional.cross_entropy(logits[1:], labels[1:], reduction="sum")
        return kept / len(labels) * (1 + 0.3 * i)

    SharedPrefix(model, runtime).backward(case, without_first, microbatch_tokens=8)
    assert distance(take_gradients(model), dense) > 1e3 * FP64_BOUND


def test_last_prompt_token_in_prefix_and_suffix(runtime, monkeypatch):
    real = step_module.pack_members

    def pack(batch, members):
        own = real(batch, members)
        return own._replace(positions=own.positions + 1)

    monkeypatch.setattr(step_module, "pack_members", pack)
    assert is_seen(runtime, monkeypatch)


def test_weight_applied_twice(runtime, monkeypatch):
    real = dormouse.Prefix.gradient

    def gradient(self, layer, slot):
        return real(self, layer, slot) * 0.5

    monkeypatch.setattr(dormouse.Prefix, "gradient", gradient)
    assert is_seen(runtime, monkeypatch)


def test_a_sleeping_tensor_that_comes_back_changed(runtime, monkeypatch):
    """One element of one dormant tensor is changed after its layer woke."""
    monkeypatch.setattr(SharedPrefix, "_check_if_needed", lambda *_: None)
    model, case = wide(), long_group()
    awake, _ = step(model, runtime, case, sleep=False)
    named: dict[int, list[int]] = {}
    real_dormant, real_mark = dormouse.Prefix.dormant, dormouse.Prefix.mark

    def dormant(self, layer, addresses):
        named.setdefault(layer, []).extend(addresses)
        real_dormant(self, layer, addresses)

    def mark(self, edge, layer):
        real_mark(self, edge, layer)
        if edge is native.Edge.BACKWARD_BEGIN and layer == 1:
            # The layer's own blocks: named, dormant, and awake again since this mark.
            for address in named[layer]:
                try:
                    info = self._runtime.query(address)
                except dormouse.DormouseError:
                    continue
                if info["role"] == "dormant" and info["layer"] == layer:
                    value = ctypes.c_float.from_address(address + 4096)
                    value.value += 1.0
                    return
            pytest.fail("no dormant block of layer 1 was found")

    monkeypatch.setattr(dormouse.Prefix, "dormant", dormant)
    monkeypatch.setattr(dormouse.Prefix, "mark", mark)
    changed, _ = step(model, runtime, case, sleep=True)
    assert not identical(changed, awake)
