"""``dormouse.install()``: which door it takes, and what it says of the others."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from alone import alone

import dormouse
from dormouse import _native as native
from dormouse.doors import whole


def said(installed: dormouse.Installed, start: str) -> str:
    (sentence,) = [each for each in installed.why if each.startswith(start)]
    return sentence


@alone()
def test_before_cuda_is_used_the_whole_process():
    installed = dormouse.install()
    assert not torch.cuda.is_initialized(), "finding out must not close the door"
    assert installed.door == "A"
    assert installed.runtime.device == torch.device("cuda", 0)
    assert "torch's CUDA allocator" in installed.why[0]
    assert "own allocator" in said(installed, "door B is closed")
    assert "CPU's memory" in said(installed, "door host is closed")
    assert torch.cuda.memory.get_allocator_backend() == "pluggable"
    with pytest.raises(dormouse.StateError, match="need door B, and door A is open"):
        installed.pool("weights")


@alone()
def test_again_is_the_same_and_other_wishes_are_errors():
    installed = dormouse.install("cuda:0", window_layers=3)
    assert dormouse.install() is installed
    assert dormouse.install(0, door="A", window_layers=3) is installed
    for wish, seen in (
        ({"door": "B"}, "door='A' and was asked for 'B'"),
        ({"window_layers": 4}, "window_layers=3 and was asked for 4"),
        ({"io_threads": 2}, "io_threads=None and was asked for 2"),
        ({"device": "host"}, "device='cuda:0' and was asked for 'cpu'"),
    ):
        with pytest.raises(dormouse.StateError, match=seen):
            dormouse.install(**wish)


@alone()
def test_after_cuda_was_used_pools_or_copies():
    used = torch.zeros(1, device="cuda")
    with pytest.raises(dormouse.StateError, match="door A is closed: torch's CUDA was already"):
        dormouse.install(door="A")
    installed = dormouse.install()
    assert installed.door == "B"
    assert "before the first CUDA tensor" in said(installed, "door A is closed")
    assert said(installed, "copies need no door")
    assert torch.cuda.memory.get_allocator_backend() == "native"
    assert torch.cuda.memory_allocated() >= used.nbytes, "torch's own statistics are left alone"
    with installed.pool("weights").use(), installed.by_copy().hooks():
        pass


@alone()
def test_copies_where_they_are_asked_for():
    installed = dormouse.install(door="C")
    assert installed.door == "C"
    for door in "AB":
        assert said(installed, f"door {door} is open, and C was asked for")
    assert torch.cuda.memory.get_allocator_backend() == "native"
    with pytest.raises(dormouse.StateError, match="need door B, and door C is open"):
        installed.pool("weights")


@alone()
def test_doors_and_devices_that_do_not_exist():
    with pytest.raises(dormouse.ArgumentError, match="'D'; accepted: A, B, C, host"):
        dormouse.install(door="D")
    with pytest.raises(dormouse.DeviceError, match="CUDA device 7; torch finds 1"):
        dormouse.install(7)
    with pytest.raises(dormouse.ArgumentError, match="device meta"):
        dormouse.install("meta")
    with pytest.raises(dormouse.StateError, match="door host is closed"):
        dormouse.install(door="host")
    with pytest.raises(dormouse.StateError, match="door A is closed: it is for GPUs"):
        dormouse.install("host", door="A")
    assert dormouse.install().door == "A", "what was refused left nothing behind"


@contextlib.contextmanager
def interrupted(owner: object, name: str, *, behind: bool):
    """Ctrl-C before or behind a call, whose traceback, kept, keeps all that is being made."""
    real = getattr(owner, name)

    def call(*arguments):
        if behind:
            real(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(owner, name, call)
        yield kept


@alone(CUDA_VISIBLE_DEVICES="")
def test_an_interrupt_on_the_host_leaves_nothing_in_the_way():
    with interrupted(dormouse.Runtime, "info", behind=True) as _kept:
        dormouse.install()
    assert dormouse.install().door == "host"


@alone()
def test_an_interrupt_before_the_door_leaves_it_to_be_opened():
    with interrupted(whole, "enter", behind=False) as _kept:
        dormouse.install()
    assert torch.cuda.memory.get_allocator_backend() == "native"
    assert dormouse.install().door == "A"
    assert torch.ones(4).cuda().tolist() == [1.0] * 4


@alone()
def test_an_interrupt_behind_the_door_leaves_torch_with_what_serves_it():
    with interrupted(whole, "enter", behind=True) as _kept:
        dormouse.install()
    with pytest.raises(dormouse.StateError, match="door A is closed: torch was given"):
        dormouse.install(door="A")
    assert dormouse.install().door == "C"
    assert torch.ones(4).cuda().tolist() == [1.0] * 4
    assert dormouse.memory_stats()["allocated_bytes.all.peak"] > 0


@alone()
def test_another_ones_allocator_stays_torchs():
    torch.cuda.memory.change_current_allocator(whole.pluggable("torch_malloc"))
    installed = dormouse.install()
    assert installed.door == "C"
    assert "takes one only once" in said(installed, "door A is closed")
    assert "'pluggable'" in said(installed, "door B is closed")


@alone(CUDA_VISIBLE_DEVICES="")
def test_without_a_gpu_the_host():
    installed = dormouse.install()
    assert (installed.door, installed.runtime.device) == ("host", torch.device("cpu"))
    assert any("LD_PRELOAD=" in each and "preload.so" in each for each in installed.why)
    for door in "ABC":
        assert "for GPUs" in said(installed, f"door {door} is closed")
    with pytest.raises(dormouse.ArgumentError, match="device cpu; accepted: CUDA devices"):
        dormouse.memory_stats()
    leaf = torch.ones(1 << 12, requires_grad=True)
    with installed.by_copy(min_bytes=0).hooks():
        out = (leaf * 2).pow(2).sum()
    out.backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 8.0))


PRELOAD = native.library_path().with_name("libdormouse_preload.so")


@alone(CUDA_VISIBLE_DEVICES="", LD_PRELOAD=f"{os.environ.get('LD_PRELOAD', '')}:{PRELOAD}")
def test_without_a_gpu_the_processs_own_memory_sleeps_in_place():
    installed = dormouse.install()
    assert said(installed, "libdormouse_preload.so serves this process' malloc")
    data = torch.randint(0, 256, (6 << 20,), dtype=torch.uint8)
    weight = data.clone()
    with installed.runtime.tag("weights") as tag:
        tag.add(weight)
        assert tag.sleep("host") is None
        assert installed.runtime.query(weight.data_ptr())["state"] == "host"
        tag.wake()
    assert torch.equal(weight, data)


@alone()
def test_a_torch_without_record_stream_gets_no_allocator():
    class Old:
        """torch's allocator object, before it had hooks."""

    torch._C._CUDAPluggableAllocator = Old
    installed = dormouse.install()
    assert installed.door == "B"
    assert "has no set_record_stream_fn" in said(installed, "door A is closed")


@alone()
def test_a_torch_without_another_hook_is_told():
    whole.OPTIONAL_HOOKS["set_something_fn"] = ("torch_get_base", "something does nothing")
    installed = dormouse.install()
    assert installed.door == "A"
    assert "has no set_something_fn: something does nothing" in said(installed, "torch ")


def in_fork(check) -> None:
    """Runs ``check`` in a forked child, which must end well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@alone()
def test_a_forked_child_is_told():
    installed = dormouse.install()
    parent = os.getpid()

    def check():
        with pytest.raises(dormouse.StateError, match=f"process {parent}.*spawn"):
            dormouse.install()
        with pytest.raises(dormouse.StateError, match="fork"):
            dormouse.memory_stats()
        with pytest.raises(dormouse.StateError, match="fork"):
            installed.runtime.tag("weights")
        with pytest.raises(RuntimeError, match="fork"):
            torch.zeros(1, device="cuda")

    in_fork(check)
    torch.zeros(1, device="cuda")
    in_fork(check)
    assert dormouse.memory_stats()["allocated_bytes.all.current"] == 0
