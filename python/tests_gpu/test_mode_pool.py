"""Mode pool: pools of dormouse's memory beside torch's own allocator, asleep as a whole."""

from __future__ import annotations

import pytest
import torch
from alone import alone
from conftest import LATE_MS, SLACK_BYTES, alike, busy, random_bytes, settled

import dormouse
from dormouse import _native as native

MIB = 1 << 20


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def is_ours(tensor: torch.Tensor) -> bool:
    return native.library().dormouse_torch_get_base(tensor.data_ptr(), None) is not None


@alone()
def test_what_is_built_inside_sleeps_as_a_whole():
    installed = dormouse.install(mode="pool")
    outside = random_bytes(3 * MIB).cuda()
    pool = installed.pool("weights")
    data = [random_bytes(size, seed=size) for size in (9 * MIB, 1000, 700_000)]
    with pool.use():
        inside = [each.cuda() for each in data]
    after = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    assert [is_ours(each) for each in (*inside, outside, after)] == [True] * 3 + [False] * 2
    addresses = [each.data_ptr() for each in inside]
    before = free_bytes()
    assert pool.sleep("host") is None
    assert pool.is_asleep
    assert free_bytes() >= before + 9 * MIB - SLACK_BYTES
    assert torch.equal(outside.cpu(), random_bytes(3 * MIB))
    with pytest.raises(dormouse.StateError, match="'weights' is asleep"), pool.use():
        pass
    pool.wake()
    assert not pool.is_asleep
    assert [each.data_ptr() for each in inside] == addresses
    assert all(torch.equal(a.cpu(), b) for a, b in zip(inside, data, strict=True))
    assert alike(free_bytes(), before)


@alone()
def test_a_pool_that_finds_no_place_for_all_of_it_stays_awake_whole():
    installed = dormouse.install(mode="pool", host_budget_bytes=24 * MIB)
    pool = installed.pool("weights")
    with pool.use():
        # Segments of their own: the first finds a place, the second does not.
        inside = [random_bytes(20 * MIB, seed=seed).cuda() for seed in range(2)]
    assert "weights" in pool.sleep("host")
    assert not pool.is_asleep
    for seed, each in enumerate(inside):
        assert installed.runtime.query(each.data_ptr())["state"] == "awake"
        assert torch.equal(each.cpu(), random_bytes(20 * MIB, seed=seed))
    with pool.use():
        assert is_ours(random_bytes(MIB).cuda())


@alone()
def test_a_pool_that_is_refused_before_anything_sleeps_is_awake():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    with pool.use():
        inside = random_bytes(4 * MIB).cuda()
    with pytest.raises(dormouse.MemoryTierError, match="closed"):
        pool.sleep("nvme")
    assert not pool.is_asleep
    with pytest.raises(dormouse.ArgumentError, match="accepted"):
        pool.sleep("disk")
    assert not pool.is_asleep
    with pool.use():
        assert is_ours(random_bytes(MIB).cuda())
    assert torch.equal(inside.cpu(), random_bytes(4 * MIB))


@alone()
def test_two_pools_sleep_apart():
    installed = dormouse.install(mode="pool")
    pools = [installed.pool(name) for name in ("weights", "optimizer")]
    held = []
    for seed, pool in enumerate(pools):
        with pool.use():
            held.append(random_bytes(4 * MIB, seed=seed).cuda())
    assert pools[0].sleep("host") is None
    assert torch.equal(held[1].cpu(), random_bytes(4 * MIB, seed=1))
    assert pools[1].sleep("host") is None
    pools[0].wake()
    assert torch.equal(held[0].cpu(), random_bytes(4 * MIB, seed=0))
    pools[1].wake()
    assert torch.equal(held[1].cpu(), random_bytes(4 * MIB, seed=1))


@alone()
def test_sleep_waits_for_every_stream():
    """Torch tells a pool's allocator of no stream but the first."""
    installed = dormouse.install(mode="pool")
    pool, side = installed.pool("weights"), torch.cuda.Stream()
    data = random_bytes(6 * MIB, pinned=True)
    with pool.use():
        weight = torch.zeros(6 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy(LATE_MS)
        weight.copy_(data, non_blocking=True)
    assert pool.sleep("host") is None
    pool.wake()
    assert torch.equal(weight.cpu(), data)


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_running_out_is_torchs_own_error():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    data, held = random_bytes(20 * MIB), []
    with pool.use():
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            while len(held) < 100:
                held.append(data.cuda())
        assert "of which dormouse may use" not in str(caught.value), "torch's text, not ours"
        assert 8 <= len(held) <= 12
        held.pop()
        held.append(data.cuda())
    assert all(torch.equal(each.cpu(), data) for each in held)
    assert torch.cuda.memory_stats()["num_ooms"] == 1


@alone()
def test_a_pool_that_ends_gives_its_memory_back():
    installed = dormouse.install(mode="pool")
    torch.cuda.init()
    before = free_bytes()
    pool = installed.pool("weights")
    with pool.use():
        weight = random_bytes(30 * MIB).cuda()
    assert free_bytes() <= before - 30 * MIB + SLACK_BYTES
    assert pool.sleep("host") is None
    del weight, pool
    torch.cuda.empty_cache()
    assert alike(free_bytes(), before)
    assert settled(installed.runtime)["tiers"]["host"]["current_bytes"] == 0


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_torchs_allocator_has_what_a_sleeping_pool_gave_back():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    data = random_bytes(150 * MIB)
    with pool.use():
        weight = data.cuda()
    assert pool.sleep("host") is None
    other = torch.empty(150 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(dormouse.MemoryTierError, match="stays asleep"):
        pool.wake()
    assert pool.is_asleep
    del other
    # Torch's cache still has it.
    assert free_bytes() == 106 * MIB
    pool.wake()
    assert torch.equal(weight.cpu(), data)


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_torchs_allocator_has_what_was_freed_of_a_pool():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    with pool.use():
        weight = torch.empty(150 * MIB, dtype=torch.uint8, device="cuda")
    del weight, pool
    # Torch frees the pool's segments when it finds no room, and asks the driver again.
    other = torch.empty(150 * MIB, dtype=torch.uint8, device="cuda")
    assert other.is_cuda
    assert free_bytes() == 106 * MIB


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_a_request_that_finds_too_little_takes_nothing():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    other = torch.empty(150 * MIB, dtype=torch.uint8, device="cuda")
    with pool.use(), pytest.raises(torch.OutOfMemoryError):
        torch.empty(120 * MIB, dtype=torch.uint8, device="cuda")
    assert other.is_cuda
    assert free_bytes() == 106 * MIB


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_a_pool_has_what_another_pool_gave_back():
    installed = dormouse.install(mode="pool")
    pools = [installed.pool(name) for name in ("weights", "optimizer")]
    with pools[0].use():
        weight = random_bytes(150 * MIB, seed=1).cuda()
    assert pools[0].sleep("host") is None
    with pools[1].use():
        moments = random_bytes(150 * MIB, seed=2).cuda()
    assert pools[1].sleep("host") is None
    pools[0].wake()
    assert torch.equal(weight.cpu(), random_bytes(150 * MIB, seed=1))
    assert pools[0].sleep("host") is None
    pools[1].wake()
    assert torch.equal(moments.cpu(), random_bytes(150 * MIB, seed=2))


@alone()
def test_memory_is_freed_behind_the_work_that_uses_it():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    data = random_bytes(30 * MIB, pinned=True)
    with pool.use():
        weight = torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = free_bytes()
    busy(LATE_MS)
    weight.copy_(data, non_blocking=True)
    del weight, pool
    # An access to pages that are gone would destroy the context.
    torch.cuda.empty_cache()
    assert alike(free_bytes(), before + 30 * MIB)
    torch.cuda.synchronize()
