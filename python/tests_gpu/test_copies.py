"""Copies between host and device: the right bytes, and not before their turn."""

from __future__ import annotations

import pytest
import torch
from conftest import LATE_MS, busy, random_bytes

SIZES = [1, 4097, (3 << 20) + 5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_there_and_back(size, pinned, non_blocking):
    source = random_bytes(size, pinned=pinned)
    assert source.is_pinned() == pinned
    back = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    back.copy_(source.to("cuda", non_blocking=non_blocking), non_blocking=non_blocking)
    torch.cuda.synchronize()
    assert torch.equal(back, source)


def test_a_part_goes_to_its_place():
    source = random_bytes(10_000)
    device = torch.zeros(10_000, dtype=torch.uint8).cuda()
    device[101:7001] = source[3:6903].cuda()
    wanted = torch.zeros_like(source)
    wanted[101:7001] = source[3:6903]
    assert torch.equal(device.cpu(), wanted)


def test_on_the_device():
    source = random_bytes(70_000)
    device = source.cuda()
    twin = device.clone()
    device.copy_(torch.zeros_like(source))
    assert torch.equal(twin.cpu(), source)
    assert not device.cpu().any()


def test_nothing_to_copy():
    assert torch.empty(0).cuda().cpu().shape == (0,)


def test_a_copy_out_waits_its_turn():
    source = random_bytes(1 << 20)
    device = source.cuda()
    back = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    busy(LATE_MS)
    back.copy_(device, non_blocking=True)
    assert not back.any()
    torch.cuda.synchronize()
    assert torch.equal(back, source)


def test_a_copy_in_reads_pinned_memory_late():
    first, second = random_bytes(1 << 20, seed=1), random_bytes(1 << 20, seed=2)
    source = first.pin_memory()
    device = torch.empty_like(source, device="cuda")
    busy(LATE_MS)
    device.copy_(source, non_blocking=True)
    source.copy_(second)
    assert torch.equal(device.cpu(), second)


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_in_is_done_with_pageable_memory_when_it_returns(size):
    source = random_bytes(size)
    kept = source.clone()
    device = torch.empty_like(source, device="cuda")
    busy(LATE_MS)
    device.copy_(source, non_blocking=True)
    source.add_(1)
    assert torch.equal(device.cpu(), kept)


def test_a_copy_out_to_pageable_memory_is_done_when_it_returns():
    source = random_bytes(1 << 20)
    device = source.cuda()
    back = torch.zeros_like(source)
    busy(LATE_MS)
    back.copy_(device, non_blocking=True)
    assert torch.equal(back, source)
