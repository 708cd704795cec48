"""A layer's tensors asleep between its forward and its backward, in mode allocator."""

from __future__ import annotations

import time

import torch
from alone import alone
from conftest import random_bytes

import dormouse
from dormouse import _native as native
from dormouse.runtime import Prefix

KIB = 1 << 10
SIZES_KIB = (300, 128, 700, 68)
PATIENCE_S = 20


@alone()
def test_small_tensors_of_a_layer_leave_as_one_copy():
    runtime = dormouse.install().runtime
    data = [random_bytes(kib * KIB, seed=kib) for kib in SIZES_KIB]
    node = Prefix(runtime, None, 1)
    node.enter(native.Phase.A)
    node.mark(native.Edge.FORWARD_BEGIN, 0)
    saved = [each.cuda() for each in data]
    node.dormant(0, [each.data_ptr() for each in saved])
    node.mark(native.Edge.FORWARD_END, 0)
    node.enter(native.Phase.B)
    deadline = time.monotonic() + PATIENCE_S
    while runtime.stats()["copies"]["device_to_host"]["count"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    moved = runtime.stats()["copies"]["device_to_host"]
    # Each has pages of 2 MiB, of which what was asked for is copied.
    assert (moved["count"], moved["bytes"]) == (1, sum(SIZES_KIB) * KIB)
    node.enter(native.Phase.C)
    node.mark(native.Edge.BACKWARD_BEGIN, 0)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(saved, data, strict=True))
    node.mark(native.Edge.BACKWARD_END, 0)
    report = node.report()
    assert (report["accepted_count"], report["refused_count"]) == (4, 0)
    node.close()
