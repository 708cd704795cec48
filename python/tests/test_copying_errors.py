"""By-copy hooks where something goes wrong: the same errors as without, and nothing kept."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
import torch
from conftest import a_runtime
from hooked import STORAGE_BYTES, alone, gradient, matrix, moved, stashed_bytes
from test_sleep import nvme_fd

import dormouse
from dormouse import _native as native
from dormouse.modes.copying import SavedTensorOffload

VERSIONS = r"modified by an inplace operation.* is at version (\d+); expected version (\d+)"


def version_error(step, hooks) -> tuple[str, ...]:
    """The versions in the error that ``step`` must raise."""
    with pytest.raises(RuntimeError, match=VERSIONS) as caught:
        step(hooks)
    assert caught.type is RuntimeError, "torch's own, not one of ours"
    return re.search(VERSIONS, str(caught.value), re.DOTALL).groups()


def changed(change):
    """A step that changes a tensor between the operation that saved it and its backward."""

    def step(hooks):
        leaf = matrix()
        with hooks:
            doubled = leaf * 2
            out = (doubled * doubled.t()).sum()
            change(doubled)
        out.backward()

    return step


def twice(tensor):
    tensor.mul_(2)
    tensor.t()[3:].add_(1)


def changed_in_backward(hooks):
    """Backward itself changes what it got; that is seen when the graph is walked again."""

    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.mul_(2)

    leaf = matrix()
    with hooks:
        out = Changes.apply(leaf * 2).sum()
    out.backward(retain_graph=True)
    assert torch.equal(leaf.grad, 8 * leaf.detach())
    out.backward()


CHANGES = {
    "once": changed(lambda a: a.add_(1)),
    "twice, once through a view": changed(twice),
    "through an alias without history": changed(lambda a: a.detach().zero_()),
    "in backward": changed_in_backward,
}


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_save_is_the_error_it_is_without_hooks(runtime, name, min_bytes):
    before, step = stashed_bytes(runtime), CHANGES[name]
    offload = SavedTensorOffload(runtime, min_bytes=min_bytes)
    with moved(runtime) as seen:
        versions = version_error(step, offload.hooks())
    assert (seen.out > 0) == (min_bytes == 0)
    assert versions == version_error(step, torch.enable_grad())
    assert stashed_bytes(runtime) == before


def test_a_parameter_changed_before_backward_is_an_error(runtime):
    def step(hooks):
        weight = torch.nn.Parameter(matrix().detach())
        with hooks:
            out = torch.nn.functional.linear(2 * matrix(), weight).sum()
        with torch.no_grad():
            weight.add_(1)
        out.backward()

    hooked = version_error(step, SavedTensorOffload(runtime, min_bytes=0).hooks())
    assert hooked == version_error(step, torch.enable_grad())


def test_a_change_between_two_saves_makes_two_copies(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks(), moved(runtime) as seen:
        doubled = leaf * 2
        first = (doubled * doubled).sum()
        doubled.add_(1)
        second = (doubled * doubled).sum()
        del doubled
    assert seen.out == 2 * STORAGE_BYTES
    second.backward()
    assert torch.equal(leaf.grad, gradient(lambda x: (lambda a: a * a)((x * 2).add_(1))))
    with pytest.raises(RuntimeError, match=VERSIONS):
        first.backward()


def test_a_change_is_seen_through_an_alias_that_counts_its_own(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        doubled = leaf * 2
        first = doubled * doubled
        doubled.add_(1)
        second = leaf * doubled.data
        wanted = doubled.detach().clone()
        del doubled
    second.sum().backward()
    assert torch.equal(leaf.grad, wanted)
    del first


def test_a_change_before_the_save_is_none(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        out = (leaf * 2).add_(1).exp_().sin().sum()
    out.backward()
    assert torch.equal(leaf.grad, gradient(lambda x: (x * 2 + 1).exp().sin()))


class Breaks(torch.autograd.Function):
    """An operation with a bug in one direction."""

    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        ctx.save_for_backward(x)
        if where == "forward":
            raise ZeroDivisionError("a bug")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("where", ["forward", "between", "backward"])
def test_an_exception_lets_go_of_every_copy(runtime, where):
    before, offload = stashed_bytes(runtime), SavedTensorOffload(runtime, min_bytes=0)

    def step():
        out = matrix() * 2
        with offload.hooks():
            for _ in range(4):
                out = (3 * out).sin().exp()
            out = Breaks.apply(out, where).sum()
            assert stashed_bytes(runtime) >= before + 8 * STORAGE_BYTES
            if where == "between":
                raise ZeroDivisionError("a bug")
        out.backward()

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            step()
        assert stashed_bytes(runtime) == before

    def make(x):
        return (2 * x).sin()

    assert torch.equal(gradient(make, offload.hooks()), gradient(make))


def test_hooks_end_with_an_exception(runtime):
    with pytest.raises(ZeroDivisionError), SavedTensorOffload(runtime, min_bytes=0).hooks():
        raise ZeroDivisionError
    with moved(runtime) as seen:
        (2 * matrix()).sin()
    assert seen.out == 0


def test_graphs_that_are_never_walked_let_go(runtime):
    before, offload = stashed_bytes(runtime), SavedTensorOffload(runtime, min_bytes=0)
    for _ in range(20):
        with offload.hooks():
            out = (2 * matrix()).sin().exp().sum()
    assert stashed_bytes(runtime) == before + 2 * STORAGE_BYTES
    del out
    assert stashed_bytes(runtime) == before


def test_an_error_of_the_library_is_typed_and_lets_go(runtime, monkeypatch):
    before, real = stashed_bytes(runtime), native.call

    def call(name, *arguments):
        if name == "stash_put" and stashed_bytes(runtime) > before:
            raise native.from_status(-301, "the GPU has fallen off the bus")
        return real(name, *arguments)

    monkeypatch.setattr(native, "call", call)
    offload = SavedTensorOffload(runtime, min_bytes=0)
    with pytest.raises(dormouse.DeviceError, match="fallen off"), offload.hooks():
        (2 * matrix()).sin().exp()
    assert stashed_bytes(runtime) == before


def test_a_limit_of_the_library_keeps_tensors_where_they_are(runtime, monkeypatch):
    real = native.call

    def call(name, *arguments):
        if name == "stash_put":
            raise native.from_status(-204, "stashes: limit reached (1048576)")
        return real(name, *arguments)

    awake = gradient(lambda x: (2 * x).sin())
    monkeypatch.setattr(native, "call", call)
    hooks = SavedTensorOffload(runtime, min_bytes=0).hooks()
    assert torch.equal(gradient(lambda x: (2 * x).sin(), hooks), awake)


def test_a_runtime_does_not_end_under_a_graph(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        out = (2 * leaf).sin().sum()
    with pytest.raises(dormouse.StateError, match="1 stash id"):
        runtime.close()
    out.backward()
    assert torch.equal(leaf.grad, gradient(lambda x: (2 * x).sin()))


@alone
def test_tiers_without_room_keep_tensors_where_they_are():
    def make(x):
        return (2 * x).sin().exp()

    awake = gradient(make)
    with a_runtime(nvme_file_bytes=1 << 20) as runtime:
        runtime.set_budget("host", 0)
        runtime.set_budget("nvme", STORAGE_BYTES)
        with moved(runtime) as seen:
            assert torch.equal(
                gradient(make, SavedTensorOffload(runtime, min_bytes=0).hooks()), awake
            )
        assert seen.out == STORAGE_BYTES, "the first has room, the second stays"
        assert runtime.stats()["declined"] == 1


@alone
def test_a_disk_that_fills_in_the_middle_of_a_forward():
    awake = gradient(lambda x: (2 * x).sin().exp().tanh())
    with a_runtime() as runtime:
        runtime.set_budget("host", 0)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def make(x):
            first = (2 * x).sin()
            # Python ignores SIGXFSZ: a write beyond the limit fails.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            second = first.exp().tanh()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            return second

        offload = SavedTensorOffload(runtime, min_bytes=0)
        assert torch.equal(gradient(make, offload.hooks()), awake)
        assert runtime.stats()["copies"]["nvme_write"]["bytes"] == STORAGE_BYTES
        assert runtime.stats()["declined"] == 2
        # The tier stays closed, says so once, and the next step is right as well.
        assert torch.equal(gradient(make, offload.hooks()), awake)
        assert runtime.info()["unavailable_reason"].count("File too large") == 1
        assert runtime.stats()["tiers"]["nvme"]["current_bytes"] == 0


@alone
def test_bytes_that_changed_on_the_disk_are_an_error_in_backward():
    def flip(file):
        with Path(f"/proc/self/fd/{file}").open("r+b", buffering=0) as file:
            for offset in range(0, 1 << 20, 4096):
                byte = os.pread(file.fileno(), 1, offset)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), offset)

    with a_runtime() as runtime:
        runtime.set_budget("host", 0)
        leaf = matrix()
        with SavedTensorOffload(runtime, min_bytes=0).hooks():
            out = (2 * leaf).sin().sum()
        flip(nvme_fd())
        with pytest.raises(dormouse.StorageError, match="CRC"):
            out.backward(retain_graph=True)
        assert leaf.grad is None
        flip(nvme_fd())
        out.backward()
        assert torch.equal(leaf.grad, gradient(lambda x: (2 * x).sin()))
        del out
        assert stashed_bytes(runtime) == 0
