"""``dormouse.install()``: which mode it selects, and why not the others."""

from __future__ import annotations

import contextlib
import os
import traceback

import pytest
import torch
from alone import alone
from conftest import IS_STANDIN

import dormouse
from dormouse import _native as native
from dormouse.modes import allocator


def said(installed: dormouse.Installed, start: str) -> str:
    (sentence,) = [each for each in installed.why if each.startswith(start)]
    return sentence


@alone()
def test_before_cuda_is_used_the_whole_process():
    installed = dormouse.install()
    assert not torch.cuda.is_initialized(), "finding out must not start CUDA"
    assert installed.mode == "allocator"
    assert installed.runtime.device == torch.device("cuda", 0)
    assert "torch's CUDA allocator" in installed.why[0]
    assert "own allocator" in said(installed, "mode pool is unavailable")
    assert "CPU memory" in said(installed, "mode host is unavailable")
    assert "LOCAL_RANK" in said(installed, "device cuda:0")
    assert torch.cuda.memory.get_allocator_backend() == "pluggable"
    with pytest.raises(
        dormouse.StateError, match="require mode pool; the installed mode is allocator"
    ):
        installed.pool("weights")


@alone()
def test_again_is_the_same_and_other_wishes_are_errors():
    installed = dormouse.install("cuda:0", window_layers=3)
    assert dormouse.install() is installed
    assert dormouse.install(0, mode="allocator", window_layers=3) is installed
    for wish, seen in (
        ({"mode": "pool"}, "mode='allocator', but 'pool' was requested"),
        ({"window_layers": 4}, "window_layers=3, but 4 was requested"),
        ({"io_threads": 2}, "io_threads=None, but 2 was requested"),
        ({"device": "host"}, "device='cuda:0', but 'cpu' was requested"),
    ):
        with pytest.raises(dormouse.StateError, match=seen):
            dormouse.install(**wish)


@alone()
def test_after_cuda_was_used_pools_or_copies():
    used = torch.zeros(1, device="cuda")
    with pytest.raises(
        dormouse.StateError, match="mode allocator is unavailable: torch's CUDA was already"
    ):
        dormouse.install(mode="allocator")
    installed = dormouse.install()
    assert installed.mode == "pool"
    assert "before the first CUDA tensor" in said(installed, "mode allocator is unavailable")
    assert said(installed, "Installed.saved_tensor_offload() works in every mode")
    assert torch.cuda.memory.get_allocator_backend() == "native"
    assert torch.cuda.memory_allocated() >= used.nbytes, "torch's own statistics are left alone"
    with installed.pool("weights").use(), installed.saved_tensor_offload().hooks():
        pass


@alone()
def test_copies_where_they_are_asked_for():
    installed = dormouse.install(mode="copy")
    assert installed.mode == "copy"
    for mode in ("allocator", "pool"):
        assert said(installed, f"mode {mode} is available; copy was requested")
    assert torch.cuda.memory.get_allocator_backend() == "native"
    with pytest.raises(dormouse.StateError, match="require mode pool; the installed mode is copy"):
        installed.pool("weights")


@alone()
def test_modes_and_devices_that_do_not_exist():
    with pytest.raises(dormouse.ArgumentError, match="'D'; accepted: allocator, pool, copy, host"):
        dormouse.install(mode="D")
    with pytest.raises(dormouse.DeviceError, match="CUDA device 7; torch finds 1"):
        dormouse.install(7)
    with pytest.raises(dormouse.ArgumentError, match="device meta"):
        dormouse.install("meta")
    with pytest.raises(dormouse.StateError, match="mode host is unavailable"):
        dormouse.install(mode="host")
    with pytest.raises(
        dormouse.StateError, match="mode allocator is unavailable: it manages GPU memory"
    ):
        dormouse.install("host", mode="allocator")
    assert dormouse.install().mode == "allocator", "what was refused left nothing behind"


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
    assert dormouse.install().mode == "host"


@alone()
def test_an_interrupt_before_activation_leaves_the_mode_available():
    with interrupted(allocator, "activate", behind=False) as _kept:
        dormouse.install()
    assert torch.cuda.memory.get_allocator_backend() == "native"
    assert dormouse.install().mode == "allocator"
    assert torch.ones(4).cuda().tolist() == [1.0] * 4


@alone()
def test_an_interrupt_after_activation_leaves_torch_with_a_working_allocator():
    with interrupted(allocator, "activate", behind=True) as _kept:
        dormouse.install()
    with pytest.raises(dormouse.StateError, match="mode allocator is unavailable: torch already"):
        dormouse.install(mode="allocator")
    assert dormouse.install().mode == "copy"
    assert torch.ones(4).cuda().tolist() == [1.0] * 4
    assert dormouse.memory_stats()["allocated_bytes.all.peak"] > 0


@alone()
def test_another_ones_allocator_stays_torchs():
    torch.cuda.memory.change_current_allocator(allocator.pluggable("torch_malloc", "torch_free"))
    installed = dormouse.install()
    assert installed.mode == "copy"
    assert "accepts one only once" in said(installed, "mode allocator is unavailable")
    assert "'pluggable'" in said(installed, "mode pool is unavailable")


@alone(CUDA_VISIBLE_DEVICES="")
def test_without_a_gpu_the_host():
    installed = dormouse.install()
    assert (installed.mode, installed.runtime.device) == ("host", torch.device("cpu"))
    assert any("LD_PRELOAD=" in each and "preload.so" in each for each in installed.why)
    for mode in ("allocator", "pool", "copy"):
        assert "manages GPU memory" in said(installed, f"mode {mode} is unavailable")
    with pytest.raises(dormouse.ArgumentError, match="device cpu; accepted: CUDA devices"):
        dormouse.memory_stats()
    leaf = torch.ones(1 << 12, requires_grad=True)
    with installed.saved_tensor_offload(min_bytes=0).hooks():
        out = (leaf * 2).pow(2).sum()
    out.backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 8.0))


PRELOAD = native.library_path().with_name("libdormouse_preload.so")


@alone(CUDA_VISIBLE_DEVICES="", LD_PRELOAD=f"{os.environ.get('LD_PRELOAD', '')}:{PRELOAD}")
def test_without_a_gpu_the_processs_own_memory_sleeps_in_place():
    installed = dormouse.install()
    assert said(installed, "libdormouse_preload.so serves malloc of this process")
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
    assert installed.mode == "pool"
    assert "has no set_record_stream_fn" in said(installed, "mode allocator is unavailable")


@alone()
def test_a_torch_without_another_hook_is_told():
    allocator.OPTIONAL_HOOKS["set_something_fn"] = ("torch_get_base", "something does nothing")
    installed = dormouse.install()
    assert installed.mode == "allocator"
    assert "has no set_something_fn: something does nothing" in said(installed, "torch ")


def in_fork(check) -> None:
    """Runs ``check`` in a forked child, which must end well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@alone()
def test_a_forked_child_is_told():
    installed = dormouse.install()
    parent = os.getpid()
    # A driver that the parent has used refuses the child before torch asks for memory.
    refused = "fork" if IS_STANDIN else "driver initialization failed|fork"

    def check():
        with pytest.raises(dormouse.StateError, match=f"process {parent}.*spawn"):
            dormouse.install()
        with pytest.raises(dormouse.StateError, match="fork"):
            dormouse.memory_stats()
        with pytest.raises(dormouse.StateError, match="fork"):
            installed.runtime.tag("weights")
        with pytest.raises(RuntimeError, match=refused):
            torch.zeros(1, device="cuda")

    in_fork(check)
    torch.zeros(1, device="cuda")
    in_fork(check)
    assert dormouse.memory_stats()["allocated_bytes.all.current"] == 0
