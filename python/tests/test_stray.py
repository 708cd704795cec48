"""Memory that is read where it sleeps wakes: the step goes on, and its report says so."""

from __future__ import annotations

import time

import pytest
import torch
from models import group, loss_fn, take_gradients, tiny

from dormouse.hf import SharedPrefix

PROMPT = 600
LAYER = 1
ASLEEP_WAIT_S = 60


def wide():
    return tiny(
        dtype=torch.float32,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        head_dim=32,
    )


def long_group():
    return group(PROMPT, (40, 24, 33, 8), seed=3)


class Keeper:
    """A hook that keeps what a layer computed for the prompt: autograd has saved it as well."""

    def __init__(self, model):
        module = model.model.layers[LAYER].mlp.down_proj
        self.handle = module.register_forward_pre_hook(self.keep)
        self.kept = self.copy = None

    def keep(self, module, args):
        # All of the prompt that is shared: its last token may belong to the responses.
        if args[0].numel() // args[0].shape[-1] in (PROMPT - 1, PROMPT):
            self.kept = args[0].detach()
            self.copy = self.kept.clone()


def asleep(runtime, address: int) -> None:
    deadline = time.monotonic() + ASLEEP_WAIT_S
    while runtime.query(address)["state"] != "nvme":
        assert time.monotonic() < deadline, runtime.query(address)
        time.sleep(0.001)


def gradients_without(case, runtime):
    model = wide()
    SharedPrefix(model, runtime, sleep=False).backward(case, loss_fn, microbatch_tokens=40)
    return take_gradients(model)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kept_activation_wakes_when_the_loss_reads_it(runtime, threads):
    model, case = wide(), long_group()
    keeper, reads = Keeper(model), []

    def loss(logits, labels, i):
        if keeper.kept is not None and not reads:
            asleep(runtime, keeper.kept.data_ptr())
            torch.set_num_threads(threads)
            reads.append(torch.equal(keeper.kept, keeper.copy))
            torch.set_num_threads(1)
        return loss_fn(logits, labels, i)

    before = runtime.stats()["stray_wakes"]
    shared = SharedPrefix(model, runtime)
    shared.check(case)
    report = shared.backward(case, loss, microbatch_tokens=40)
    assert reads == [True]
    assert report.prefix["stray_wakes"] == 1
    assert runtime.stats()["stray_wakes"] == before + 1
    first = report.prefix["first_stray"]
    assert first.startswith("read of 0x") and f"in layer {LAYER} of " in first, first
    assert report.prefix["stall_ns"] > 0
    gradients, expected = take_gradients(model), gradients_without(case, runtime)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in gradients)
    # The tensor outlives its prefix, awake.
    assert torch.equal(keeper.kept, keeper.copy)


def test_a_step_without_a_stray_access_reports_none(runtime):
    report = SharedPrefix(wide(), runtime).backward(long_group(), loss_fn, microbatch_tokens=40)
    assert report.prefix["stray_wakes"] == 0
    assert report.prefix["first_stray"] == ""
