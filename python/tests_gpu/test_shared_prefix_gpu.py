"""A shared-prefix step on a GPU: it runs, sleeps, wakes unchanged what it needs, leaves nothing.

Kernels do nothing on the stand-in, so numbers mean nothing here; the bytes of what sleeps are put
there by copies.
"""

from __future__ import annotations

import ctypes
import time
import warnings

import pytest
import torch
from alone import alone
from conftest import IS_STANDIN, busy, random_bytes, settled

import dormouse
from dormouse import _native as native

# Imported by each test; the test run itself needs none of them.
BEFORE_FORK = ("models", "dormouse.hf")

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
ASLEEP_SECONDS_MAX = 20
LATE_MS = 50
SOURCE_BYTES = 32 << 20  # more than any one storage


def model_and_group(dtype: torch.dtype = torch.float32, **changes):
    from models import group, tiny

    from dormouse.hf import check

    if IS_STANDIN:
        import blas  # noqa: F401  puts the products in place

        # Kernels do nothing: both ways of the check would compute whatever memory holds.
        check.Check.run = lambda _, reason: check.Checked(reason, 0.0, 0, 0, dtype, 0.0, 0.0)
    return tiny(dtype=dtype, **(WIDE | changes)).cuda(), group(600, (40, 24, 33, 8), seed=3)


def loss_fn(logits, labels, i):
    assert logits.is_cuda
    assert labels.device == logits.device
    assert logits.shape[0] == labels.shape[0]
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def copy(to: int, source: int, nbytes: int) -> None:
    """Between pinned memory and device, when the current stream gets to it."""
    pointers = [ctypes.c_void_p(each) for each in (to, source)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    either_way = 4
    queue = ctypes.CDLL(None).cudaMemcpyAsync
    assert queue(*pointers, ctypes.c_size_t(nbytes), either_way, stream) == 0


class Watch:
    """Fills every storage that phase A names dormant, late, and reads it again when C may: both in
    the order of the current stream alone."""

    def __init__(self, runtime):
        self.runtime = runtime
        # Made before, so that the host is ahead of the stream.
        self.source = random_bytes(SOURCE_BYTES, pinned=True)
        self.wanted: dict[int, torch.Tensor] = {}
        self.layers: dict[int, int] = {}
        self.checked: set[int] = set()
        watch, dormant, mark = self, dormouse.Prefix.dormant, dormouse.Prefix.mark

        def fill_after(node, layer, addresses):
            dormant(node, layer, addresses)
            watch.fill(layer, addresses)

        def check_after(node, edge, layer):
            mark(node, edge, layer)
            if edge is native.Edge.BACKWARD_BEGIN:
                # The layer below is awake as well: its output is this one's to consume.
                watch.check({layer, layer - 1})

        dormouse.Prefix.dormant, dormouse.Prefix.mark = fill_after, check_after

    def fill(self, layer: int, addresses) -> None:
        busy(LATE_MS)
        for address in addresses:
            if address in self.wanted:
                continue
            try:
                block = self.runtime.query(address)
            except dormouse.MemoryTierError:
                continue  # not dormouse's: it stays awake
            if block["role"] == "dormant":
                begin = 4099 * len(self.wanted)
                data = self.source[begin : begin + block["requested_bytes"]]
                assert len(data) == block["requested_bytes"]
                copy(address, data.data_ptr(), data.nbytes)
                self.wanted[address], self.layers[address] = data, layer

    def check(self, layers: set[int]) -> None:
        for address, data in self.wanted.items():
            if self.layers[address] in layers and address not in self.checked:
                assert self.runtime.query(address)["state"] == "awake"
                seen = torch.zeros_like(data, pin_memory=True)
                copy(seen.data_ptr(), address, data.nbytes)
                torch.cuda.current_stream().synchronize()
                assert torch.equal(seen, data), f"{data.nbytes} bytes of {layers}"
                self.checked.add(address)

    def wait_until_asleep(self) -> None:
        """Kernels take no time here, so phase B is over before the first byte has left."""
        deadline = time.monotonic() + ASLEEP_SECONDS_MAX
        while {self.runtime.query(address)["state"] for address in self.wanted} != {"host"}:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def bytes(self) -> int:
        return sum(data.nbytes for data in self.wanted.values())


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def free_bytes_in_b(model, runtime, case) -> int:
    """While the first microbatch of a step without sleep runs."""
    from dormouse.hf import SharedPrefix

    free = []

    def loss(logits, labels, i):
        free.append(free_bytes())
        return loss_fn(logits, labels, i)

    SharedPrefix(model, runtime, sleep=False).backward(case, loss, microbatch_tokens=40)
    model.zero_grad(set_to_none=True)
    return free[0]


def step_asleep(dtype: torch.dtype) -> None:
    from dormouse.hf import SharedPrefix

    runtime = dormouse.install().runtime
    model, case = model_and_group(dtype)
    awake = free_bytes_in_b(model, runtime, case)
    watch, asleep, phases = Watch(runtime), [], []

    def loss(logits, labels, i):
        if not asleep:
            watch.wait_until_asleep()
            asleep.append(free_bytes())
        return loss_fn(logits, labels, i)

    report = SharedPrefix(model, runtime).backward(
        case, loss, microbatch_tokens=40, on_phase=phases.append
    )
    node = report.prefix
    assert phases == ["A", "B", "C", "end"]
    assert watch.bytes() > 8 << 20
    assert watch.checked == watch.wanted.keys(), "some were never woken for their layer"
    assert node["dormant_bytes"] >= watch.bytes()
    assert node["asleep_bytes_peak"] == node["dormant_bytes"]
    assert node["tier_bytes_peak"]["host"] == node["dormant_bytes"]
    assert node["left_asleep_bytes"] == 0
    assert report.notes == []
    assert report.counts["microbatches"] == 3
    # Awake they are packed: what is gained is what they hold, less the ends of pages.
    gained = asleep[0] - awake
    assert gained >= 0.95 * watch.bytes(), f"{gained} of {watch.bytes()} bytes are off the GPU"
    assert all(p.grad is None or p.grad.is_cuda for p in model.parameters())


@alone()
def test_fp32_sleeps_and_wakes_unchanged():
    step_asleep(torch.float32)


@alone()
def test_bf16_sleeps_and_wakes_unchanged():
    step_asleep(torch.bfloat16)


@alone()
def test_fp64_sleeps_and_wakes_unchanged():
    step_asleep(torch.float64)


@alone()
def test_many_steps_leave_nothing_behind():
    from dormouse.hf import SharedPrefix

    runtime = dormouse.install().runtime
    model, case = model_and_group()
    shared, allocated = SharedPrefix(model, runtime), []
    for _ in range(4):
        shared.backward(case, loss_fn, microbatch_tokens=40)
        torch.cuda.synchronize()
        stats = settled(runtime)
        assert stats["asleep"]["current_bytes"] == 0
        assert stats["tiers"]["host"]["current_bytes"] == 0
        assert stats["roles"]["dormant"]["current_bytes"] == 0
        assert stats["roles"]["boundary_grad"]["current_bytes"] == 0
        allocated.append(stats["allocated"]["current_bytes"])
    assert len(set(allocated)) == 1
    gradients = sum(p.grad is not None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    after = runtime.stats()["allocated"]
    assert gradients > 0
    assert after["current_bytes"] < allocated[-1]


@alone()
def test_on_a_stream_of_its_own():
    from dormouse.hf import SharedPrefix

    runtime = dormouse.install().runtime
    model, case = model_and_group()
    torch.cuda.synchronize()
    watch, waited = Watch(runtime), []

    def loss(logits, labels, i):
        assert torch.cuda.current_stream() == side
        if not waited:
            waited.append(watch.wait_until_asleep())
        return loss_fn(logits, labels, i)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        report = SharedPrefix(model, runtime).backward(case, loss, microbatch_tokens=40)
    assert report.prefix["asleep_bytes_peak"] == report.prefix["dormant_bytes"] > 8 << 20
    assert watch.checked == watch.wanted.keys()


@alone()
def test_microbatches_do_not_wait_for_the_gpu():
    from dormouse.hf import SharedPrefix

    runtime = dormouse.install().runtime
    model, case = model_and_group()
    shared = SharedPrefix(model, runtime)
    shared.backward(case, loss_fn, microbatch_tokens=40)

    warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")

    def phase(name):
        torch.cuda.set_sync_debug_mode("error" if name == "B" else "default")

    report = shared.backward(case, loss_fn, microbatch_tokens=40, on_phase=phase)
    assert isinstance(report.loss, float)

    def waits(logits, labels, i):
        loss = loss_fn(logits, labels, i)
        loss.item()
        return loss

    with pytest.raises(RuntimeError, match="synchroniz"):
        shared.backward(case, waits, microbatch_tokens=40, on_phase=phase)
    torch.cuda.set_sync_debug_mode("default")


@alone()
def test_bf16_microbatches_do_not_wait_once_kernels_are_chosen():
    from models import group

    from dormouse.hf import SharedPrefix, attention_choices, measured

    # Kernels do nothing here, so none would serve.
    measured._Measurement._compare = lambda *_: None
    runtime = dormouse.install().runtime
    model, case = model_and_group(torch.bfloat16)
    shared = SharedPrefix(model, runtime)
    shared.backward(case, loss_fn, microbatch_tokens=80)
    chosen = attention_choices()
    assert all(each["kernel"] for each in chosen)
    # A GPU may have a faster one.
    assert not IS_STANDIN or {each["kernel"] for each in chosen} == {"flash 2"}
    assert {each["calls"].partition(",")[0] for each in chosen} == {"all keys", "causal", "pieces"}
    warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")

    def phase(name):
        torch.cuda.set_sync_debug_mode("error" if name == "B" else "default")

    # Other lengths, whose first rows have to be copied to the GPU.
    other = group(590, (39, 26, 34, 10), seed=4)
    shared.backward(other, loss_fn, microbatch_tokens=80, on_phase=phase)
    assert attention_choices() == chosen


@alone()
def test_autocast_is_probed_apart():
    from dormouse.hf import SharedPrefix

    runtime = dormouse.install().runtime
    model, case = model_and_group()
    shared = SharedPrefix(model, runtime)
    shared.backward(case, loss_fn, microbatch_tokens=40)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        report = shared.backward(case, loss_fn, microbatch_tokens=40)
    assert report.notes == []
    assert report.prefix["dormant_bytes"] > 8 << 20
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shared.backward(case, loss_fn, microbatch_tokens=40)
    assert [key[-1] for key in shared._probes] == [None, torch.bfloat16]


@alone()
def test_without_the_allocator_nothing_sleeps_and_it_still_runs():
    from dormouse.hf import SharedPrefix

    installed = dormouse.install(mode="copy")
    model, case = model_and_group()
    shared = SharedPrefix(model, installed.runtime)
    with pytest.warns(RuntimeWarning, match="nothing slept: dormouse is installed in mode 'copy'"):
        report = shared.backward(case, loss_fn, microbatch_tokens=40)
    assert report.prefix["dormant_bytes"] == 0
    assert report.prefix["refused_count"] > 0


@alone()
def test_a_microbatch_has_more_rows_than_on_a_cpu():
    from dormouse.hf import SharedPrefix

    model, case = model_and_group()
    shared = SharedPrefix(model, dormouse.Runtime(device="cuda"), sleep=False)
    losses = lambda logits, labels, i, g: loss_fn(logits, labels, i)  # noqa: E731
    assert shared.step([case], losses).microbatch_tokens == 4096
    assert shared.step([case], losses, microbatch_tokens=40).microbatch_tokens == 40


@alone()
def test_mixed_and_mismatching_devices_are_refused():
    from models import group, tiny

    from dormouse.hf import SharedPrefix, UnsupportedModelError

    def refused(model, runtime, match):
        with pytest.raises(UnsupportedModelError, match=match):
            SharedPrefix(model, runtime).backward(group(), loss_fn)
        assert all(p.grad is None for p in model.parameters())

    runtime = dormouse.install().runtime
    refused(tiny(), runtime, "on cpu with a runtime of cuda:0")
    half = tiny()
    half.model.layers[1].cuda()
    refused(half, runtime, "on cpu, cuda:0 with a runtime of cuda:0")
    narrow = tiny(head_dim=20).cuda()
    refused(narrow, runtime, "head_dim 20 .*accepted: multiples of 8 up to 256")
    with dormouse.Runtime() as host:
        refused(tiny().cuda(), host, "on cuda:0 with a runtime of cpu")
