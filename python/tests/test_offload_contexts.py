"""Contexts of dormouse.offload: several at a time, left by an error, and copies of their models."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import NVME_DIR
from test_offload import LAYERS, WAYS, gradients, left, rows, same, seeded, share, step

import dormouse


@WAYS
def test_two_models_in_two_contexts(runtime, in_place):
    actor, critic = seeded(), seeded()

    def both():
        torch.manual_seed(3)
        (actor(rows()) - critic(rows(4))).square().mean().backward()
        return [*gradients(actor), *gradients(critic)]

    plain = both()
    with (
        dormouse.offload(actor, runtime, in_place=in_place) as a,
        dormouse.offload(critic, runtime, in_place=in_place) as c,
    ):
        assert same(both(), plain)
    for report in (a.report(), c.report()):
        assert (report.forwards, report.layer_calls) == (1, LAYERS)
        assert share(report) >= 0.8
        assert report.stray_wakes == 0
    assert left(runtime) == 0


@WAYS
def test_an_error_between_forward_and_backward_leaves_nothing(runtime, in_place):
    model = seeded()
    plain = step(model)

    def broken(out):
        raise ZeroDivisionError("a bug in the trainer's loss")

    with dormouse.offload(model, runtime, in_place=in_place) as off:
        with pytest.raises(ZeroDivisionError):
            step(model, between=broken)
        assert same(step(model), plain)
        assert left(runtime) == 0
        model.blocks[4].drop.register_forward_hook(broken_hook := _raise_once())
        with pytest.raises(ZeroDivisionError):
            step(model)
        assert broken_hook.calls == 1
        assert same(step(model), plain)
        assert left(runtime) == 0
    with pytest.raises(ZeroDivisionError), dormouse.offload(model, runtime, in_place=in_place):
        step(model, between=broken)
    with off:
        assert same(step(model), plain)
    assert share(off.report()) >= 0.8
    assert left(runtime) == 0


@WAYS
def test_an_error_in_a_layer_that_is_caught_inside(runtime, in_place):
    """Else the forward would have what another model saves afterwards."""
    model, other = seeded(), seeded()
    with torch.random.fork_rng():
        plain = step(other)
    model.blocks[4].drop.register_forward_hook(_raise_once())
    with dormouse.offload(model, runtime, in_place=in_place) as off:
        try:
            step(model)
        except ZeroDivisionError:
            assert off._pass is None and off._layer is None
        assert same(step(other), plain)
    assert off.report().layer_calls == 5
    assert left(runtime) == 0


@WAYS
def test_copies_of_a_model_in_its_context_have_no_part_in_it(runtime, in_place, tmp_path):
    """A reference model, or one of averages, outlives the context and the model."""
    model = seeded()
    plain = step(model)
    with dormouse.offload(model, runtime, in_place=in_place) as off:
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert same(step(twin), plain) and same(step(loaded), plain)
        assert off._pass is None and off.report().forwards == 0
        assert same(step(model), plain)
    assert same(step(twin), plain)
    assert off.report().forwards == 1
    gone = weakref.ref(model)
    del off, model
    gc.collect()
    assert gone() is None


def _raise_once():
    def hook(module, args, output):
        hook.calls += 1
        if hook.calls == 1:
            raise ZeroDivisionError("a bug in a layer")

    hook.calls = 0
    return hook


def test_an_interrupt_in_a_layer(runtime):
    """Hooks after the layer do not run: the next forward, or the context's end, cleans up."""
    model = seeded()
    plain = step(model)
    interrupts = [KeyboardInterrupt()]

    def interrupt(module, args, output):
        if interrupts:
            raise interrupts.pop()

    model.blocks[4].drop.register_forward_hook(interrupt)
    with dormouse.offload(model, runtime) as off:
        with pytest.raises(KeyboardInterrupt):
            step(model)
        assert same(step(model), plain)
    assert off.report().layer_calls == LAYERS
    assert share(off.report()) >= 0.9
    interrupts.append(KeyboardInterrupt())
    with off, pytest.raises(KeyboardInterrupt):
        step(model)
    # Else what this thread allocates from here on would be the layer's.
    assert off._pass is None
    assert left(runtime) == 0


BACKWARD_OUTSIDE = """
import sys
sys.path.insert(0, TESTS)
import dormouse
from test_offload import rows, seeded

with dormouse.Runtime(nvme_dir=DIR, nvme_file_bytes=256 << 20) as runtime:
    model = seeded()
    off = dormouse.offload(model, runtime, in_place=IN_PLACE)
    for _ in range(2):
        with off:
            loss = model(rows()).square().mean()
        loss.backward()
assert off.report().forwards == 2
"""


@WAYS
def test_a_runtime_closes_when_backwards_are_over(in_place):
    places = {"DIR": str(NVME_DIR), "TESTS": str(Path(__file__).parent), "IN_PLACE": in_place}
    head = "".join(f"{name} = {value!r}\n" for name, value in places.items())
    told = subprocess.run(
        [sys.executable, "-c", head + BACKWARD_OUTSIDE], capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr
