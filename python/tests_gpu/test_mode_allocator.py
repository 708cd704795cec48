"""Mode allocator: torch's tensors are dormouse's memory, in stream order, and sleep in place."""

from __future__ import annotations

import ctypes

import pytest
import torch
from alone import alone
from conftest import LATE_MS, alike, busy, random_bytes, reuse_after

import dormouse
from dormouse import _native as native

MIB = 1 << 20


def block_of(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Begin and length of dormouse's block around a tensor; None where it is not dormouse's."""
    length = ctypes.c_size_t()
    begin = native.library().dormouse_torch_get_base(tensor.data_ptr(), ctypes.byref(length))
    return begin, length.value


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


@alone()
def test_tensors_are_ours_and_their_bytes_are_right():
    dormouse.install()
    data = random_bytes(3 * MIB + 5)
    device = data.cuda()
    begin, length = block_of(device[MIB:])
    assert begin == device.data_ptr()
    assert length >= device.nbytes
    assert device.data_ptr() % 512 == 0
    assert torch.equal(device.cpu(), data)
    assert torch.equal(device.clone().view(-1)[7:].cpu(), data[7:])
    assert block_of(data) == (None, 0)
    again = torch.empty_like(device)
    del device
    pinned = random_bytes(3 * MIB + 5, pinned=True, seed=1)
    again.copy_(pinned, non_blocking=True)
    assert torch.equal(again.cpu(), pinned)


@alone()
def test_a_free_block_is_reused_on_its_stream():
    dormouse.install()
    assert reuse_after(torch.cuda.Stream(), recorded=False) == (True, False)


@alone()
def test_a_recorded_block_is_reused_when_the_stream_is_done():
    dormouse.install()
    assert reuse_after(torch.cuda.Stream(), recorded=True) == (False, True)


@alone()
def test_memory_still_read_on_another_stream_keeps_its_bytes():
    """Allocated on one stream, read late on another, freed, and allocated and written again."""
    dormouse.install()
    data, other = random_bytes(8 * MIB, pinned=True), random_bytes(8 * MIB, pinned=True, seed=1)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    seen = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(one):
        device = data.to("cuda", non_blocking=True)
    two.wait_stream(one)
    with torch.cuda.stream(two):
        busy(LATE_MS)
        seen.copy_(device, non_blocking=True)
        device.record_stream(two)
    del device
    with torch.cuda.stream(one):
        written = other.to("cuda", non_blocking=True)
    one.synchronize()
    assert not two.query(), "the reader was not late enough"
    two.synchronize()
    assert torch.equal(seen, data)
    assert torch.equal(written.cpu(), other)


@alone()
def test_memory_freed_on_one_stream_is_not_another_streams_too_early():
    """Freed with work on it under way on its own stream; another stream allocates and writes."""
    dormouse.install()
    data, other = random_bytes(8 * MIB, pinned=True), random_bytes(8 * MIB, pinned=True, seed=1)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    seen = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(one):
        device = data.to("cuda", non_blocking=True)
        busy(LATE_MS)
        seen.copy_(device, non_blocking=True)
        del device
    with torch.cuda.stream(two):
        written = other.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(seen, data)
    assert torch.equal(written.cpu(), other)


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_running_out_is_torchs_error_and_training_goes_on():
    dormouse.install()
    data = random_bytes(20 * MIB)
    held = []
    with pytest.raises(torch.OutOfMemoryError) as caught:
        while len(held) < 100:
            held.append(data.cuda())
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate"), text
    assert "dormouse may use" in text
    assert "tried:" in text
    assert 8 <= len(held) <= 12
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    held.pop()
    held.append(data.cuda())
    assert all(torch.equal(each.cpu(), data) for each in held)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_stats()["num_ooms"] == 2


@alone()
def test_the_cache_goes_back_when_it_is_emptied():
    dormouse.install()
    torch.cuda.init()
    before = free_bytes()
    device = random_bytes(30 * MIB).cuda()
    assert alike(free_bytes(), before - 30 * MIB)
    del device
    assert alike(free_bytes(), before - 30 * MIB), "freed blocks stay mapped"
    torch.cuda.empty_cache()
    assert alike(free_bytes(), before)
    assert torch.cuda.memory_reserved() == 0


@alone()
def test_more_streams_than_torch_makes_itself():
    dormouse.install()
    shared = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    runtime = ctypes.CDLL("libcudart.so.13")
    for _ in range(200):
        handle = ctypes.c_void_p()
        assert runtime.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
        stream = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(stream):
            for length in (1000, 5 * MIB):
                torch.empty(length, dtype=torch.uint8, device="cuda")
        shared.record_stream(stream)
    del shared
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 3 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


@alone()
def test_a_fraction_of_the_memory_is_a_budget():
    dormouse.install()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(64 * MIB / total)
    held = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(120 * MIB, dtype=torch.uint8, device="cuda")


@alone()
def test_a_gradient_accumulator_is_a_tensor_of_the_device():
    runtime = dormouse.install().runtime
    for dtype, kind in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        with dormouse.Prefix(runtime, None, 1) as node:
            node.enter(native.Phase.A)
            node.mark(native.Edge.FORWARD_BEGIN, 0)
            key = torch.zeros(1000, dtype=dtype, device="cuda")
            node.boundary(0, 0, key.data_ptr(), key.nbytes, key.numel(), key.dtype)
            gradient = node.gradient(0, 0)
            assert (gradient.device, gradient.dtype) == (key.device, kind)
            assert gradient.shape == (1000,)
            assert not gradient.cpu().any()
            data = random_bytes(1000).to(kind)
            gradient.copy_(data)
            assert torch.equal(node.gradient(0, 0).cpu(), data), "it is the memory itself"
            assert block_of(gradient)[0] is not None
            node.mark(native.Edge.FORWARD_END, 0)
            del gradient
