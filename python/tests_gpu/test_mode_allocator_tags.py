"""Tensors of mode allocator asleep under a tag: off the GPU, and back at the same addresses."""

from __future__ import annotations

import pytest
import torch
from alone import alone
from conftest import LATE_MS, SLACK_BYTES, alike, busy, random_bytes, settled

import dormouse

MIB = 1 << 20


def free_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@alone()
def test_sleep_takes_the_bytes_off_and_wake_brings_them_back():
    runtime = dormouse.install().runtime
    data = [random_bytes(size, seed=size) for size in (8 * MIB, 100, 5 * MIB + 3)]
    with runtime.tag("weights") as tag:
        with tag.collect():
            weights = [each.cuda() for each in data]
        other = random_bytes(4 * MIB).cuda()
        addresses = [each.data_ptr() for each in weights]
        before, allocated = free_bytes(), torch.cuda.memory_allocated()
        assert tag.sleep("host") is None
        # What is small lies packed among others like it, and stays.
        states = [runtime.query(address)["state"] for address in addresses]
        assert states == ["host", "awake", "host"]
        assert torch.cuda.mem_get_info()[0] >= before + 13 * MIB - SLACK_BYTES
        # Pages of 2 MiB have an end that nobody asked for: it is not copied.
        moved = runtime.stats()["copies"]["device_to_host"]["bytes"]
        assert 13 * MIB < moved < 13 * MIB + 8192
        assert torch.cuda.memory_allocated() <= allocated - 13 * MIB
        assert torch.equal(other.cpu(), random_bytes(4 * MIB))
        tag.wake()
        assert alike(free_bytes(), before)
        assert [each.data_ptr() for each in weights] == addresses
        assert all(torch.equal(a.cpu(), b) for a, b in zip(weights, data, strict=True))


@alone()
def test_what_slept_can_be_written_and_sleep_again():
    runtime = dormouse.install().runtime
    with runtime.tag("weights") as tag:
        weight = random_bytes(6 * MIB).cuda()
        tag.add(weight)
        for seed in range(1, 4):
            data = random_bytes(6 * MIB, seed=seed)
            weight.copy_(data)
            assert tag.sleep("host") is None
            tag.wake()
            assert torch.equal(weight.cpu(), data)


@alone()
def test_without_backup_the_bytes_are_gone():
    runtime = dormouse.install().runtime
    with runtime.tag("cache", backup=False) as tag:
        with tag.collect():
            cache = random_bytes(6 * MIB).cuda()
        before = free_bytes()
        assert tag.sleep("host") is None
        assert runtime.query(cache.data_ptr())["state"] == "empty"
        assert alike(torch.cuda.mem_get_info()[0], before + 6 * MIB)
        tag.wake()
        assert not cache.cpu().any()


@alone()
def test_freeing_what_sleeps_gives_everything_back():
    runtime = dormouse.install().runtime
    with runtime.tag("weights") as tag:
        with tag.collect():
            weight = random_bytes(6 * MIB).cuda()
        assert tag.sleep("host") is None
        del weight
        stats = settled(runtime)
        assert stats["asleep"]["current_bytes"] == 0
        assert stats["tiers"]["host"]["current_bytes"] == 0


def sleeps_with_what_is_written_late(allocated_on, written_on) -> None:
    runtime = dormouse.install().runtime
    data = random_bytes(6 * MIB, pinned=True, seed=9)
    with runtime.tag("weights") as tag:
        with torch.cuda.stream(allocated_on), tag.collect():
            weight = torch.zeros(6 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(written_on):
            busy(LATE_MS)
            weight.copy_(data, non_blocking=True)
        assert not (written_on or torch.cuda.current_stream()).query()
        assert tag.sleep("host") is None
        assert runtime.query(weight.data_ptr())["state"] == "host"
        torch.cuda.synchronize()
        tag.wake()
        assert torch.equal(weight.cpu(), data)


@alone()
def test_sleep_waits_for_the_current_stream():
    sleeps_with_what_is_written_late(None, None)


@alone()
def test_sleep_waits_for_the_stream_it_was_allocated_on():
    dormouse.install()
    side = torch.cuda.Stream()
    sleeps_with_what_is_written_late(side, side)


@alone()
def test_sleep_waits_for_a_stream_that_nobody_recorded():
    dormouse.install()
    sleeps_with_what_is_written_late(None, torch.cuda.Stream())


@alone()
def test_another_stream_may_read_what_woke():
    runtime = dormouse.install().runtime
    data = random_bytes(6 * MIB)
    side = torch.cuda.Stream()
    with runtime.tag("weights") as tag:
        with tag.collect():
            weight = data.cuda()
        assert tag.sleep("host") is None
        tag.wake()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = weight.clone()
        side.synchronize()
        assert torch.equal(copy.cpu(), data)


@alone()
def test_a_module_and_its_optimizer_sleep_between_steps():
    """Kernels do nothing here: what a step would have left is copied in."""
    runtime = dormouse.install().runtime
    with runtime.tag("weights") as weights, runtime.tag("optimizer") as moments:
        with weights.collect():
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(2))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with moments.collect():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        held = [*model.parameters(), *(s[n] for s in states for n in ("exp_avg", "exp_avg_sq"))]
        assert all(each.is_cuda for each in held)
        addresses = [each.data_ptr() for each in held]
        for cycle in range(2):
            data = [random_bytes(each.nbytes, seed=cycle) for each in held]
            for each, wanted in zip(held, data, strict=True):
                each.detach().view(-1).view(torch.uint8).copy_(wanted)
            before = free_bytes()
            assert moments.sleep("host") is None
            assert weights.sleep("host") is None
            assert free_bytes() >= before + 3 * 2 * 4 * MIB - SLACK_BYTES
            weights.wake()
            moments.wake()
            assert [each.data_ptr() for each in held] == addresses
            for each, wanted in zip(held, data, strict=True):
                assert torch.equal(each.detach().cpu().view(-1).view(torch.uint8), wanted)


@alone()
def test_the_innermost_tag_has_it():
    runtime = dormouse.install().runtime
    with runtime.tag("outer") as outer, runtime.tag("inner") as inner:
        with outer.collect():
            first = random_bytes(4 * MIB, seed=1).cuda()
            with inner.collect():
                second = random_bytes(4 * MIB, seed=2).cuda()
        assert inner.sleep("host") is None
        assert torch.equal(first.cpu(), random_bytes(4 * MIB, seed=1))
        assert outer.sleep("host") is None
        inner.wake()
        assert torch.equal(second.cpu(), random_bytes(4 * MIB, seed=2))
        outer.wake()
        assert torch.equal(first.cpu(), random_bytes(4 * MIB, seed=1))


@alone()
def test_memory_that_is_not_ours_is_refused():
    runtime = dormouse.install(mode="copy").runtime
    torchs = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    with runtime.tag("weights") as tag:
        for tensor in (torchs, torchs.cpu()):
            with pytest.raises(dormouse.MemoryTierError, match="no live block"):
                tag.add(tensor)
        assert tag.sleep("host") is None
    assert not torchs.cpu().any()


@alone()
def test_a_name_is_used_again_once_it_is_free():
    runtime = dormouse.install().runtime
    weight = random_bytes(4 * MIB).cuda()
    for _ in range(2):
        with runtime.tag("weights") as tag:
            with pytest.raises(dormouse.ArgumentError, match="not in use"):
                runtime.tag("weights")
            tag.add(weight)
            assert tag.sleep("host") is None
        # A tag that ends wakes what sleeps.
        assert torch.equal(weight.cpu(), random_bytes(4 * MIB))
