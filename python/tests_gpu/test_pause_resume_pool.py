"""The cases of :mod:`test_pause_resume` for pools of mode pool, beside torch's own allocator.

Of torch_memory_saver's 24 cases each is shown by:

- ``simple`` x2: test_a_pool_sleeps_beside_what_stays
- ``cuda_graph`` x2: test_pause_resume_engine.test_a_graph_is_replayed_over_a_pool_that_slept. The
  memory of the graph itself is torch's own, and stays
- ``cpu_backup`` x2: test_without_backup_the_bytes_are_dropped,
  test_what_sleeps_is_read_and_stays_asleep, test_any_stream_reads_at_once_what_woke,
  test_tensors_are_freed_while_asleep; nothing is like ``retain_cpu_backup``, as with tags
- ``cpu_backup_rss``: that of :mod:`test_pause_resume`; host memory is the same one's
- ``disk_backup`` x2: test_cycles_through_the_file_keep_the_bytes_and_its_size
- ``rl_example`` x2:
  test_pause_resume_engine.test_weights_and_cache_of_a_graph_sleep_in_turn_in_pools
- ``training_engine``: test_pause_resume_engine.test_a_training_engine_sleeps_in_a_pool
- ``cuda_vmm_granularity``: test_odd_sizes_sleep_and_are_freed_meanwhile, of tensors
- ``nested_region``: test_an_inner_pool_without_backup, test_a_nested_pool_has_what_is_built_in_it
- ``multi_device`` x2, ``multi_device_torch_mode``, ``cpu_backup_multi_device_mmap_restore`` x2:
  none, they want two GPUs
- ``cpu_backup_backend_from_env`` x2, ``cpu_backup_preload_backend_from_env``,
  ``cpu_backup_retain_from_env`` x2: none, such choices are not there
"""

from __future__ import annotations

import pytest
import torch
from alone import alone
from conftest import SLACK_BYTES
from pausing import (
    MIB,
    TOTAL,
    UNIT,
    data_of,
    file_bytes_of_cycles,
    fill,
    filled,
    free_bytes,
    has_more,
    holds,
    on_disk,
)

import dormouse

# A segment of its own in torch's allocator.
SIZE = max(20 * MIB, UNIT)


def filled_in(pool, nbytes: int, seed: int) -> torch.Tensor:
    with pool.use():
        return data_of(nbytes, seed).cuda()


@alone()
def test_a_pool_sleeps_beside_what_stays():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    beside, weight = data_of(MIB, 0).cuda(), filled_in(pool, SIZE, 1)
    address, before = weight.data_ptr(), free_bytes()
    assert pool.sleep("host") is None
    assert has_more(before, SIZE)
    assert holds(beside, 0)
    pool.wake()
    assert has_more(before, 0)
    assert weight.data_ptr() == address
    assert holds(beside, 0) and holds(weight, 1)
    del weight, pool
    torch.cuda.empty_cache()
    assert has_more(before, SIZE)


@alone()
def test_pools_are_paused_and_resumed_in_any_order():
    installed = dormouse.install(mode="pool")
    pools = [installed.pool(name) for name in ("weights", "kv_cache", "optimizer")]
    held = [filled_in(pool, SIZE, seed) for seed, pool in enumerate(pools)]
    before = free_bytes()
    for asleep, at in enumerate((1, 2, 0), 1):
        assert pools[at].sleep("host") is None
        assert has_more(before, SIZE * asleep)
    for awake, at in enumerate((0, 1, 2), 1):
        pools[at].wake()
        assert has_more(before, SIZE * (3 - awake))
        assert holds(held[at], at)


@alone()
def test_a_nested_pool_has_what_is_built_in_it():
    installed = dormouse.install(mode="pool")
    outer, inner = installed.pool("outer"), installed.pool("inner")
    with outer.use():
        held = [data_of(SIZE, 0).cuda()]
        with inner.use():
            held.append(data_of(SIZE, 1).cuda())
        held.append(data_of(SIZE, 2).cuda())
    held.append(data_of(SIZE, 3).cuda())
    before = free_bytes()
    assert inner.sleep("host") is None
    assert has_more(before, SIZE)
    assert all(holds(held[at], at) for at in (0, 2, 3))
    assert outer.sleep("host") is None
    assert has_more(before, 3 * SIZE)
    assert holds(held[3], 3)
    inner.wake()
    assert holds(held[1], 1)
    outer.wake()
    assert all(holds(each, at) for at, each in enumerate(held))


@alone()
def test_an_inner_pool_without_backup():
    installed = dormouse.install(mode="pool")
    weights, grads = installed.pool("weights"), installed.pool("grads", backup=False)
    with weights.use():
        held = [data_of(SIZE, 0).cuda()]
        grad = filled_in(grads, SIZE, 1)
        held.append(data_of(SIZE, 2).cuda())
    before = free_bytes()
    for cycle in range(2):
        for pool in (weights, grads):
            assert pool.sleep("host") is None
        assert has_more(before, 3 * SIZE)
        copied = installed.runtime.stats()["copies"]["device_to_host"]["bytes"]
        assert copied == (cycle + 1) * 2 * SIZE
        for pool in (weights, grads):
            pool.wake()
        assert holds(held[0], 0) and holds(held[1], 2)
        fill(grad, 3 + cycle)
        assert holds(grad, 3 + cycle)


@alone()
def test_without_backup_the_bytes_are_dropped():
    installed = dormouse.install(mode="pool")
    weights, cache = installed.pool("weights"), installed.pool("kv_cache", backup=False)
    weight, block = filled_in(weights, SIZE, 0), filled_in(cache, SIZE, 1)
    address = block.data_ptr()
    before = free_bytes()
    for pool in (weights, cache):
        assert pool.sleep("host") is None
    assert has_more(before, 2 * SIZE)
    # Others write to the pages meanwhile.
    others = data_of(2 * SIZE, 2).cuda()
    assert installed.runtime.stats()["copies"]["device_to_host"]["bytes"] == SIZE
    for pool in (weights, cache):
        pool.wake()
    assert holds(weight, 0)
    assert block.data_ptr() == address and not block.cpu().any()
    assert holds(others, 2)


@alone()
def test_any_stream_reads_at_once_what_woke():
    installed = dormouse.install(mode="pool")
    pool, side = installed.pool("weights"), torch.cuda.Stream()
    weight = filled_in(pool, 2 * SIZE, 0)
    seen = torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True)
    assert pool.sleep("host") is None
    pool.wake()
    with torch.cuda.stream(side):
        seen.copy_(weight[-SIZE:], non_blocking=True)
    side.synchronize()
    assert torch.equal(seen, data_of(2 * SIZE, 0)[-SIZE:])


@alone()
def test_odd_sizes_sleep_and_are_freed_meanwhile():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    sizes = (6912, 6912, SIZE + 6912, SIZE + 6912)
    held = [filled_in(pool, nbytes, seed) for seed, nbytes in enumerate(sizes)]
    before = free_bytes()
    assert pool.sleep("host") is None
    assert free_bytes() >= before + 2 * SIZE - SLACK_BYTES
    del held[2], held[0]
    pool.wake()
    assert holds(held[0], 1) and holds(held[1], 3)
    for each in held:
        fill(each, 4)
    assert pool.sleep("host") is None
    pool.wake()
    assert all(holds(each, 4) for each in held)


@alone()
def test_cycles_through_the_file_keep_the_bytes_and_its_size():
    with on_disk() as folder:
        installed = dormouse.install(mode="pool", nvme_dir=folder, nvme_file_bytes=4 * SIZE)
        weights, cache = installed.pool("weights"), installed.pool("kv_cache", backup=False)
        held = [filled_in(weights, nbytes, seed) for seed, nbytes in enumerate((SIZE + 49380, 7))]
        block = filled_in(cache, SIZE, 2)

        def put_to_sleep() -> None:
            assert weights.sleep() is None and cache.sleep() is None

        used = file_bytes_of_cycles(installed.runtime, put_to_sleep, (weights, cache), held, block)
        # Of torch's segments, the small tensor's too.
        assert SIZE + 49380 <= used <= SIZE + 4 * MIB


@alone()
def test_what_sleeps_is_read_and_stays_asleep():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    # Torch places the small ones in one segment.
    held = [filled_in(pool, nbytes, seed) for seed, nbytes in enumerate((SIZE, MIB, MIB))]
    before = free_bytes()
    assert pool.sleep("host") is None
    asleep = free_bytes()
    assert asleep >= before + SIZE - SLACK_BYTES
    for seed, each in enumerate(held):
        assert torch.equal(installed.runtime.read(each), data_of(each.nbytes, seed))
    assert has_more(asleep, 0)
    pool.wake()
    assert all(holds(each, seed) for seed, each in enumerate(held))


@alone()
def test_an_empty_pool_and_one_that_sleeps_twice():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    assert pool.sleep("host") is None
    assert pool.is_asleep
    pool.wake()
    weight = filled_in(pool, SIZE, 0)
    before = free_bytes()
    pool.wake()
    for _ in range(2):
        assert pool.sleep("host") is None
        assert has_more(before, SIZE)
    for _ in range(2):
        pool.wake()
        assert holds(weight, 0)
    copies = installed.runtime.stats()["copies"]
    assert copies["device_to_host"]["bytes"] == copies["host_to_device"]["bytes"] == SIZE


@alone(**TOTAL)
def test_out_of_memory_while_asleep_leaves_what_sleeps():
    installed = dormouse.install(mode="pool")
    pool, second = installed.pool("weights"), installed.pool("optimizer")
    weight = filled_in(pool, 30 * MIB, 0)
    assert pool.sleep("host") is None
    others = [filled(30 * MIB), filled(30 * MIB)]
    with pytest.raises(torch.OutOfMemoryError):
        filled(30 * MIB)
    with second.use(), pytest.raises(torch.OutOfMemoryError):
        filled(30 * MIB)
    with pytest.raises(dormouse.MemoryTierError, match="stays asleep"):
        pool.wake()
    assert pool.is_asleep
    with pytest.raises(dormouse.StateError, match="asleep"), pool.use():
        pass
    assert others.pop().is_cuda
    pool.wake()
    assert holds(weight, 0)


@alone()
def test_tensors_are_freed_while_asleep():
    installed = dormouse.install(mode="pool")
    pool = installed.pool("weights")
    held = [filled_in(pool, SIZE, seed) for seed in range(2)]
    before = free_bytes()
    assert pool.sleep("host") is None
    del held[0]
    torch.cuda.empty_cache()
    pool.wake()
    assert holds(held[0], 1)
    # Torch reuses in the pool what was freed of it.
    again = filled_in(pool, SIZE, 2)
    assert holds(held[0], 1) and holds(again, 2)
    assert has_more(before, 0)
    assert pool.sleep("host") is None
    del held, again, pool
    torch.cuda.empty_cache()
    assert has_more(before, 2 * SIZE)
