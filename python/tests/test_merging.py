"""Merges of two parts of attention by the library: against FP64, and where they do not serve."""

from __future__ import annotations

import math

import pytest
import torch
from models import largest

from dormouse import _native as native
from dormouse.errors import ArgumentError
from dormouse.hf import attention, merging
from dormouse.hf.row_ranges import RangeAttention

LOW = [torch.bfloat16, torch.float16]


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(merging, "KINDS", {"cpu"})
    monkeypatch.setattr(merging, "_without", set())


def parts(dtype, heads=3, rows=5, width=8):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    outs = [draw(1, heads, rows, width).to(dtype) for _ in range(2)]
    lses = [3 * draw(1, heads, rows).float() for _ in range(2)]
    return outs, lses


@pytest.mark.parametrize("width", [8, 7, 1])
@pytest.mark.parametrize("dtype", LOW)
def test_a_merge_is_rounded_once(dtype, width, on_cpu):
    outs, lses = parts(dtype, width=width)
    # One head-first, one tokens-first; rows without keys in one part.
    outs[1] = outs[1].transpose(1, 2).contiguous().transpose(1, 2)
    lses[1][0, 1, 2] = -math.inf
    out, lse = merging.merge(outs, lses)
    weights = torch.stack(lses).double().softmax(0).unsqueeze(-1)
    wanted = (weights * torch.stack(outs).double()).sum(0)
    # Half a unit in the last place, and what FP32 rounds before.
    unit = torch.finfo(dtype).eps / 2 * 1.001 + 1e-6
    assert float(((out.double() - wanted).abs() / (1e-6 + wanted.abs())).max()) <= unit + 1e-3 * unit
    assert torch.equal(out[0, 1, 2], outs[0][0, 1, 2])
    torch.testing.assert_close(
        lse.double(), torch.stack(lses).double().logsumexp(0), rtol=1e-6, atol=1e-6
    )
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_are_torchs(dtype, on_cpu):
    assert merging.merge(*parts(dtype)) is None


def test_the_cpu_is_torchs():
    assert merging.merge(*parts(torch.bfloat16)) is None


def test_memory_of_another_allocator_is_asked_for_once(on_cpu, monkeypatch):
    calls = []

    def refuse(name, *arguments):
        calls.append(name)
        raise ArgumentError("not memory of a GPU's heap")

    monkeypatch.setattr(native, "call", refuse)
    assert merging.merge(*parts(torch.bfloat16)) is None
    assert merging.merge(*parts(torch.bfloat16)) is None
    assert calls == ["kernel_merge_lse"]


def test_memory_of_the_host_is_no_gpus(on_cpu):
    (out, _), (lse, _) = parts(torch.bfloat16)
    address = out.data_ptr()
    arguments = native.MergeArgs(
        out1=address,
        lse1=lse.data_ptr(),
        out2=address,
        lse2=lse.data_ptr(),
        out=address,
        lse=lse.data_ptr(),
        rows=lse.numel(),
        head_dim=8,
        dtype=native.DTYPES["bfloat16"],
        flags=native.MERGE_ON_GPU,
    )
    with pytest.raises(ArgumentError, match="not memory of a GPU's heap"):
        native.call("kernel_merge_lse", arguments, None)


def gradients(dtype, ranges, cast=None):
    """Gradients of attention of ranges of rows over a sequence."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, sum(map(len, ranges))), (2, 24), (2, 24)]
    leaves = [
        torch.randn(1, heads, rows, 8, generator=generator, dtype=torch.float64)
        .to(cast or dtype)
        .to(dtype)
        .requires_grad_()
        for heads, rows in shapes
    ]
    out = RangeAttention.apply(*leaves, attention.Rules(0.4), ranges)
    (out.double() * torch.arange(8)).sum().backward()
    return [leaf.grad.double() for leaf in leaves]


def far(got, truth):
    return largest(float((a - b).norm() / b.norm()) for a, b in zip(got, truth, strict=True))


@pytest.mark.parametrize("ranges", [[range(0, 8), range(16, 24)], [range(4, 12)]])
@pytest.mark.parametrize("dtype", LOW)
def test_ranges_of_rows_by_the_library(dtype, ranges, monkeypatch):
    truth = gradients(torch.float64, ranges, cast=dtype)
    by_torch = far(gradients(dtype, ranges), truth)
    assert by_torch < 0.1
    monkeypatch.setattr(merging, "KINDS", {"cpu"})
    assert far(gradients(dtype, ranges), truth) <= 1.25 * by_torch
