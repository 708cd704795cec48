"""Memory paused and resumed by tag, as trainers that share a GPU with a rollout engine do.

Tags of mode allocator; :mod:`test_pause_resume_pool` has pools of mode pool.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
import torch
from alone import alone
from conftest import random_bytes, settled, standin_only

import dormouse

pytestmark = standin_only("the driver's free memory is counted to the MiB")

MIB = 1 << 20
TOTAL = {"STANDIN_CUDA_TOTAL_BYTES": str(64 * MIB)}


def free_mib() -> int:
    return torch.cuda.mem_get_info()[0] // MIB


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def data_of(mib: int, seed: int) -> torch.Tensor:
    return random_bytes(mib * MIB, seed=seed)


def holds(tensor: torch.Tensor, mib: int, seed: int) -> bool:
    return torch.equal(tensor.cpu(), data_of(mib, seed))


@alone()
def test_tags_are_paused_and_resumed_in_any_order():
    runtime = dormouse.install().runtime
    names = ("weights", "kv_cache", "optimizer")
    tags, held = {}, {}
    for seed, name in enumerate(names):
        tags[name] = runtime.tag(name)
        with tags[name].collect():
            held[name] = data_of(4, seed).cuda()
    before = free_mib()
    asleep = 0
    for name in ("kv_cache", "optimizer", "weights"):
        assert tags[name].sleep("host") is None
        asleep += 4
        assert free_mib() == before + asleep
    for name in ("weights", "kv_cache", "optimizer"):
        tags[name].wake()
        asleep -= 4
        assert free_mib() == before + asleep
        assert holds(held[name], 4, names.index(name))


@alone()
def test_regions_nest_and_are_entered_again():
    runtime = dormouse.install().runtime
    outer, inner = runtime.tag("outer"), runtime.tag("inner")
    with outer.collect():
        held = [data_of(4, 0).cuda()]
        with inner.collect():
            held.append(data_of(4, 1).cuda())
            with outer.collect():
                held.append(data_of(4, 2).cuda())
            held.append(data_of(4, 3).cuda())
        held.append(data_of(4, 4).cuda())
    held.append(data_of(4, 5).cuda())

    def states() -> list[str]:
        return [runtime.query(each.data_ptr())["state"] for each in held]

    assert outer.sleep("host") is None
    assert states() == ["host", "awake", "host", "awake", "host", "awake"]
    assert inner.sleep("host") is None
    outer.wake()
    assert states() == ["awake", "host", "awake", "host", "awake", "awake"]
    inner.wake()
    assert all(holds(each, 4, seed) for seed, each in enumerate(held))


@alone()
def test_an_inner_tag_that_never_sleeps_keeps_memory_out_of_a_region():
    runtime = dormouse.install().runtime
    paused, kept = runtime.tag("paused"), runtime.tag("kept")
    with paused.collect():
        first = data_of(4, 0).cuda()
        with kept.collect():
            workspace = data_of(4, 1).cuda()
    before = free_mib()
    assert paused.sleep("host") is None
    assert free_mib() == before + 4
    assert holds(workspace, 4, 1)
    workspace.copy_(data_of(4, 2))
    paused.wake()
    assert holds(first, 4, 0) and holds(workspace, 4, 2)


@alone()
def test_a_region_ends_with_an_exception_and_covers_one_thread():
    runtime = dormouse.install().runtime
    tag, made = runtime.tag("weights"), []

    def other_thread():
        made.append(filled(4))

    with pytest.raises(KeyError), tag.collect():
        made.append(filled(4))
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        raise KeyError
    made.append(filled(4))
    assert tag.sleep("host") is None
    states = [runtime.query(each.data_ptr())["state"] for each in made]
    assert states == ["host", "awake", "awake"]
    tag.wake()


@alone()
def test_tags_with_and_without_backup_side_by_side():
    runtime = dormouse.install().runtime
    weights, cache = runtime.tag("weights"), runtime.tag("kv_cache", backup=False)
    with weights.collect():
        weight = data_of(4, 0).cuda()
    with cache.collect():
        block = data_of(8, 1).cuda()
    addresses = [weight.data_ptr(), block.data_ptr()]
    for tag in (weights, cache):
        assert tag.sleep("host") is None
    stats = runtime.stats()
    assert stats["asleep"]["current_bytes"] == 12 * MIB
    assert stats["tiers"]["host"]["current_bytes"] == stats["copies"]["device_to_host"]["bytes"]
    assert stats["copies"]["device_to_host"]["bytes"] == 4 * MIB
    for tag in (cache, weights):
        tag.wake()
    assert [weight.data_ptr(), block.data_ptr()] == addresses
    assert holds(weight, 4, 0)
    assert not block.cpu().any()
    block.copy_(data_of(8, 2))
    assert holds(block, 8, 2)


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
        late = data_of(4, 0).cuda()
    # What is allocated under a sleeping tag is awake until the next sleep.
    assert runtime.query(late.data_ptr())["state"] == "awake"
    assert tag.sleep("host") is None
    assert runtime.query(late.data_ptr())["state"] == "host"
    tag.wake()
    assert holds(late, 4, 0)
    del late
    assert tag.sleep("host") is None
    tag.close()


@alone()
def test_sleeping_and_waking_twice_changes_nothing():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        weight = data_of(4, 0).cuda()
    before = free_mib()
    tag.wake()
    for _ in range(2):
        assert tag.sleep("host") is None
        assert free_mib() == before + 4
    for _ in range(2):
        tag.wake()
        assert free_mib() == before
        assert holds(weight, 4, 0)
    copies = runtime.stats()["copies"]
    assert copies["device_to_host"]["bytes"] == copies["host_to_device"]["bytes"] == 4 * MIB


@alone(**TOTAL)
def test_others_use_the_memory_of_what_sleeps():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        weights = [data_of(12, seed).cuda() for seed in range(3)]
    assert tag.sleep("host") is None
    # More than the GPU has beside the weights, at addresses that are not theirs.
    others = [data_of(12, 3 + seed).cuda() for seed in range(3)]
    ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in weights + others)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(holds(each, 12, 3 + seed) for seed, each in enumerate(others))
    del others
    # Cached pages make way for those that wake.
    tag.wake()
    assert all(holds(each, 12, seed) for seed, each in enumerate(weights))


@alone(**TOTAL)
def test_out_of_memory_while_asleep_leaves_what_sleeps():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        weight = data_of(25, 0).cuda()
    assert tag.sleep("host") is None
    held = [filled(25), filled(25)]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        filled(25)
    # Nor is there room to wake; the bytes are kept, and it works later.
    for _ in range(2):
        with pytest.raises(dormouse.MemoryTierError, match="stays asleep"):
            tag.wake()
        assert runtime.query(weight.data_ptr())["state"] == "host"
    del held[0]
    tag.wake()
    assert holds(weight, 25, 0)


@alone()
def test_tensors_are_freed_while_asleep():
    runtime = dormouse.install().runtime
    tag = runtime.tag("weights")
    with tag.collect():
        held = [data_of(4, seed).cuda() for seed in range(4)]
    before = free_mib()
    assert tag.sleep("host") is None
    view = held[3][MIB:]
    del held[3], held[1]
    # A storage lives as long as its views.
    assert settled(runtime, 12 * MIB)["asleep"]["current_bytes"] == 12 * MIB
    assert free_mib() == before + 16
    tag.wake()
    assert free_mib() == before + 4
    assert holds(held[0], 4, 0) and holds(held[1], 4, 2)
    assert torch.equal(view.cpu(), data_of(4, 3)[MIB:])
    del held, view
    assert tag.sleep("host") is None
    assert settled(runtime)["asleep"]["current_bytes"] == 0


def corner(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float32).view(1024, -1)[:, 3:].t()


@alone()
def test_what_sleeps_is_read_and_stays_asleep():
    runtime = dormouse.install().runtime
    weights, cache = runtime.tag("weights"), runtime.tag("kv_cache", backup=False)
    with weights.collect():
        whole = data_of(5, 0).cuda()
        other = data_of(4, 1).cuda()
    with cache.collect():
        block = filled(4)
    floats, wanted = corner(other), corner(data_of(4, 1))
    with pytest.raises(dormouse.StateError, match="asleep in host memory"):
        runtime.read(whole)
    assert weights.sleep("host") is None and cache.sleep("host") is None
    before = free_mib()
    assert torch.equal(runtime.read(whole), data_of(5, 0))
    seen = runtime.read(floats)
    assert seen.stride() == floats.stride() == wanted.stride()
    assert torch.equal(seen.view(torch.int32), wanted.view(torch.int32))
    turned = runtime.read(whole.view(torch.complex64).conj())
    assert turned.is_conj() and torch.equal(turned.conj().view(torch.uint8), data_of(5, 0))
    assert runtime.read(torch.empty(0, 3, device="cuda")).size() == (0, 3)
    with pytest.raises(dormouse.StateError, match="Empty"):
        runtime.read(block)
    assert runtime.query(whole.data_ptr())["state"] == "host"
    assert free_mib() == before
    seen.zero_()
    weights.wake()
    cache.wake()
    assert holds(whole, 5, 0)
    assert holds(other, 4, 1)


@alone()
def test_what_sleeps_in_the_file_is_read_and_stays_asleep():
    # A folder for temporary files may be memory.
    target = Path(__file__).resolve().parents[2] / "target"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        runtime = dormouse.install(nvme_dir=folder, nvme_file_bytes=32 * MIB).runtime
        tag = runtime.tag("weights")
        with tag.collect():
            whole = data_of(5, 0).cuda()
        assert tag.sleep("nvme") is None
        before = free_mib()
        assert torch.equal(runtime.read(whole), data_of(5, 0))
        assert torch.equal(runtime.read(whole[MIB:]), data_of(5, 0)[MIB:])
        assert runtime.query(whole.data_ptr())["state"] == "nvme"
        assert free_mib() == before
        tag.wake()
        assert holds(whole, 5, 0)


@alone()
def test_many_cycles_keep_the_bytes_and_leave_nothing():
    runtime = dormouse.install().runtime
    weights, cache = runtime.tag("weights"), runtime.tag("kv_cache", backup=False)
    with weights.collect():
        held = [data_of(2, seed).cuda() for seed in range(3)]
    with cache.collect():
        block = filled(8)
    before = free_mib()
    for cycle in range(5):
        held[cycle % 3].copy_(data_of(2, 10 + cycle))
        assert weights.sleep("host") is None and cache.sleep("host") is None
        assert free_mib() == before + 14
        cache.wake()
        weights.wake()
        assert free_mib() == before
    assert holds(held[0], 2, 13) and holds(held[1], 2, 14) and holds(held[2], 2, 12)
    assert block.is_cuda
    assert settled(runtime)["tiers"]["host"]["current_bytes"] == 0
