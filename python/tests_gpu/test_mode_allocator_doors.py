"""Torch's other ways to the allocator, in mode allocator."""

from __future__ import annotations

import pytest
import torch
from alone import alone
from conftest import alike

import dormouse

MIB = 1 << 20


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@alone()
def test_the_accelerators_figures_are_those_of_cuda():
    dormouse.install()
    assert torch.accelerator.memory_allocated() == 0
    held = [filled(30), filled(10)]
    del held[0]
    assert torch.accelerator.memory_allocated() == 10 * MIB
    assert torch.accelerator.max_memory_allocated() == 40 * MIB
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() >= 40 * MIB
    assert dict(torch.accelerator.memory_stats()) == dict(torch.cuda.memory_stats())
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 10 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        filled(1 << 24)
    assert torch.accelerator.memory_stats()["num_ooms"] == 1
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.memory_stats()["num_ooms"] == 0


@alone()
def test_the_accelerators_cache_goes_back():
    dormouse.install()
    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    held = filled(30)
    del held
    assert alike(torch.cuda.mem_get_info()[0], before - 30 * MIB)
    torch.accelerator.empty_cache()
    assert alike(torch.cuda.mem_get_info()[0], before)


@alone()
def test_the_fraction_is_the_budgets():
    dormouse.install()
    held = filled(1)
    total = torch.cuda.mem_get_info()[1]
    for wanted in (0.5, 0.25):
        torch.cuda.set_per_process_memory_fraction(wanted)
        assert abs(torch.cuda.get_per_process_memory_fraction() * total - wanted * total) < 1
    assert held.is_cuda


@alone()
def test_what_torch_refuses_to_any_allocator_is_listed():
    installed = dormouse.install()
    held = filled(2)
    (said,) = [each for each in installed.why if each.startswith("unavailable with any")]
    refused = {
        "checkpoints of pools": lambda: torch._C._cuda_getCheckpointState(0, (0, 1)),
        "IPC": lambda: held.untyped_storage()._share_cuda_(),
        "torch.cuda.MemPool": torch.cuda.MemPool,
    }
    assert "torch.backends.cudnn.benchmark" in said
    for name, call in refused.items():
        assert name in said
        with pytest.raises(RuntimeError, match="does not yet support"):
            call()


@alone()
def test_memory_for_other_frameworks():
    dormouse.install()
    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(4 * MIB)
    assert address
    assert torch.cuda.memory_allocated() == before + 4 * MIB
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before


@alone()
def test_a_snapshot_of_a_pool_has_the_blocks_of_its_graphs():
    dormouse.install()
    outside, graphs, inside = filled(30), [], []
    for mib in (20, 10):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            inside.append(outside[: mib * MIB].clone())
    pools = [graph.pool() for graph in graphs]
    for pool, block in zip(pools, inside, strict=True):
        (segment,) = torch.cuda.memory_snapshot(pool)
        assert (segment["address"], segment["segment_pool_id"]) == (block.data_ptr(), pool)
        assert segment["allocated_size"] == block.nbytes

    def ids() -> dict:
        return {each["address"]: each["segment_pool_id"] for each in torch.cuda.memory_snapshot()}

    wanted = {outside.data_ptr(): (0, 0)}
    wanted |= {block.data_ptr(): pool for block, pool in zip(inside, pools, strict=True)}
    assert wanted.items() <= ids().items()
    assert torch.cuda.memory_snapshot((7, 7)) == []
    graphs[0].reset()
    assert torch.cuda.memory_snapshot(pools[0]) == []
    assert ids()[inside[0].data_ptr()] == (0, 0)
