"""Memory paused and resumed by tag, as trainers that share a GPU with a rollout engine do.

Tags of mode allocator; :mod:`test_pause_resume_pool` has pools of mode pool. torch_memory_saver
(commit 4a43c977) has 24 cases for GPUs of NVIDIA in its ``test/test_examples.py``: 15 tests, nine
of them with both of its ways to hook in (x2). What each of them shows is shown here by:

- ``simple`` x2: test_a_tag_sleeps_beside_what_stays
- ``cuda_graph`` x2: test_pause_resume_engine.test_a_graph_is_replayed_over_a_tag_that_slept. One of
  the two has the memory of the graph itself asleep; ours stays awake,
  test_graphs.test_a_graphs_memory_does_not_sleep
- ``cpu_backup`` x2: test_tags_with_and_without_backup_side_by_side,
  test_what_sleeps_is_read_and_stays_asleep, test_any_stream_reads_at_once_what_woke,
  test_tensors_are_freed_while_asleep. Of its kinds of host memory we have one, pinned, and a wake
  always gives it back, so nothing is like its ``retain_cpu_backup``
- ``cpu_backup_multi_device_mmap_restore`` x2: none, wants two GPUs; the stand-in is one
- ``cpu_backup_rss``: test_host_memory_is_kept_for_the_next_sleep_and_goes_with_the_budget. It is
  kept, because to pin it anew takes a driver long
- ``cpu_backup_backend_from_env`` x2: none, a variable that chooses the kind of host memory
- ``cpu_backup_preload_backend_from_env``: none, the same
- ``disk_backup`` x2: test_cycles_through_the_file_keep_the_bytes_and_its_size
- ``cpu_backup_retain_from_env`` x2: none, a variable for ``retain_cpu_backup``
- ``multi_device`` x2: none, wants two GPUs
- ``multi_device_torch_mode``: none, wants two GPUs
- ``rl_example`` x2:
  test_pause_resume_engine.test_weights_and_cache_of_a_graph_sleep_in_turn_under_tags
- ``training_engine``: test_pause_resume_engine.test_a_training_engine_sleeps_under_a_tag. A region
  is one thread's, so gradients that autograd's thread allocates are not in it,
  test_gradients_that_autograds_thread_allocates_stay_awake
- ``cuda_vmm_granularity``: test_odd_sizes_sleep_and_are_freed_meanwhile, of tensors: memory of
  ``cudaMalloc`` is not ours
- ``nested_region``: test_an_inner_region_without_backup, test_regions_nest_and_are_entered_again

Its open proposals: ``keep_resident`` is
test_an_inner_tag_that_never_sleeps_keeps_memory_out_of_a_region; ``chunked`` has parts of a tensor
asleep, where ours sleeps whole.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from alone import alone
from conftest import settled, standin_only
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


@alone()
def test_a_tag_sleeps_beside_what_stays():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    beside = data_of(MIB, 0).cuda()
    with tag.collect():
        weight = data_of(UNIT, 1).cuda()
    address, before = weight.data_ptr(), free_bytes()
    assert tag.sleep("host") is None
    assert has_more(before, UNIT)
    assert holds(beside, 0)
    tag.wake()
    assert has_more(before, 0)
    assert weight.data_ptr() == address
    assert holds(beside, 0) and holds(weight, 1)
    del weight
    torch.cuda.empty_cache()
    assert has_more(before, UNIT)


@alone()
def test_tags_are_paused_and_resumed_in_any_order():
    runtime = dormouse.install().runtime
    names = ("weights", "kv_cache", "optimizer")
    tags, held = {}, {}
    for seed, name in enumerate(names):
        tags[name] = runtime.tag(name)
        with tags[name].collect():
            held[name] = data_of(UNIT, seed).cuda()
    before = free_bytes()
    asleep = 0
    for name in ("kv_cache", "optimizer", "weights"):
        assert tags[name].sleep("host") is None
        asleep += UNIT
        assert has_more(before, asleep)
    for name in ("weights", "kv_cache", "optimizer"):
        tags[name].wake()
        asleep -= UNIT
        assert has_more(before, asleep)
        assert holds(held[name], names.index(name))


@alone()
def test_regions_nest_and_are_entered_again():
    runtime = dormouse.install().runtime
    outer, inner = runtime.tag("outer"), runtime.tag("inner")
    with outer.collect():
        held = [data_of(UNIT, 0).cuda()]
        with inner.collect():
            held.append(data_of(UNIT, 1).cuda())
            with outer.collect():
                held.append(data_of(UNIT, 2).cuda())
            held.append(data_of(UNIT, 3).cuda())
        held.append(data_of(UNIT, 4).cuda())
    held.append(data_of(UNIT, 5).cuda())

    def states() -> list[str]:
        return [runtime.query(each.data_ptr())["state"] for each in held]

    assert outer.sleep("host") is None
    assert states() == ["host", "awake", "host", "awake", "host", "awake"]
    assert inner.sleep("host") is None
    outer.wake()
    assert states() == ["awake", "host", "awake", "host", "awake", "awake"]
    inner.wake()
    assert all(holds(each, seed) for seed, each in enumerate(held))


@alone()
def test_an_inner_tag_that_never_sleeps_keeps_memory_out_of_a_region():
    runtime = dormouse.install().runtime
    paused, kept = runtime.tag("paused"), runtime.tag("kept")
    with paused.collect():
        first = data_of(UNIT, 0).cuda()
        with kept.collect():
            workspace = data_of(UNIT, 1).cuda()
    before = free_bytes()
    assert paused.sleep("host") is None
    assert has_more(before, UNIT)
    assert holds(workspace, 1)
    workspace.copy_(data_of(UNIT, 2))
    paused.wake()
    assert holds(first, 0) and holds(workspace, 2)


@alone()
def test_an_inner_region_without_backup():
    runtime = dormouse.install().runtime
    weights, grads = runtime.tag("weights"), runtime.tag("grads", backup=False)
    with weights.collect():
        held = [data_of(UNIT, 0).cuda()]
        with grads.collect():
            grad = data_of(UNIT, 1).cuda()
        held.append(data_of(UNIT, 2).cuda())
    before = free_bytes()
    for cycle in range(2):
        for tag in (weights, grads):
            assert tag.sleep("host") is None
        assert has_more(before, 3 * UNIT)
        copied = runtime.stats()["copies"]["device_to_host"]["bytes"]
        assert copied == (cycle + 1) * 2 * UNIT
        for tag in (weights, grads):
            tag.wake()
        assert holds(held[0], 0) and holds(held[1], 2)
        fill(grad, 3 + cycle)
        assert holds(grad, 3 + cycle)


@alone()
def test_a_region_ends_with_an_exception_and_covers_one_thread():
    runtime = dormouse.install().runtime
    tag, made = runtime.tag("weights"), []

    def other_thread():
        made.append(filled(UNIT))

    with pytest.raises(KeyError), tag.collect():
        made.append(filled(UNIT))
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        raise KeyError
    made.append(filled(UNIT))
    assert tag.sleep("host") is None
    states = [runtime.query(each.data_ptr())["state"] for each in made]
    assert states == ["host", "awake", "awake"]
    tag.wake()


@alone()
def test_tags_with_and_without_backup_side_by_side():
    runtime = dormouse.install().runtime
    weights, cache = runtime.tag("weights"), runtime.tag("kv_cache", backup=False)
    with weights.collect():
        weight = data_of(UNIT, 0).cuda()
    with cache.collect():
        block = data_of(2 * UNIT, 1).cuda()
    addresses = [weight.data_ptr(), block.data_ptr()]
    for tag in (weights, cache):
        assert tag.sleep("host") is None
    # Others write to the pages meanwhile.
    others = data_of(3 * UNIT, 2).cuda()
    stats = runtime.stats()
    assert stats["asleep"]["current_bytes"] == 3 * UNIT
    assert stats["tiers"]["host"]["current_bytes"] == stats["copies"]["device_to_host"]["bytes"]
    assert stats["copies"]["device_to_host"]["bytes"] == UNIT
    for tag in (cache, weights):
        tag.wake()
    assert [weight.data_ptr(), block.data_ptr()] == addresses
    assert holds(weight, 0)
    assert not block.cpu().any()
    block.copy_(data_of(2 * UNIT, 3))
    assert holds(block, 3) and holds(others, 2)


@alone()
def test_any_stream_reads_at_once_what_woke():
    runtime = dormouse.install().runtime
    tag, side = runtime.tag("weights"), torch.cuda.Stream()
    with tag.collect():
        weight = data_of(8 * UNIT, 0).cuda()
    seen = torch.zeros(UNIT, dtype=torch.uint8, pin_memory=True)
    assert tag.sleep("host") is None
    tag.wake()
    with torch.cuda.stream(side):
        seen.copy_(weight[-UNIT:], non_blocking=True)
    side.synchronize()
    assert torch.equal(seen, data_of(8 * UNIT, 0)[-UNIT:])


@alone()
def test_an_empty_tag():
    runtime = dormouse.install().runtime
    tag = runtime.tag("nothing")
    for _ in range(2):
        assert tag.sleep("host") is None
        tag.wake()
    with tag.collect():
        pass
    assert tag.sleep("host") is None
    with tag.collect():
        late = data_of(UNIT, 0).cuda()
    # What is allocated under a sleeping tag is awake until the next sleep.
    assert runtime.query(late.data_ptr())["state"] == "awake"
    assert tag.sleep("host") is None
    assert runtime.query(late.data_ptr())["state"] == "host"
    tag.wake()
    assert holds(late, 0)
    del late
    assert tag.sleep("host") is None
    tag.close()


@alone()
def test_sleeping_and_waking_twice_changes_nothing():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        weight = data_of(UNIT, 0).cuda()
    before = free_bytes()
    tag.wake()
    for _ in range(2):
        assert tag.sleep("host") is None
        assert has_more(before, UNIT)
    for _ in range(2):
        tag.wake()
        assert has_more(before, 0)
        assert holds(weight, 0)
    copies = runtime.stats()["copies"]
    assert copies["device_to_host"]["bytes"] == copies["host_to_device"]["bytes"] == UNIT


@alone()
def test_a_sleep_right_after_a_wake_has_the_host_memory_of_the_one_before():
    runtime = dormouse.install(host_budget_bytes=12 * UNIT).runtime
    tag = runtime.tag("weights")
    with tag.collect():
        weight = data_of(8 * UNIT, 0).cuda()
    for _ in range(5):
        assert tag.sleep("host") is None
        tag.wake()
    assert runtime.stats()["tiers"]["host"]["peak_bytes"] == 8 * UNIT
    assert holds(weight, 0)


@alone(**TOTAL)
def test_others_use_the_memory_of_what_sleeps():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        weights = [data_of(12 * MIB, seed).cuda() for seed in range(3)]
    assert tag.sleep("host") is None
    # More than the GPU has beside the weights, at addresses that are not theirs.
    others = [data_of(12 * MIB, 3 + seed).cuda() for seed in range(3)]
    ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in weights + others)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(holds(each, 3 + seed) for seed, each in enumerate(others))
    del others
    # Cached pages make way for those that wake.
    tag.wake()
    assert all(holds(each, seed) for seed, each in enumerate(weights))


@alone(**TOTAL)
def test_out_of_memory_while_asleep_leaves_what_sleeps():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        weight = data_of(25 * MIB, 0).cuda()
    assert tag.sleep("host") is None
    held = [filled(25 * MIB), filled(25 * MIB)]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        filled(25 * MIB)
    # Nor is there room to wake; the bytes are kept, and it works later.
    for _ in range(2):
        with pytest.raises(dormouse.MemoryTierError, match="stays asleep"):
            tag.wake()
        assert runtime.query(weight.data_ptr())["state"] == "host"
    del held[0]
    tag.wake()
    assert holds(weight, 0)


@alone()
def test_tensors_are_freed_while_asleep():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        held = [data_of(UNIT, seed).cuda() for seed in range(4)]
    before = free_bytes()
    assert tag.sleep("host") is None
    view = held[3][MIB:]
    del held[3], held[1]
    # A storage lives as long as its views.
    assert settled(runtime, 3 * UNIT)["asleep"]["current_bytes"] == 3 * UNIT
    assert has_more(before, 4 * UNIT)
    tag.wake()
    assert has_more(before, UNIT)
    assert holds(held[0], 0) and holds(held[1], 2)
    assert torch.equal(view.cpu(), data_of(UNIT, 3)[MIB:])
    del held, view
    assert tag.sleep("host") is None
    assert settled(runtime)["asleep"]["current_bytes"] == 0


@alone()
def test_odd_sizes_sleep_and_are_freed_meanwhile():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        small = [data_of(6912, seed).cuda() for seed in range(2)]
        large = [data_of(UNIT + 6912, seed).cuda() for seed in range(2)]
    for cycle in range(2):
        assert tag.sleep("host") is None
        states = [runtime.query(each.data_ptr())["state"] for each in (*small, *large)]
        assert states == ["awake"] * len(small) + ["host"] * len(large)
        if cycle == 0:
            del small[0], large[0]
        tag.wake()
        last = 1 + 9 * cycle
        assert holds(small[-1], last) and holds(large[-1], last)
        fill(small[-1], 10)
        fill(large[-1], 10)


def corner(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float32).view(1024, -1)[:, 3:].t()


@alone()
def test_what_sleeps_is_read_and_stays_asleep():
    runtime = dormouse.install().runtime
    weights, cache = runtime.tag("weights"), runtime.tag("kv_cache", backup=False)
    with weights.collect():
        whole = data_of(UNIT + MIB, 0).cuda()
        other = data_of(UNIT, 1).cuda()
    with cache.collect():
        block = filled(UNIT)
    floats, wanted = corner(other), corner(data_of(UNIT, 1))
    with pytest.raises(dormouse.StateError, match="asleep in host memory"):
        runtime.read(whole)
    assert weights.sleep("host") is None and cache.sleep("host") is None
    before = free_bytes()
    assert torch.equal(runtime.read(whole), data_of(UNIT + MIB, 0))
    seen = runtime.read(floats)
    assert seen.stride() == floats.stride() == wanted.stride()
    assert torch.equal(seen.view(torch.int32), wanted.view(torch.int32))
    turned = runtime.read(whole.view(torch.complex64).conj())
    assert turned.is_conj() and torch.equal(turned.conj().view(torch.uint8), data_of(UNIT + MIB, 0))
    assert runtime.read(torch.empty(0, 3, device="cuda")).size() == (0, 3)
    with pytest.raises(dormouse.StateError, match="Empty"):
        runtime.read(block)
    assert runtime.query(whole.data_ptr())["state"] == "host"
    assert has_more(before, 0)
    seen.zero_()
    weights.wake()
    cache.wake()
    assert holds(whole, 0)
    assert holds(other, 1)


@alone()
def test_what_sleeps_in_the_file_is_read_and_stays_asleep():
    with on_disk() as folder:
        runtime = dormouse.install(nvme_dir=folder, nvme_file_bytes=8 * UNIT).runtime
        tag = runtime.tag("weights")
        with tag.collect():
            whole = data_of(UNIT + MIB, 0).cuda()
        assert tag.sleep("nvme") is None
        before = free_bytes()
        assert torch.equal(runtime.read(whole), data_of(UNIT + MIB, 0))
        assert torch.equal(runtime.read(whole[MIB:]), data_of(UNIT + MIB, 0)[MIB:])
        assert runtime.query(whole.data_ptr())["state"] == "nvme"
        assert has_more(before, 0)
        tag.wake()
        assert holds(whole, 0)


@alone()
def test_many_cycles_keep_the_bytes_and_leave_nothing():
    runtime = dormouse.install().runtime
    weights, cache = runtime.tag("weights"), runtime.tag("kv_cache", backup=False)
    with weights.collect():
        held = [data_of(UNIT, seed).cuda() for seed in range(3)]
    with cache.collect():
        block = filled(2 * UNIT)
    before = free_bytes()
    for cycle in range(5):
        held[cycle % 3].copy_(data_of(UNIT, 10 + cycle))
        assert weights.sleep("host") is None and cache.sleep("host") is None
        assert has_more(before, 5 * UNIT)
        cache.wake()
        weights.wake()
        assert has_more(before, 0)
    assert holds(held[0], 13) and holds(held[1], 14) and holds(held[2], 12)
    assert block.is_cuda
    assert settled(runtime)["tiers"]["host"]["current_bytes"] == 0


@alone()
def test_cycles_through_the_file_keep_the_bytes_and_its_size():
    with on_disk() as folder:
        runtime = dormouse.install(nvme_dir=folder, nvme_file_bytes=8 * UNIT).runtime
        weights, cache = runtime.tag("weights"), runtime.tag("kv_cache", backup=False)
        with weights.collect():
            held = [data_of(nbytes, seed).cuda() for seed, nbytes in enumerate((UNIT + 49380, 7))]
        with cache.collect():
            block = data_of(UNIT, 2).cuda()

        def put_to_sleep() -> None:
            assert weights.sleep("nvme") is None and cache.sleep("nvme") is None
            assert runtime.query(held[0].data_ptr())["state"] == "nvme"

        used = file_bytes_of_cycles(runtime, put_to_sleep, (weights, cache), held, block)
        assert UNIT + 49380 <= used < UNIT + 2 * MIB


def own_memory() -> int:
    """Bytes of the process, without files and what it shares, as the pages of the stand-in are."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


@standin_only("where a driver's pinned memory is counted is the driver's affair")
@alone()
def test_host_memory_is_kept_for_the_next_sleep_and_goes_with_the_budget():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    nbytes, slack = 16 * UNIT, 2 * UNIT
    with tag.collect():
        weight = data_of(nbytes, 0).cuda()
    before = own_memory()
    for _ in range(2):
        assert tag.sleep("host") is None
        assert abs(own_memory() - before - nbytes) < slack
        tag.wake()
        settled(runtime)
        assert abs(own_memory() - before - nbytes) < slack
    runtime.set_budget("host", slack)
    assert abs(own_memory() - before) < slack
    assert "Host tier has no room" in tag.sleep("host")
    runtime.set_budget("host", nbytes + slack)
    assert tag.sleep("host") is None
    tag.wake()
    assert holds(weight, 0)
