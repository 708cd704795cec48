"""By-copy hooks: one storage, and who reads it, takes it for a gradient, or never asks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hooked import ROWS, STORAGE_BYTES, gradient, matrix, moved, stashed_bytes
from torch.multiprocessing.reductions import StorageWeakRef

from dormouse import _native as native
from dormouse.modes.copying import SavedTensorOffload


class Times(torch.autograd.Function):
    """``(left + right) * factor``. Its gradients are what it saved: a loss may make them so."""

    @staticmethod
    def forward(ctx, left, right, factor):
        ctx.save_for_backward(factor, factor)
        return (left * factor + right * factor).sum()

    @staticmethod
    def backward(ctx, grad):
        return *ctx.saved_tensors, None


def once(left, right, factor):
    return Times.apply(left, right, factor)


def by_two(left, right, factor):
    still = torch.zeros(ROWS, ROWS)
    return Times.apply(left, still, factor) + Times.apply(right, still, factor)


def leaves():
    return [torch.ones(ROWS, ROWS, requires_grad=True) for _ in range(2)]


def factor():
    return torch.full((ROWS, ROWS), 3.0)


@pytest.mark.parametrize("make", [once, by_two])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_saved_tensor_is_the_gradient_of_one(runtime, make, is_kept):
    """Two leaves have it for a gradient, and whoever made it: adding to one changes no other."""
    offload, (left, right), kept = SavedTensorOffload(runtime, min_bytes=0), leaves(), factor()
    for _ in range(3):
        with offload.hooks(), moved(runtime) as seen:
            out = make(left, right, kept if is_kept else factor())
        assert seen.out >= STORAGE_BYTES
        out.backward()
        del out
    assert torch.equal(left.grad, 3 * factor())
    assert torch.equal(right.grad, 3 * factor())
    assert torch.equal(kept, factor())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_gradient_is_not_what_a_graph_walked_again_reads(runtime, is_kept):
    (left, right), kept = leaves(), factor()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        out = once(left, right, kept if is_kept else factor())
    out.backward(retain_graph=True)
    for leaf in left, right:
        leaf.grad.data.zero_()
    out.backward()
    assert torch.equal(left.grad, factor())
    assert torch.equal(right.grad, factor())


@pytest.mark.parametrize("other", [torch.zeros_like, torch.t])
def test_what_was_given_other_memory_is_restored_as_it_was(runtime, other):
    (left, right), kept = leaves(), matrix().detach()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        out = once(left, right, kept)
    kept.data = other(kept.data)
    out.backward()
    assert torch.equal(left.grad, matrix())


def test_who_never_asks_holds_nothing(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        doubled = 2 * leaf
        out, other = doubled.sin().sum(), (doubled * doubled).sum()
        del doubled
    node = out.grad_fn.next_functions[0][0]
    storage = StorageWeakRef(node._saved_self.untyped_storage())
    assert not storage.expired(), "two more are to come"
    del other
    assert storage.expired()
    out.backward()
    assert torch.equal(leaf.grad, gradient(lambda x: (2 * x).sin()))


def test_aliases_saved_in_turn_are_copied_once_each(runtime):
    def step(hooks):
        leaf = matrix()
        with hooks:
            doubled = 2 * leaf
            alias = doubled.detach()
            outs = [leaf * each for _ in range(4) for each in (doubled, alias)]
        sum(out.sum() for out in outs).backward()
        return leaf.grad

    with moved(runtime) as seen:
        copied = step(SavedTensorOffload(runtime, min_bytes=0).hooks())
    assert seen.out == 2 * STORAGE_BYTES
    assert torch.equal(copied, step(contextlib.nullcontext()))


def test_an_interrupt_behind_a_copy_lets_go_of_it(runtime, monkeypatch):
    before, real = stashed_bytes(runtime), native.call

    def call(name, *arguments):
        status = real(name, *arguments)
        if name == "stash_put":
            raise KeyboardInterrupt
        return status

    monkeypatch.setattr(native, "call", call)
    hooks = SavedTensorOffload(runtime, min_bytes=0).hooks()
    with moved(runtime) as seen, pytest.raises(KeyboardInterrupt), hooks:
        (2 * matrix()).sin()
    assert seen.out == STORAGE_BYTES
    assert stashed_bytes(runtime) == before


def test_a_backward_in_inference_mode(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks(), moved(runtime) as seen:
        out = (2 * leaf).sin().sum()
    assert seen.out == STORAGE_BYTES
    with torch.inference_mode():
        out.backward()
    assert torch.equal(leaf.grad, gradient(lambda x: (2 * x).sin()))
