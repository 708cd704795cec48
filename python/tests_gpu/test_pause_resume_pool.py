"""The cases of :mod:`test_pause_resume` for pools of mode pool, beside torch's own allocator."""

from __future__ import annotations

import pytest
import torch
from alone import alone
from conftest import standin_only
from test_pause_resume import MIB, TOTAL, data_of, filled, free_mib, holds

import dormouse

pytestmark = standin_only("the driver's free memory is counted to the MiB")


def filled_in(pool, mib: int, seed: int) -> torch.Tensor:
    with pool.use():
        return data_of(mib, seed).cuda()


@alone()
def test_pools_are_paused_and_resumed_in_any_order():
    installed = dormouse.install(mode="pool")
    pools = [installed.pool(name) for name in ("weights", "kv_cache", "optimizer")]
    held = [filled_in(pool, 20, seed) for seed, pool in enumerate(pools)]
    before = free_mib()
    for asleep, at in enumerate((1, 2, 0), 1):
        assert pools[at].sleep("host") is None
        assert free_mib() == before + 20 * asleep
    for awake, at in enumerate((0, 1, 2), 1):
        pools[at].wake()
        assert free_mib() == before + 20 * (3 - awake)
        assert holds(held[at], 20, at)


@alone()
def test_a_nested_pool_has_what_is_built_in_it():
    installed = dormouse.install(mode="pool")
    outer, inner = installed.pool("outer"), installed.pool("inner")
    with outer.use():
        held = [data_of(20, 0).cuda()]
        with inner.use():
            held.append(data_of(20, 1).cuda())
        held.append(data_of(20, 2).cuda())
    held.append(data_of(20, 3).cuda())
    before = free_mib()
    assert inner.sleep("host") is None
    assert free_mib() == before + 20
    assert all(holds(held[at], 20, at) for at in (0, 2, 3))
    assert outer.sleep("host") is None
    assert free_mib() == before + 60
    assert holds(held[3], 20, 3)
    inner.wake()
    assert holds(held[1], 20, 1)
    outer.wake()
    assert all(holds(each, 20, at) for at, each in enumerate(held))


@alone()
def test_without_backup_the_bytes_are_dropped():
    installed = dormouse.install(mode="pool")
    weights, cache = installed.pool("weights"), installed.pool("kv_cache", backup=False)
    weight, block = filled_in(weights, 20, 0), filled_in(cache, 20, 1)
    address = block.data_ptr()
    before = free_mib()
    for pool in (weights, cache):
        assert pool.sleep("host") is None
    assert free_mib() == before + 40
    assert installed.runtime.stats()["copies"]["device_to_host"]["bytes"] == 20 * MIB
    for pool in (weights, cache):
        pool.wake()
    assert holds(weight, 20, 0)
    assert block.data_ptr() == address and not block.cpu().any()


@alone()
def test_what_sleeps_is_read_and_stays_asleep():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    # Torch places the small ones in one segment.
    held = [filled_in(pool, mib, seed) for seed, mib in enumerate((20, 1, 1))]
    before = free_mib()
    assert pool.sleep("host") is None
    asleep = free_mib()
    assert asleep > before
    for seed, each in enumerate(held):
        assert torch.equal(installed.runtime.read(each), data_of(each.nbytes // MIB, seed))
    assert free_mib() == asleep
    pool.wake()
    assert all(holds(each, each.nbytes // MIB, seed) for seed, each in enumerate(held))


@alone()
def test_an_empty_pool_and_one_that_sleeps_twice():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    assert pool.sleep("host") is None
    assert pool.is_asleep
    pool.wake()
    weight = filled_in(pool, 20, 0)
    before = free_mib()
    pool.wake()
    for _ in range(2):
        assert pool.sleep("host") is None
        assert free_mib() == before + 20
    for _ in range(2):
        pool.wake()
        assert holds(weight, 20, 0)
    copies = installed.runtime.stats()["copies"]
    assert copies["device_to_host"]["bytes"] == copies["host_to_device"]["bytes"] == 20 * MIB


@alone(**TOTAL)
def test_out_of_memory_while_asleep_leaves_what_sleeps():
    installed = dormouse.install(mode="pool")
    pool, second = installed.pool("weights"), installed.pool("optimizer")
    weight = filled_in(pool, 30, 0)
    assert pool.sleep("host") is None
    others = [filled(30), filled(30)]
    with pytest.raises(torch.OutOfMemoryError):
        filled(30)
    with second.use(), pytest.raises(torch.OutOfMemoryError):
        filled(30)
    with pytest.raises(dormouse.MemoryTierError, match="stays asleep"):
        pool.wake()
    assert pool.is_asleep
    with pytest.raises(dormouse.StateError, match="asleep"), pool.use():
        pass
    assert others.pop().is_cuda
    pool.wake()
    assert holds(weight, 30, 0)


@alone()
def test_tensors_are_freed_while_asleep():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    held = [filled_in(pool, 20, seed) for seed in range(2)]
    before = free_mib()
    assert pool.sleep("host") is None
    del held[0]
    torch.cuda.empty_cache()
    pool.wake()
    assert holds(held[0], 20, 1)
    # Torch reuses in the pool what was freed of it.
    again = filled_in(pool, 20, 2)
    assert holds(held[0], 20, 1) and holds(again, 20, 2)
    assert free_mib() == before
    assert pool.sleep("host") is None
    del held, again, pool
    torch.cuda.empty_cache()
    assert free_mib() == before + 40
