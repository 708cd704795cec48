"""torch's own allocator on the stand-in: counts, reuse, running out, expandable segments."""

from __future__ import annotations

import pytest
import torch
from conftest import LATE_MS, alike, busy, random_bytes, reuse_after, run_script, standin_only

MIB = 1 << 20


def stat(name: str) -> int:
    return torch.cuda.memory_stats()[name]


def test_counts_follow_allocations():
    names = ["allocated_bytes.all.current", "reserved_bytes.all.current", "allocation.all.current"]
    before = [stat(name) for name in names]
    free_before, total = torch.cuda.mem_get_info()
    block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert [stat(name) - was for name, was in zip(names, before, strict=True)] == [
        30 * MIB,
        30 * MIB,
        1,
    ]
    assert alike(torch.cuda.mem_get_info()[0], free_before - 30 * MIB)
    del block
    assert stat("allocated_bytes.all.current") == before[0]
    assert stat("reserved_bytes.all.current") == before[1] + 30 * MIB
    torch.cuda.empty_cache()
    assert [stat(name) for name in names] == before
    assert alike(torch.cuda.mem_get_info()[0], free_before)
    assert total == torch.cuda.get_device_properties().total_memory


def test_a_free_block_is_reused_on_its_stream():
    assert reuse_after(torch.cuda.Stream(), recorded=False) == (True, False)


def test_a_recorded_block_is_reused_when_the_stream_is_done():
    assert reuse_after(torch.cuda.Stream(), recorded=True) == (False, True)


def test_pinned_memory_is_counted_and_reused():
    block = torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    address = block.data_ptr()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] >= 5 * MIB
    del block
    again = torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == address


def test_pinned_memory_waits_for_its_copy():
    source = random_bytes(5 * MIB, pinned=True)
    kept = source.clone()
    busy(LATE_MS)
    device = source.to("cuda", non_blocking=True)
    address = source.data_ptr()
    del source
    other = torch.zeros(5 * MIB, dtype=torch.uint8, pin_memory=True)
    assert other.data_ptr() != address
    assert torch.equal(device.cpu(), kept)


def test_a_full_device_says_so_and_recovers():
    said = run_script(
        """
import torch
MIB = 1 << 20
blocks = []
try:
    while len(blocks) < 100:
        blocks.append(torch.empty(20 * MIB, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError as error:
    assert "Tried to allocate 20.00 MiB" in str(error), error
    assert f"this process has {len(blocks) * 20}.00 MiB memory in use" in str(error), error
count = len(blocks)
blocks.pop()
blocks.append(torch.empty(20 * MIB, dtype=torch.uint8, device="cuda"))
stats = torch.cuda.memory_stats()
print(count, stats["num_ooms"], torch.cuda.mem_get_info()[1] // MIB)
""",
        STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB),
    )
    count, ooms, total_mib = map(int, said.split())
    assert 8 <= count <= 12
    assert (ooms, total_mib) == (1, 256)


@standin_only("the driver's memory is counted to the byte")
def test_expandable_segments_grow_in_place_and_shrink():
    said = run_script(
        """
import torch
MIB = 1 << 20
def pages(count):
    return torch.empty(count * 2 * MIB, dtype=torch.uint8, device="cuda")
data = torch.randint(0, 256, (20 * MIB,), dtype=torch.uint8)
first = pages(10)
free = torch.cuda.mem_get_info()[0]
first.copy_(data)
second = pages(10)
second.copy_(first)
assert second.data_ptr() == first.data_ptr() + 20 * MIB
segments = [s for s in torch.cuda.memory_snapshot() if s["is_expandable"]]
print(len(segments), segments[0]["total_size"] // MIB)
del first
torch.cuda.empty_cache()
assert torch.equal(second.cpu(), data)
assert torch.cuda.mem_get_info()[0] == free
""",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert said.split() == ["1", "40"]


@pytest.mark.parametrize("size", [1, 511, 512, 513, 2 * MIB, 21 * MIB])
def test_addresses_are_aligned_and_apart(size):
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(8)]
    addresses = sorted(block.data_ptr() for block in blocks)
    assert all(address % 512 == 0 for address in addresses)
    assert all(b - a >= size for a, b in zip(addresses, addresses[1:], strict=False))


def test_memory_goes_back_only_after_the_work_on_it():
    free_before = torch.cuda.mem_get_info()[0]
    source = random_bytes(30 * MIB, pinned=True)
    device = torch.empty_like(source, device="cuda")
    busy(LATE_MS)
    device.copy_(source, non_blocking=True)
    del device
    torch.cuda.empty_cache()
    assert alike(torch.cuda.mem_get_info()[0], free_before)
    torch.cuda.synchronize()
