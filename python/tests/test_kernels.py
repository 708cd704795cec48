"""The attention kernels that leave no choice, as far as a CPU can tell: the plain one's numbers,
and what the efficient one is called with, on a stand-in that computes the same."""

from __future__ import annotations

import math

import pytest
import torch
from attention_operators import bound

from dormouse.hf import attention, kernels

PREFIX, LENGTHS, HEADS, KV_HEADS, WIDTH = 29, (5, 5, 1, 9), 6, 2, 16
SCORES = kernels.Scores(WIDTH**-0.5)
RULES = attention.Rules(WIDTH**-0.5)
aten = torch.ops.aten


def random(*shape, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def microbatch() -> tuple[list[torch.Tensor], attention.Packed]:
    """A microbatch's q, k, v and its prefix's k, v; and its rows."""
    rows = sum(LENGTHS)
    ends = [sum(LENGTHS[: i + 1]) for i in range(len(LENGTHS))]
    segments = [(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
    shapes = [(1, HEADS, rows), *[(1, KV_HEADS, rows)] * 2, *[(1, KV_HEADS, PREFIX)] * 2]
    tensors = [random(*shape, WIDTH, seed=i) for i, shape in enumerate(shapes)]
    return tensors, attention.Packed.of(segments)


def run(kernel, monkeypatch) -> list[torch.Tensor]:
    """Output and all gradients of a microbatch, every part by ``kernel``."""
    monkeypatch.setattr(attention, "kernel_for", lambda *_: kernel)
    (query, key, value, prefix_key, prefix_value), packed = microbatch()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    prefix = []
    out = attention.PackedAttention.apply(
        *leaves,
        None,
        packed,
        RULES,
        ((prefix_key, prefix_value),),
        lambda _, *grads: prefix.extend(grads),
    )
    out.backward(random(*out.shape, seed=99))
    own = random(1, HEADS, PREFIX, WIDTH, seed=50).requires_grad_()
    alone = attention.causal(own, prefix_key, prefix_value, RULES)
    alone.backward(random(*alone.shape, seed=98))
    return [out.detach(), alone.detach(), *(x.grad for x in (*leaves, own)), *prefix]


def compare(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted) == 8
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-12


def test_the_plain_kernel(monkeypatch):
    wanted = run(kernels.CpuFlash, monkeypatch)
    compare(run(kernels.Plain, monkeypatch), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrix_products_are_the_same_under_autocast(dtype):
    """As are those of a soft cap below FP32: rounded once, at the end."""
    (query, key, value, *_), _ = microbatch()
    query, key, value = (x.to(dtype) for x in (query, key, value))
    scores = SCORES._replace(softcap=2.0)

    def results() -> list[torch.Tensor]:
        out, lse = kernels.Plain.forward(query, key, value, True, scores)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        return [out, lse, *kernels.Plain.backward(out, query, key, value, out, lse, True, scores)]

    wanted = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, results(), wanted))


class EfficientLike:
    """Takes what the efficient kernel takes: K and V for every query head, and log-sum-exps with
    room for a multiple of 32 rows, infinite past the last."""

    def _scaled_dot_product_efficient_attention(self, *args, **kwargs):
        a = bound(aten._scaled_dot_product_efficient_attention, args, kwargs)
        assert (a.attn_bias, a.compute_log_sumexp, a.dropout_p) == (None, True, 0.0)
        assert a.query.shape[1] == a.key.shape[1] == a.value.shape[1]
        scores = kernels.Scores(a.scale)
        out, lse = kernels.Plain.forward(a.query, a.key, a.value, a.is_causal, scores)
        room = torch.full((*lse.shape[:2], -lse.shape[2] % 32), math.inf, dtype=lse.dtype)
        return out, torch.cat([lse, room], 2), None, None

    def _scaled_dot_product_efficient_attention_backward(self, *args, **kwargs):
        a = bound(aten._scaled_dot_product_efficient_attention_backward, args, kwargs)
        assert (a.attn_bias, a.dropout_p) == (None, 0.0)
        assert a.grad_input_mask == [True, True, True, False]
        assert a.query.shape[1] == a.key.shape[1] == a.value.shape[1]
        rows = a.query.shape[2]
        assert a.logsumexp.shape[2] % 32 == 0
        assert a.logsumexp[:, :, rows:].isposinf().all()
        lse = a.logsumexp[:, :, :rows]
        scores = kernels.Scores(a.scale)
        grads = kernels.Plain.backward(
            a.grad_out_, a.query, a.key, a.value, a.out, lse, a.is_causal, scores
        )
        return *grads, None


def test_what_the_efficient_kernel_is_called_with(monkeypatch):
    wanted = run(kernels.CpuFlash, monkeypatch)
    monkeypatch.setattr(kernels, "_aten", EfficientLike())
    compare(run(kernels.CudaEfficient, monkeypatch), wanted)


def test_matrix_products_over_pieces():
    """Each as if it were alone."""
    pieces = kernels.Pieces(LENGTHS)
    (query, key, value, *_), _ = microbatch()
    out, lse = kernels.PlainPieces.forward(query, key, value, pieces, SCORES)
    grad, merged = random(*out.shape, seed=7), lse + random(*lse.shape, seed=8).abs()
    args = grad, query, key, value, out / 2, merged
    grads = kernels.PlainPieces.backward(*args, pieces, SCORES)
    for end, length in zip(pieces.ends, LENGTHS, strict=True):
        own = [x[:, :, end - length : end] for x in (query, key, value)]
        wanted = kernels.CpuFlash.forward(*own, True, SCORES)
        own = [x[:, :, end - length : end] for x in args]
        wanted += kernels.CpuFlash.backward(*own, True, SCORES)
        for got, one in zip((out, lse, *grads), wanted, strict=True):
            torch.testing.assert_close(got[:, :, end - length : end], one, rtol=1e-12, atol=1e-12)
