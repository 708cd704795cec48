"""CUDA bytes in ``torch.profiler``: of torch's own allocator, and the same of ours."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from alone import alone

import dormouse
from dormouse.modes import profiling

MIB = 1 << 20
SMALL_BYTES = 512
# The profiler writes its start and stop to standard error.
QUIET = {"KINETO_LOG_LEVEL": "99"}


def filled(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def profiled(*, memory: bool = True) -> torch.profiler.profile:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=cpu, profile_memory=memory, acc_events=True)


def bytes_by_name(profile: torch.profiler.profile) -> dict[str, int]:
    figures = {each.key: each.self_device_memory_usage for each in profile.key_averages()}
    return {name: figure for name, figure in figures.items() if figure}


def traced(profile: torch.profiler.profile, name: str) -> list[dict]:
    """The ``args`` of all events of this name, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [each["args"] for each in events if each.get("name") == name]


@alone(**QUIET)
def test_a_profile_has_the_bytes_of_torchs_own_allocator():
    dormouse.install(mode="pool")
    check_bytes()


@alone(**QUIET)
def test_a_profile_has_the_bytes_of_ours():
    installed = dormouse.install()
    check_bytes()
    assert not any("profiler" in said for said in installed.why)


def check_bytes() -> None:
    before = filled(10)
    with profiled() as profile:
        held = [filled(30), torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cuda")]
        del before
        held.append(filled(20).view(-1))
        del held[1]
    assert all(each.is_cuda for each in held)
    assert bytes_by_name(profile) == {
        "aten::empty": 50 * MIB + SMALL_BYTES,
        "[memory]": -10 * MIB - SMALL_BYTES,
    }


@alone(**QUIET)
def test_every_report_has_address_and_totals():
    dormouse.install()
    before = filled(10)
    with profiled() as profile:
        held = filled(30)
        totals = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
        addresses = [held.data_ptr(), before.data_ptr()]
        del before
        totals += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    reports = [each for each in traced(profile, "[memory]") if each["Device Type"] == 1]
    assert [each["Bytes"] for each in reports] == [30 * MIB, -10 * MIB]
    assert [each["Addr"] for each in reports] == addresses
    assert [each["Device Id"] for each in reports] == [0, 0]
    seen = [[each["Total Allocated"], each["Total Reserved"]] for each in reports]
    assert sum(seen, []) == totals
    assert totals[0] == totals[2] + 10 * MIB


@alone(**QUIET)
def test_autograds_threads_report_and_those_without_a_profiler_do_not():
    dormouse.install()
    leaf = torch.ones(4 * MIB // 4, device="cuda", requires_grad=True)
    weight, made = torch.ones_like(leaf), []
    with profiled() as profile:
        out = leaf * 2
        out.backward(weight)
        thread = threading.Thread(target=lambda: made.append(filled(64)))
        thread.start()
        thread.join()
    assert made[0].is_cuda
    # The product and, on autograd's thread, the gradient.
    assert leaf.grad is not None and leaf.grad.data_ptr() != weight.data_ptr()
    assert sum(bytes_by_name(profile).values()) == 8 * MIB


@alone(**QUIET, STANDIN_CUDA_TOTAL_BYTES=str(64 * MIB))
def test_a_request_that_finds_no_memory_is_reported():
    dormouse.install()
    with profiled() as profile, pytest.raises(torch.OutOfMemoryError):
        filled(100)
    (report,) = traced(profile, "[OutOfMemory]")
    assert report["Bytes"] == 100 * MIB and report["Device Type"] == 1


@alone(**QUIET)
def test_only_a_profiler_of_memory_that_runs_gets_reports():
    dormouse.install()
    with profiled(memory=False) as profile:
        held = [filled(30)]
    assert bytes_by_name(profile) == {}
    profile = profiled()
    profile.start()
    held.append(filled(20))
    profile.stop()
    held.append(filled(10))
    assert bytes_by_name(profile) == {"aten::empty": 20 * MIB}
    assert all(each.is_cuda for each in held)


@alone(**QUIET)
def test_the_library_is_told_of_every_start_and_stop():
    dormouse.install()
    told = []
    profiling.tell = told.append
    for _ in range(2):
        with profiled():
            assert torch.autograd.profiler._is_profiler_enabled, "torch's own function ran too"
        assert not torch.autograd.profiler._is_profiler_enabled
    assert told == [True, False] * 2


@alone(**QUIET)
def test_a_profiler_may_run_before_the_installation():
    with profiled() as profile:
        dormouse.install()
        held = filled(30)
    assert held.is_cuda
    assert bytes_by_name(profile) == {"aten::empty": 30 * MIB}


@alone(**QUIET)
def test_torch_gets_its_functions_back():
    profiler = torch.autograd.profiler
    own = (profiler._run_on_profiler_start, profiler._run_on_profiler_stop)
    installed = dormouse.install()
    assert profiler._run_on_profiler_start is not own[0]
    profile = profiled()
    profile.start()
    installed.uninstall_stats()
    held = filled(30)
    profile.stop()
    assert held.is_cuda
    assert bytes_by_name(profile) == {}
    assert (profiler._run_on_profiler_start, profiler._run_on_profiler_stop) == own
