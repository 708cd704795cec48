"""torch's memory statistics in mode allocator: its own names, dormouse's figures."""

from __future__ import annotations

import json

import pytest
import torch
from alone import alone
from conftest import NEW_STATS, run_script

# Imported by name before anything is installed, as trainers do.
from torch.cuda import _memory_viz, max_memory_allocated, memory_allocated, reset_peak_memory_stats

import dormouse

MIB = 1 << 20
BYTES = ("allocated", "active", "requested", "reserved", "inactive_split")


# Of 40 and 24 MiB: current, peak, allocated, freed.
KIB = [mib << 10 for mib in (40, 64, 64, 24)]


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@alone()
def test_figures_follow_the_memory():
    dormouse.install()
    assert memory_allocated() == 0, "before CUDA is in use there is none"
    held = [filled(30), filled(10)]
    assert memory_allocated() == torch.cuda.memory_allocated() == 40 * MIB
    assert torch.cuda.memory_reserved() >= 40 * MIB
    del held[0]
    assert memory_allocated() == 10 * MIB
    assert max_memory_allocated() == 40 * MIB
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved() >= 40 * MIB
    reset_peak_memory_stats()
    assert max_memory_allocated() == 10 * MIB
    again = filled(4)
    del again
    assert max_memory_allocated() == 14 * MIB


@alone()
def test_the_dictionary_has_torchs_names():
    used = torch.cuda.memory_stats_as_nested_dict
    dormouse.install()
    held = torch.empty(3 * MIB + 5, dtype=torch.uint8, device="cuda")
    stats = torch.cuda.memory_stats()
    for name in BYTES:
        assert stats[f"{name}_bytes.all.peak"] >= stats[f"{name}_bytes.all.current"] >= 0
    assert stats["requested_bytes.all.current"] == held.nbytes
    assert stats["allocated_bytes.all.current"] >= held.nbytes
    assert stats["reserved_bytes.all.current"] >= stats["active_bytes.all.current"] >= held.nbytes
    assert (stats["allocation.all.current"], stats["active.all.current"]) == (1, 1)
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)
    assert list(stats) == sorted(stats)
    assert dormouse.memory_stats() == dormouse.memory_stats("cuda:0") == dict(stats)
    assert used()["allocated_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"]


@alone()
def test_what_other_streams_use_is_active_and_what_is_left_of_pages_is_split():
    dormouse.install()
    held = [filled(3), filled(24)]
    held[1].record_stream(torch.cuda.Stream())
    del held[1]
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 3 * MIB
    assert stats["active_bytes.all.current"] == 27 * MIB
    assert (stats["allocation.all.current"], stats["active.all.current"]) == (1, 2)
    torch.cuda.empty_cache()
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] == 3 * MIB
    # A page is 2 MiB, and half of one is nobody's.
    assert stats["inactive_split_bytes.all.current"] == MIB
    assert stats["reserved_bytes.all.current"] == 4 * MIB
    reset_peak_memory_stats()
    stats = torch.cuda.memory_stats()
    assert all(stats[f"{it}_bytes.all.peak"] == stats[f"{it}_bytes.all.current"] for it in BYTES)


@alone()
def test_the_names_are_torchs_own():
    before = torch.empty(1, device="cuda")
    own = torch.cuda.memory_stats()
    dormouse.install()
    ours = dormouse.memory_stats()
    assert before.is_cuda
    assert ours.keys() - NEW_STATS == own.keys() - NEW_STATS
    assert ours["max_split_size"] == own["max_split_size"]


# Sizes on both sides of torch's limit of small blocks, some freed again.
POOLS = """
import json
import torch
{install}
sizes = [1, 513, 700_000, 1 << 20, (1 << 20) + 1, 5 << 20, 30 << 20]
held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
del held[1], held[-1]
print(json.dumps(torch.cuda.memory_stats()))
"""


def test_pools_are_told_apart_as_torch_does():
    own, ours = (
        json.loads(run_script(POOLS.format(install=install)))
        for install in ("", "import dormouse; dormouse.install()")
    )
    for figure in ("requested_bytes", "allocation", "active"):
        for pool in ("small_pool", "large_pool"):
            name = f"{figure}.{pool}.current"
            assert ours[name] == own[name] > 0, name
    for figure in ("allocated_bytes", "active_bytes", "reserved_bytes", "segment"):
        parts = [ours[f"{figure}.{pool}.current"] for pool in ("small_pool", "large_pool")]
        assert min(parts) > 0 and sum(parts) == ours[f"{figure}.all.current"], figure


@alone()
def test_pools_are_those_of_the_snapshot_and_have_no_past():
    installed = dormouse.install()
    held = [filled(1 + 3 * at) for at in range(6)]
    held += [torch.empty(1000 << at, dtype=torch.uint8, device="cuda") for at in range(14)]
    del held[::3]
    stats, segments = torch.cuda.memory_stats(), torch.cuda.memory_snapshot()
    figures = {
        "reserved_bytes": "total_size",
        "allocated_bytes": "allocated_size",
        "active_bytes": "active_size",
        "requested_bytes": "requested_size",
    }
    for kind in ("small", "large"):
        of_kind = [each for each in segments if each["segment_type"] == kind]
        for figure, key in figures.items():
            name = f"{figure}.{kind}_pool"
            assert stats[f"{name}.current"] == sum(each[key] for each in of_kind) > 0, name
        blocks = [block for each in of_kind for block in each["blocks"]]
        live = sum(block["state"] == "active_allocated" for block in blocks)
        assert stats[f"allocation.{kind}_pool.current"] == live
        # As large blocks were freed between others, and small ones.
        assert stats[f"inactive_split_bytes.{kind}_pool.current"] > 0
        assert stats[f"inactive_split.{kind}_pool.current"] > 0
        for name in ("allocated_bytes", "allocation", "segment", "inactive_split"):
            past = [stats[f"{name}.{kind}_pool.{key}"] for key in ("peak", "allocated", "freed")]
            assert past == [stats[f"{name}.{kind}_pool.current"], 0, 0]
    parts = [stats[f"inactive_split.{kind}_pool.current"] for kind in ("small", "large")]
    assert stats["inactive_split.all.current"] == sum(parts)
    assert any("small_pool" in reason and "no past" in reason for reason in installed.why)


@alone()
def test_accumulated_figures_start_again():
    dormouse.install()
    for expected in (1, 2):
        with pytest.raises(torch.OutOfMemoryError):
            filled(1 << 24)
        assert torch.cuda.memory_stats()["num_ooms"] == expected
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["num_ooms"] == 0
    with pytest.raises(torch.OutOfMemoryError):
        filled(1 << 24)
    assert torch.cuda.memory_stats()["num_ooms"] == dormouse.memory_stats()["num_ooms"] == 1


@alone()
def test_torchs_own_summary_has_the_figures():
    dormouse.install()
    held = [filled(40), filled(24)]
    del held[1]
    for abbreviated in (False, True):
        lines = torch.cuda.memory_summary(abbreviated=abbreviated).splitlines()
        (row,) = [line.split("|")[2:6] for line in lines if "Allocated memory" in line]
        assert [cell.split() for cell in row] == [[str(kib), "KiB"] for kib in KIB]
    assert "CUDA OOMs: 0" in torch.cuda.memory_summary(abbreviated=True)


@alone()
def test_totals_count_what_came_and_went():
    dormouse.install()
    held = filled(30)
    for _ in range(2):
        filled(10)
    stats = torch.cuda.memory_stats()

    def of(name: str) -> tuple[int, ...]:
        keys = ("current", "peak", "allocated", "freed")
        return tuple(stats[f"{name}.all.{key}"] for key in keys)

    assert of("allocated_bytes") == (30 * MIB, 40 * MIB, 50 * MIB, 20 * MIB)
    assert of("requested_bytes") == of("allocated_bytes") == of("active_bytes")
    assert of("allocation") == of("active") == (1, 2, 3, 2)
    assert of("reserved_bytes")[2] >= 40 * MIB
    assert of("segment")[0] == of("segment")[2] - of("segment")[3] >= 1
    assert stats["num_device_alloc"] >= 2 and stats["num_device_free"] == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["num_device_free"] >= 1
    torch.cuda.reset_accumulated_memory_stats()
    del held
    stats = torch.cuda.memory_stats()
    assert of("allocated_bytes") == (0, 40 * MIB, 0, 30 * MIB)
    assert of("allocation") == of("active") == (0, 2, 0, 1)
    assert stats["num_device_alloc"] == stats["num_device_free"] == 0


@alone()
def test_a_snapshot_has_what_is_mapped_and_nothing_that_sleeps():
    installed = dormouse.install()
    held = [filled(40), filled(24)]
    tag = installed.runtime.tag("weights")
    tag.add(held[1])
    assert tag.sleep("host") is None

    def blocks() -> dict[int, dict]:
        segments = torch.cuda.memory_snapshot()
        return {block["address"]: block for each in segments for block in each["blocks"]}

    assert blocks().keys() == {held[0].data_ptr()}
    assert blocks()[held[0].data_ptr()]["state"] == "active_allocated"
    # Torch's own reader of snapshots takes it, with the tier's memory as another device's.
    assert "total_allocated: 64.0MiB" in _memory_viz.segsum(torch.cuda.memory._snapshot())
    tag.wake()
    assert blocks().keys() == {each.data_ptr() for each in held}
    addresses = [each.data_ptr() for each in held]
    del held[0]
    assert [blocks()[each]["state"] for each in addresses] == ["inactive", "active_allocated"]


@alone()
def test_other_devices():
    dormouse.install()
    torch.cuda.init()
    with pytest.raises(dormouse.ArgumentError, match="CUDA device 1; accepted: 0 to 0"):
        torch.cuda.memory_stats(1)
    with pytest.raises(dormouse.DeviceError, match="CUDA device 1; torch finds 1"):
        dormouse.memory_stats(1)
    with pytest.raises(dormouse.ArgumentError, match="device 1 cannot be reset; accepted: 0"):
        torch.cuda.reset_peak_memory_stats(1)


@alone()
def test_before_anything_was_allocated_all_is_zero():
    stats = dormouse.memory_stats()
    assert {key: value for key, value in stats.items() if value} == {"max_split_size": -1}
    held = torch.empty(MIB, device="cuda")
    assert held.is_cuda
    assert dormouse.memory_stats() == stats, "torch's own memory is not dormouse's"


@alone()
def test_torch_gets_its_functions_back():
    own = torch._C._cuda_memoryStats
    installed = dormouse.install()
    held = filled(2)
    assert memory_allocated() == held.nbytes
    installed.uninstall_stats()
    installed.uninstall_stats()
    with pytest.raises(RuntimeError, match="does not yet support getDeviceStats"):
        memory_allocated()
    assert torch._C._cuda_memoryStats is own
    assert dormouse.memory_stats()["allocated_bytes.all.current"] == held.nbytes


@alone()
def test_pools_and_copies_leave_torchs_statistics_alone():
    installed = dormouse.install(mode="pool")
    held = filled(3)
    assert torch.cuda.memory_allocated() == held.nbytes
    assert dormouse.memory_stats()["allocated_bytes.all.current"] == 0
    with installed.pool("weights").use():
        inside = filled(30)
    assert inside.is_cuda
    assert dormouse.memory_stats()["allocated_bytes.all.current"] == 30 * MIB
