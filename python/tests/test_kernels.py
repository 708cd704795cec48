"""The GPU's attention kernels as far as a CPU can tell: the plain one's numbers, and what the
others are called with, by torch's own declarations, on stand-ins that compute the same."""

from __future__ import annotations

import math
import types

import pytest
import torch

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


def bound(operator, args, kwargs) -> types.SimpleNamespace:
    """Arguments by the names that torch declares."""
    names = [a.name for a in operator.default._schema.arguments]
    return types.SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs)


class FlashLike:
    """Takes what the flash kernel takes, K and V shared by query heads included."""

    def _scaled_dot_product_flash_attention(self, *args, **kwargs):
        a = bound(aten._scaled_dot_product_flash_attention, args, kwargs)
        assert (a.dropout_p, a.return_debug_mask) == (0.0, False)
        scores = kernels.Scores(a.scale)
        out, lse = kernels.Plain.forward(a.query, a.key, a.value, a.is_causal, scores)
        return out, lse, None, None, a.query.shape[2], a.key.shape[2], None, None, None

    def _scaled_dot_product_flash_attention_backward(self, *args, **kwargs):
        a = bound(aten._scaled_dot_product_flash_attention_backward, args, kwargs)
        assert (a.cum_seq_q, a.cum_seq_k, a.dropout_p) == (None, None, 0.0)
        assert (a.max_q, a.max_k) == (a.query.shape[2], a.key.shape[2])
        assert a.logsumexp.is_contiguous()
        scores = kernels.Scores(a.scale)
        return kernels.Plain.backward(
            a.grad_out, a.query, a.key, a.value, a.out, a.logsumexp, a.is_causal, scores
        )


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


@pytest.mark.parametrize(
    ("kernel", "like"),
    [(kernels.CudaFlash, FlashLike()), (kernels.CudaEfficient, EfficientLike())],
)
def test_what_the_others_are_called_with(kernel, like, monkeypatch):
    wanted = run(kernels.CpuFlash, monkeypatch)
    monkeypatch.setattr(kernels, "_aten", like)
    compare(run(kernel, monkeypatch), wanted)


def test_each_type_has_its_kernel():
    for device, dtype, kernel in (
        ("cpu", torch.bfloat16, kernels.CpuFlash),
        ("cpu", torch.float64, kernels.CpuFlash),
        ("cuda", torch.bfloat16, kernels.CudaFlash),
        ("cuda", torch.float16, kernels.CudaFlash),
        ("cuda", torch.float32, kernels.CudaEfficient),
        ("cuda", torch.float64, kernels.Plain),
    ):
        tensor = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        assert kernels.kernel_for(tensor, SCORES) is kernel
        assert kernels.kernel_for(tensor, SCORES._replace(softcap=5.0)) is kernels.Plain
        masked = kernels.CpuFlash if device == "cpu" else kernels.Plain
        assert kernels.kernel_for(tensor, SCORES, torch.zeros(1)) is masked
