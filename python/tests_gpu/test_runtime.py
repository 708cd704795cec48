"""The runtime's own calls: errors, and what torch never asks but others may."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from conftest import run_script, standin_only

INVALID_VALUE, INVALID_DIRECTION, INVALID_DEVICE, NOT_SUPPORTED = 1, 21, 101, 801
HOST_TO_DEVICE, NO_KIND = 1, 5

pytestmark = standin_only("the runtime's calls are looked up in the whole process")


@pytest.fixture(scope="module")
def runtime():
    library = ctypes.CDLL(None)
    library.cudaGetErrorName.restype = library.cudaGetErrorString.restype = ctypes.c_char_p
    yield library
    assert library.cudaGetLastError() == 0


def test_the_device_is_like_an_h200():
    device = torch.cuda.get_device_properties()
    assert (device.major, device.minor, device.multi_processor_count) == (9, 0, 132)
    assert (device.warp_size, device.max_threads_per_multi_processor) == (32, 2048)
    assert (device.shared_memory_per_block, device.regs_per_multiprocessor) == (48 << 10, 64 << 10)


def test_errors_have_the_names_of_the_real_runtime(runtime):
    assert runtime.cudaGetErrorName(2) == b"cudaErrorMemoryAllocation"
    assert runtime.cudaGetErrorString(2) == b"out of memory"
    assert runtime.cudaGetErrorName(12345) == b"unrecognized error code"


def test_an_error_is_the_threads_last_until_it_is_asked(runtime):
    assert runtime.cudaSetDevice(7) == INVALID_DEVICE
    other = []
    thread = threading.Thread(target=lambda: other.append(runtime.cudaPeekAtLastError()))
    thread.start()
    thread.join()
    assert other == [0]
    assert runtime.cudaPeekAtLastError() == INVALID_DEVICE
    assert runtime.cudaGetLastError() == INVALID_DEVICE
    assert runtime.cudaGetLastError() == 0


def test_nothing_is_no_error(runtime):
    pointer = ctypes.c_void_p(1)
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(0)) == 0
    assert pointer.value is None
    assert runtime.cudaFree(None) == 0
    assert runtime.cudaFreeHost(None) == 0
    assert runtime.cudaMemcpy(None, None, ctypes.c_size_t(0), HOST_TO_DEVICE) == 0
    assert runtime.cudaMemset(None, 0, ctypes.c_size_t(0)) == 0


def test_a_fill_is_of_bytes(runtime):
    """torch 2.11 fills by a kernel, later ones by this call."""
    device = torch.tensor(list(range(1, 65)), dtype=torch.uint8).cuda()
    begin, count = ctypes.c_void_p(device.data_ptr() + 8), ctypes.c_size_t(16)
    assert runtime.cudaMemset(begin, 7, count) == 0
    assert device.cpu().tolist() == [*range(1, 9), *[7] * 16, *range(25, 65)]


def test_a_kind_of_copy_that_is_none_is_refused(runtime):
    assert runtime.cudaMemcpy(None, None, ctypes.c_size_t(0), NO_KIND) == INVALID_DIRECTION
    assert runtime.cudaGetLastError() == INVALID_DIRECTION


def test_memory_of_nobody_is_not_freed(runtime):
    block = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    assert runtime.cudaFree(ctypes.c_void_p(block.data_ptr() + 512)) == INVALID_VALUE
    assert runtime.cudaGetLastError() == INVALID_VALUE


def test_what_nobody_wrote_says_so_and_fails():
    said = run_script(
        f"""
import ctypes, os
os.dup2(1, 2)
runtime = ctypes.CDLL(None)
for _ in range(2):
    assert runtime.cudaMemPoolTrimTo(None, 1) == {NOT_SUPPORTED}
assert runtime.cudaGetLastError() == {NOT_SUPPORTED}
"""
    )
    assert said == "stand-in cudart: nobody wrote cudaMemPoolTrimTo\n"


def test_a_kernel_on_a_stream_that_is_none_is_refused():
    total, ones = (torch.ones(4, device="cuda") for _ in range(2))
    with torch.cuda.stream(torch.cuda.ExternalStream(0xDEAD0)), pytest.raises(RuntimeError):
        total.add_(ones)
