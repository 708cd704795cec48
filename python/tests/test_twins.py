"""Gradients that twins collect over passes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dormouse.hf.twins import Twins

PASSES = 100


def collected(*, sums_wide: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the twin of a weight collected over passes, and the sum in FP64."""
    layer = torch.nn.Linear(4, 3, dtype=dtype)
    twins = Twins(layer, sums_wide=sums_wide)
    generator = torch.Generator().manual_seed(0)
    wanted = torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(PASSES):
        row = torch.rand(4, generator=generator).to(dtype)
        with twins.in_place():
            layer(row).sum().backward()
        wanted += row.double().expand(3, 4)
    assert layer.weight.grad is None
    found = twins.take()[0]
    assert found.dtype is dtype
    assert twins.gradient_bytes == 0
    return found.double(), wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_wide_sums_are_rounded_once(dtype):
    found, wanted = collected(sums_wide=True, dtype=dtype)
    # Below FP32 the sum of a hundred is exact beside one rounding.
    roundings = 1 if dtype is torch.bfloat16 else PASSES
    torch.testing.assert_close(found, wanted, rtol=roundings * torch.finfo(dtype).eps, atol=0)


def test_sums_below_fp32_round_each_time():
    found, wanted = collected(sums_wide=False, dtype=torch.bfloat16)
    error = ((found - wanted).abs() / wanted).max()
    # One rounding is half of it at most.
    assert error > torch.finfo(torch.bfloat16).eps


def test_bytes_of_wide_sums_count():
    layer = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    twins = Twins(layer, sums_wide=True)
    with twins.in_place():
        layer(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
    assert twins.gradient_bytes == twins.gradient_bytes_max == (12 + 3) * torch.float32.itemsize


@pytest.mark.parametrize("sums_wide", [False, True])
def test_twins_are_freed_with_what_they_share(sums_wide):
    layer = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    twins = Twins(layer, sums_wide=sums_wide)
    with twins.in_place():
        layer(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
    twins.take()
    storage = StorageWeakRef(layer.weight.untyped_storage())
    # As frameworks that shard weights free them.
    layer.weight.data = torch.empty(0, dtype=torch.bfloat16)
    del twins
    gc.collect()
    assert storage.expired()
