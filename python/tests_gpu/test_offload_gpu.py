"""dormouse.offload on a GPU: saved activations sleep in place and come back unchanged, in the order
of the stream that reads them.

Kernels do nothing on the stand-in; the bytes of what sleeps are put there by copies.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from alone import alone
from conftest import settled
from test_shared_prefix_gpu import Watch, model_and_group

import dormouse

# Imported by each test; the test run itself needs none of them.
BEFORE_FORK = ("models", "dormouse.hf")

LAYERS = 7


def model_and_ids(**changes):
    model, group = model_and_group(num_hidden_layers=LAYERS, **changes)
    return model.train(), group.prompt[None].cuda()


def loss_of(model, ids, **options):
    return model(input_ids=ids, labels=ids, use_cache=False, **options).loss


def step_asleep() -> dormouse.OffloadReport:
    runtime = dormouse.install().runtime
    model, ids = model_and_ids()
    watch = Watch(runtime)
    with dormouse.offload(model) as off:
        loss = loss_of(model, ids)
        watch.wait_until_asleep()
        loss.backward()
    assert watch.bytes() > 8 << 20
    assert watch.checked == watch.wanted.keys(), "some were never woken for their layer"
    report = off.report()
    assert report.way == "in place"
    assert report.prefix["dormant_bytes"] >= watch.bytes()
    assert report.asleep_bytes == report.prefix["dormant_bytes"]
    assert report.prefix["left_asleep_bytes"] == 0
    assert all(p.grad is None or p.grad.is_cuda for p in model.parameters())
    return report


@alone()
def test_a_step_sleeps_and_wakes_unchanged():
    assert step_asleep().asleep_share >= 0.9


@alone()
def test_on_a_stream_of_its_own():
    dormouse.install()
    with torch.cuda.stream(torch.cuda.Stream()):
        step_asleep()


@alone()
def test_a_layer_that_reads_on_two_streams():
    """What is woken for one stream is ordered before what the other one reads."""
    runtime = dormouse.install().runtime
    model, ids = model_and_ids()
    side = torch.cuda.Stream()
    mlps = [layer.mlp for layer in model.model.layers]

    def on_side(forward):
        def run(x):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = forward(x)
            torch.cuda.current_stream().wait_stream(side)
            out.record_stream(torch.cuda.current_stream())
            return out

        return run

    for mlp in mlps:
        mlp.forward = on_side(mlp.forward)
    waits, wait_stream = [], torch.cuda.Stream.wait_stream

    def counted(self, other):
        waits.append((self, other))
        wait_stream(self, other)

    watch = Watch(runtime)
    with dormouse.offload(model, runtime) as off:
        loss = loss_of(model, ids)
        watch.wait_until_asleep()
        torch.cuda.Stream.wait_stream = counted
        loss.backward()
        torch.cuda.Stream.wait_stream = wait_stream
    assert watch.checked == watch.wanted.keys()
    assert off.report().asleep_bytes > 8 << 20
    # Of each layer the main stream reads what the side one has woken.
    assert len([pair for pair in waits if pair[1] == side]) >= LAYERS - 1


@alone()
def test_a_loss_of_a_layer_in_the_middle_first():
    """Its backward leaves out the layers above, which the second one reads."""
    runtime = dormouse.install().runtime
    model, ids = model_and_ids()
    early = []
    model.model.layers[1].register_forward_hook(lambda module, args, out: early.append(out))
    watch = Watch(runtime)
    with dormouse.offload(model, runtime):
        loss = loss_of(model, ids)
        aside = early.pop().square().mean()
        watch.wait_until_asleep()
        aside.backward(retain_graph=True)
        loss.backward()
    assert watch.bytes() > 8 << 20
    assert watch.checked == watch.wanted.keys(), "some were never woken for their layer"


@alone()
def test_outputs_that_the_trainer_holds_stay_awake():
    runtime = dormouse.install().runtime
    model, ids = model_and_ids()
    with dormouse.offload(model, runtime):
        out = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
        roles = [runtime.query(each.data_ptr())["role"] for each in out.hidden_states]
        loss = out.loss
        del out
        loss.backward()
    assert set(roles) == {"none"}


@alone()
def test_many_steps_leave_nothing_behind():
    runtime = dormouse.install().runtime
    model, ids = model_and_ids()
    allocated = []
    with dormouse.offload(model, runtime):
        for _ in range(4):
            loss_of(model, ids).backward()
            model.zero_grad(set_to_none=True)
            # Without a backward.
            loss_of(model, ids)
            gc.collect()
            torch.cuda.synchronize()
            stats = settled(runtime)
            assert stats["asleep"]["current_bytes"] == 0
            assert stats["tiers"]["host"]["current_bytes"] == 0
            allocated.append(stats["allocated"]["current_bytes"])
    assert len(set(allocated[1:])) == 1


@alone()
def test_a_backward_inside_the_forward_is_refused():
    runtime = dormouse.install().runtime
    model, ids = model_and_ids()

    def penalty(module, args, output):
        torch.autograd.grad(output[0].sum(), model.model.embed_tokens.weight, retain_graph=True)

    model.model.layers[LAYERS - 1].register_forward_hook(penalty)
    with (
        dormouse.offload(model, runtime),
        pytest.raises(dormouse.StateError, match="a backward inside the forward"),
    ):
        loss_of(model, ids)


@alone()
def test_another_model_after_an_error_that_was_caught_inside():
    runtime = dormouse.install().runtime
    model, ids = model_and_ids()
    other, _ = model_and_ids()

    def broken(module, args, output):
        raise ZeroDivisionError("a bug in a layer")

    model.model.layers[4].mlp.register_forward_hook(broken)
    with dormouse.offload(model, runtime):
        with contextlib.suppress(ZeroDivisionError):
            loss_of(model, ids)
        loss_of(other, ids).backward()


@alone()
def test_without_the_allocator_saved_tensors_are_copied():
    dormouse.install(mode="copy")
    model, ids = model_and_ids()
    with dormouse.offload(model) as off:
        loss_of(model, ids).backward()
    report = off.report()
    assert (report.way, report.forwards) == ("by copy", 1)
    assert report.asleep_bytes > 0
