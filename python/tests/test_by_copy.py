"""Saved tensors that wait outside: the same gradients bit for bit, and every copy let go."""

from __future__ import annotations

import gc

import pytest
import torch
from models import dense_backward, group, loss_fn, take_gradients, tiny

from dormouse.doors.by_copy import ByCopy

ROWS = 64


def stashed_bytes(runtime) -> int:
    tiers = runtime.stats()["tiers"]
    return tiers["host"]["current_bytes"] + tiers["nvme"]["current_bytes"]


def square(runtime, make):
    """Gradient of a leaf through ``make(leaf)``, with and without copies."""
    results = []
    for hooked in (False, True):
        leaf = torch.linspace(-1, 1, ROWS * ROWS, requires_grad=True)
        by_copy = ByCopy(runtime, min_bytes=0)
        if hooked:
            with by_copy.hooks():
                out = make(leaf.view(ROWS, ROWS))
        else:
            out = make(leaf.view(ROWS, ROWS))
        out.sum().backward()
        results.append(leaf.grad)
    return results


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (2 * x) * (3 * x),
        lambda x: (2 * x).t() @ (3 * x)[:, 5:],
        lambda x: (x[:1] * 2).expand(ROWS, ROWS) * (3 * x),
        lambda x: (2 * x).pow(2) + (2 * x).exp(),
        lambda x: torch.nn.functional.softmax(2 * x, -1)[::3, ::2].cumprod(-1),
        # Saved as views that say "conjugated" and "negated" beside where their elements lie.
        lambda x: (torch.complex(2 * x, 3 * x).conj() * torch.complex(x, x)).real,
        lambda x: torch.complex(2 * x, 3 * x).conj().imag * (5 * x),
    ],
)
def test_gradients_are_the_same_bits(runtime, make):
    awake, copied = square(runtime, make)
    assert torch.equal(awake, copied)


def test_a_model_and_its_parameters(runtime):
    model, case = tiny(dtype=torch.float32), group()
    dense_backward(model, case)
    awake = take_gradients(model)
    waiting = []
    for keep in ([*model.parameters(), *model.buffers()], []):
        before = stashed_bytes(runtime)

        def loss(logits, labels, i, before=before):
            if i == 0:
                waiting.append(stashed_bytes(runtime) - before)
            return loss_fn(logits, labels, i)

        with ByCopy(runtime, keep, min_bytes=1).hooks():
            dense_backward(model, case, loss)
        copied = take_gradients(model)
        assert awake.keys() == copied.keys()
        assert all(torch.equal(awake[name], copied[name]) for name in awake)
    without_weights, with_weights = waiting
    layers = sum(p.nbytes for p in model.model.layers.parameters() if p.dim() > 1)
    assert 0 < without_weights <= with_weights - layers


def test_one_storage_is_one_copy_and_comes_back_as_one(runtime):
    before = stashed_bytes(runtime)
    leaf = torch.ones(1 << 16, requires_grad=True)
    storage_bytes = leaf.untyped_storage().nbytes()
    with ByCopy(runtime, min_bytes=0).hooks():
        doubled = leaf * 2
        out = [doubled.view(256, 256).t().exp2().sum(), (doubled[::2] * doubled[1::2]).sum()]
        # exp2 saves its result as well; the product's two halves are one storage.
        assert stashed_bytes(runtime) - before == 2 * storage_bytes
    node = out[1].grad_fn.next_functions[0][0]
    first, second = node._saved_self, node._saved_other
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.stride() == second.stride() == (2,)
    assert {first.storage_offset(), second.storage_offset()} == {0, 1}
    del node, first, second, out, doubled
    gc.collect()
    assert stashed_bytes(runtime) == before


def test_a_change_after_saving_does_not_reach_the_copy(runtime):
    leaf = torch.full((1 << 12,), 3.0, requires_grad=True)
    with ByCopy(runtime, min_bytes=0).hooks():
        doubled = leaf * 2
        first = doubled * doubled
        doubled.add_(1)
        second = doubled * doubled
    first.sum().backward(retain_graph=True)
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2 * 6.0 * 2))
    leaf.grad = None
    second.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2 * 7.0 * 2))


def test_a_change_of_what_stays_is_an_error(runtime):
    leaf = torch.ones(8, requires_grad=True)
    with ByCopy(runtime, min_bytes=1 << 20).hooks():
        doubled = leaf * 2
        out = (doubled * doubled).sum()
    doubled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*version 1.*at 0"):
        out.backward()


def test_what_the_tiers_have_no_room_for_stays(runtime):
    info = runtime.info()
    runtime.set_budget("host", 1)
    runtime.set_budget("nvme", 0)
    try:
        awake, copied = square(runtime, lambda x: (2 * x) * (3 * x))
    finally:
        runtime.set_budget("host", info["host_budget_bytes"])
        runtime.set_budget("nvme", info["nvme_file_bytes"])
    assert torch.equal(awake, copied)


def test_a_graph_can_be_walked_twice(runtime):
    leaf = torch.linspace(0, 1, 1 << 12, requires_grad=True)
    with ByCopy(runtime, min_bytes=0).hooks():
        out = (leaf * 2).pow(3).sum()
    out.backward(retain_graph=True)
    first, leaf.grad = leaf.grad, None
    out.backward()
    assert torch.equal(first, leaf.grad)
