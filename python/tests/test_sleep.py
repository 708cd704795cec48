"""Sleeping in place: nothing changes but the memory held, and failures lose nothing."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch
from conftest import NVME_DIR
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny

import dormouse
from dormouse.hf import SharedPrefix

# Large enough that a layer's saved tensors are blocks of the heap.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


def wide(**changes):
    return tiny(dtype=torch.float32, **(WIDE | changes))


def long_group(seed: int = 3):
    return group(600, (40, 24, 33, 8), seed=seed)


def identical(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def step(model, runtime, case, *, sleep: bool, loss=loss_fn, **options):
    report = SharedPrefix(model, runtime, sleep=sleep).backward(case, loss, **options)
    return take_gradients(model), report


def test_asleep_equals_awake_bit_for_bit(runtime):
    model, case = wide(num_hidden_layers=8), long_group()
    awake, awake_report = step(model, runtime, case, sleep=False, microbatch_tokens=40)
    asleep, report = step(model, runtime, case, sleep=True, microbatch_tokens=40)
    assert identical(asleep, awake)
    assert awake_report.prefix["dormant_bytes"] == 0
    assert report.prefix["dormant_bytes"] > 8 << 20
    assert report.prefix["asleep_bytes_peak"] >= 0.95 * report.prefix["dormant_bytes"]
    assert report.prefix["tier_bytes_peak"]["nvme"] >= 0.95 * report.prefix["dormant_bytes"]
    assert report.notes == []


def test_what_sleeps_is_what_the_prefix_saved(runtime):
    """Most of the memory that phase A keeps for backward is found and put to sleep."""
    model, case = wide(), long_group()
    shared = SharedPrefix(model, runtime)
    shared.backward(case, loss_fn)
    model.zero_grad(set_to_none=True)
    kept = {}

    def note(phase):
        runtime.trim()
        kept[phase] = runtime.stats()["allocated"]["current_bytes"]

    awake = SharedPrefix(model, runtime, sleep=False)
    awake.backward(case, loss_fn, on_phase=note)
    saved = kept["B"] - kept["A"]
    model.zero_grad(set_to_none=True)
    report = shared.backward(case, loss_fn)
    # Boundary tensors are awake, and each has an FP32 accumulator of its size.
    boundary = 2 * report.prefix["boundary_bytes"]
    assert report.prefix["dormant_bytes"] >= 0.85 * (saved - boundary)


def test_phase_b_sees_the_memory_gone(runtime):
    model, case = wide(), long_group()
    seen = []

    def loss(logits, labels, i):
        seen.append(runtime.stats()["asleep"]["current_bytes"])
        return loss_fn(logits, labels, i)

    _, report = step(model, runtime, case, sleep=True, loss=loss, microbatch_tokens=40)
    assert max(seen) >= 0.5 * report.prefix["dormant_bytes"]
    assert runtime.stats()["asleep"]["current_bytes"] == 0


def test_many_steps_leave_nothing_behind(runtime):
    model = wide()
    shared = SharedPrefix(model, runtime)
    for seed in range(3):
        shared.backward(long_group(seed), loss_fn)
    before = runtime.stats()
    for seed in range(6):
        shared.backward(long_group(seed), loss_fn)
    after = runtime.stats()
    assert after["asleep"]["current_bytes"] == 0
    assert after["tiers"]["nvme"]["current_bytes"] == 0
    assert after["nvme_written_bytes"] > before["nvme_written_bytes"] > 0
    assert after["nvme_write_budget_bytes"] == 0
    assert after["allocated"]["current_bytes"] <= before["allocated"]["current_bytes"] + (1 << 20)


def test_weights_cached_by_autocast_stay_awake(runtime):
    """Under one autocast context the casts A saved are reused by B: the probe must find them."""
    model, case = wide(), long_group()
    results = []
    for sleep in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(
                step(
                    model,
                    runtime,
                    case,
                    sleep=sleep,
                    loss=lambda logits, labels, i: loss_fn(logits.float(), labels, i),
                )
            )
    (awake, _), (asleep, report) = results
    assert identical(asleep, awake)
    assert report.prefix["asleep_bytes_peak"] > 4 << 20


def test_an_error_in_the_loss_releases_everything(runtime):
    model, case = wide(), long_group()

    def broken(logits, labels, i):
        raise ZeroDivisionError("a bug in the trainer's loss")

    shared = SharedPrefix(model, runtime)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            shared.backward(case, broken)
        model.zero_grad(set_to_none=True)
    stats = runtime.stats()
    assert stats["asleep"]["current_bytes"] == 0
    assert stats["tiers"]["nvme"]["current_bytes"] == 0
    assert identical(
        step(model, runtime, case, sleep=True)[0], step(model, runtime, case, sleep=False)[0]
    )


def nvme_fd() -> int:
    """The unlinked file of the runtime under test."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(str(NVME_DIR)) and target.endswith("(deleted)"):
            return int(entry.name)
    raise AssertionError("no unlinked file under the test directory is open")


ASLEEP_WAIT_S = 60


def damaged_step(runtime, damage):
    """A step whose file is damaged once, when all that sleeps is written: a write that is still on
    its way would make a file that was cut short longer again. Returns the error's message and the
    report of the step after it."""
    model, case = wide(), long_group()
    _, whole = step(model, runtime, case, sleep=True, microbatch_tokens=24)
    most_bytes = whole.prefix["asleep_bytes_peak"]
    assert most_bytes > 8 << 20
    model.zero_grad(set_to_none=True)
    pending = [damage]

    def loss(logits, labels, i):
        if pending:
            deadline = time.monotonic() + ASLEEP_WAIT_S
            while runtime.stats()["asleep"]["current_bytes"] < most_bytes:
                assert time.monotonic() < deadline, "not all of the prefix fell asleep"
                time.sleep(0.001)
            pending.pop()(nvme_fd())
        return loss_fn(logits, labels, i)

    with pytest.raises(dormouse.StorageError) as caught:
        step(model, runtime, case, sleep=True, loss=loss, microbatch_tokens=24)
    assert not pending, "nothing was asleep when the file should have been damaged"
    message = str(caught.value)
    del caught
    model.zero_grad(set_to_none=True)
    again, report = step(model, runtime, case, sleep=True)
    assert identical(again, step(model, runtime, case, sleep=False)[0])
    return message, report


def test_a_changed_byte_is_an_error_and_never_a_wrong_gradient(runtime):
    def flip(fd):
        size = os.fstat(fd).st_size
        with Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as file:
            for offset in range(0, min(size, 64 << 20), 4096):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x40]))

    message, report = damaged_step(runtime, flip)
    assert "checksum" in message.lower() or "crc" in message.lower()
    assert report.prefix["tier_bytes_peak"]["nvme"] > 0


def test_a_file_cut_short_behind_our_back(runtime):
    message, _ = damaged_step(runtime, lambda fd: os.truncate(f"/proc/self/fd/{fd}", 0))
    assert "the file ends 0 bytes into" in message


def test_the_dense_gradient_is_met_while_asleep(runtime):
    model, case = tiny(dtype=torch.float64, **WIDE), long_group()
    dense_backward(model, case)
    dense = take_gradients(model)
    asleep, report = step(model, runtime, case, sleep=True)
    assert report.prefix["asleep_bytes_peak"] > 8 << 20
    assert distance(asleep, dense) <= 1e-10


class GrowingCache(torch.nn.Module):
    """Scales its input by a table it keeps and rebuilds only when a longer input comes."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner
        self.table = None

    def forward(self, x):
        rows = x.shape[1]
        if self.table is None or len(self.table) < rows:
            self.table = torch.linspace(0.5, 1.5, x.shape[2]).repeat(rows, 1)
        return self.inner(x) * self.table[:rows]


@pytest.mark.slow
def test_a_cache_built_in_a_and_read_in_b_stays_awake(runtime):
    """Its table is allocated in a layer's window and saved by the graph, and B reads it."""
    results = []
    for sleep in (False, True):
        model = wide()
        model.model.layers[1].mlp = GrowingCache(model.model.layers[1].mlp)
        results.append(step(model, runtime, long_group(), sleep=sleep, microbatch_tokens=40))
    (awake, _), (asleep, report) = results
    assert identical(asleep, awake)
    assert report.prefix["asleep_bytes_peak"] > 8 << 20


def test_the_probe_is_what_keeps_that_cache_awake(runtime):
    model = wide()
    cache = GrowingCache(model.model.layers[1].mlp)
    model.model.layers[1].mlp = cache
    shared = SharedPrefix(model, runtime)
    states = []

    def loss(logits, labels, i):
        states.append(runtime.query(cache.table.data_ptr())["role"])
        return loss_fn(logits, labels, i)

    shared.backward(long_group(), loss, microbatch_tokens=40)
    assert set(states) == {"none"}
    # Weights, K, V and the rotary tables are touched as well; this layer's table is on top.
    plain = SharedPrefix(wide(), runtime)
    plain.backward(long_group(), loss_fn, microbatch_tokens=40)
    (probe,), (plain_probe,) = shared._probes.values(), plain._probes.values()
    assert len(probe.touched[1]) == len(plain_probe.touched[1]) + 1


@pytest.mark.parametrize("in_cycle", [False, True])
def test_what_a_hook_keeps_stays_awake(runtime, in_cycle):
    """A loss may read it. What only a cycle of references holds is held by nobody."""
    model, kept, roles = wide(), [], []

    def keep(module, args):
        if in_cycle:
            cycle = [args[0].detach()]
            cycle.append(cycle)
        else:
            kept.append(args[0].detach())

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(keep)

    def loss(logits, labels, i):
        found = [runtime.query(each.data_ptr())["role"] for each in kept if each.shape[1] > 500]
        roles.extend(found)
        return loss_fn(logits, labels, i)

    _, plain = step(wide(), runtime, long_group(), sleep=True, microbatch_tokens=40)
    gc.collect()
    _, report = step(model, runtime, long_group(), sleep=True, loss=loss, microbatch_tokens=40)
    own = 0 if in_cycle else 599 * 512 * 4
    assert set(roles) == (set() if in_cycle else {"none"})
    assert own <= plain.prefix["dormant_bytes"] - report.prefix["dormant_bytes"] <= 1.1 * own
    assert report.prefix["stray_wakes"] == 0 and report.notes == []


@pytest.mark.slow
@pytest.mark.parametrize("combine", [torch.add, torch.mul])
def test_what_later_layers_read_stays_awake(runtime, combine):
    """A skip connection over four layers: its source would be asleep when it is read."""
    results = []
    for sleep in (False, True):
        model, kept = wide(num_hidden_layers=6), []
        layers = model.model.layers
        layers[0].register_forward_hook(lambda module, args, out, kept=kept: kept.append(out))
        layers[4].register_forward_pre_hook(
            lambda module, args, kept=kept: (args[0] + 0.1 * combine(args[0], kept.pop()),)
        )
        results.append(step(model, runtime, long_group(), sleep=sleep, microbatch_tokens=40))
    (awake, _), (asleep, report) = results
    assert identical(asleep, awake)
    assert report.prefix["asleep_bytes_peak"] > 8 << 20


def test_what_a_layer_returned_stays_awake_for_the_second_next(runtime):
    """Layer 1 has saved it, and it falls asleep with layer 0, before layer 2 reads it."""
    model, kept, roles = wide(), [], set()
    layers = model.model.layers
    layers[0].register_forward_hook(lambda module, args, out: kept.append(out))

    def read(module, args):
        out = kept.pop()
        if out.shape[1] > 500:
            roles.add(runtime.query(out.data_ptr())["role"])
        return (args[0] + 0.1 * out,)

    layers[2].register_forward_pre_hook(read)
    report = SharedPrefix(model, runtime).backward(long_group(), loss_fn, microbatch_tokens=40)
    assert roles == {"none"}
    assert report.prefix["stray_wakes"] == 0
    assert report.prefix["dormant_bytes"] > 4 << 20
