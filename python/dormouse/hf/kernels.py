"""Attention of one part of a microbatch, by torch's kernel for the device and dtype.

Every kernel returns its output and the natural log-sum-exp of each row's scores. Backward takes
both as arguments; given those of the merged softmax, the part's gradients are exact
(docs/method.md §3).

Shapes: query and out ``[batch, heads, rows, width]``; key and value ``[batch, kv_heads, keys,
width]``, ``heads`` a multiple of ``kv_heads``; log-sum-exp ``[batch, heads, rows]``, FP64 for
FP64 and FP32 for every other dtype. Causal: as many keys as rows.
"""

from __future__ import annotations

import math

import torch

_aten = torch.ops.aten

# The efficient kernel reads log-sum-exps in blocks of this many rows; +inf weighs nothing.
EFFICIENT_ROWS = 32


class CpuFlash:
    """Every type, on the CPU."""

    @staticmethod
    def forward(query, key, value, causal: bool, scale: float):
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scale: float):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )


class CudaFlash:
    """BF16 and FP16 on a GPU; ``width`` a multiple of 8 up to 256."""

    @staticmethod
    def forward(query, key, value, causal: bool, scale: float):
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )[:2]

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scale: float):
        unused = lse.new_empty(2, dtype=torch.int64)  # the state of a dropout that is off
        return _aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            lse.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unused,
            unused,
            scale=scale,
        )


class CudaEfficient:
    """FP32 on a GPU; ``width`` a multiple of 4. Repeats K and V where query heads share them."""

    @staticmethod
    def forward(query, key, value, causal: bool, scale: float):
        key, value = (_per_query_head(x, query) for x in (key, value))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return out, lse[:, :, : query.shape[2]]

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scale: float):
        unused = torch.zeros((), dtype=torch.int64)  # the state of a dropout that is off
        room = -query.shape[2] % EFFICIENT_ROWS
        grad_query, grad_key, grad_value, _ = (
            _aten._scaled_dot_product_efficient_attention_backward(
                grad,
                query,
                _per_query_head(key, query),
                _per_query_head(value, query),
                None,
                out,
                torch.nn.functional.pad(lse, (0, room), value=math.inf),
                unused,
                unused,
                0.0,
                [True, True, True, False],
                causal,
                scale=scale,
            )
        )
        return grad_query, _per_key_head(grad_key, key), _per_key_head(grad_value, value)


class Plain:
    """Every dtype and device, by matrix products; materializes all scores. For FP64 on a GPU."""

    @staticmethod
    def forward(query, key, value, causal: bool, scale: float):
        scores = _scores(query, key, causal, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return weights @ _per_query_head(value, query), lse

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scale: float):
        weights = (_scores(query, key, causal, scale) - lse.unsqueeze(-1)).exp()
        grad_weights = grad @ _per_query_head(value, query).transpose(-2, -1)
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) * scale
        grad_query = grad_scores @ _per_query_head(key, query)
        grad_key = grad_scores.transpose(-2, -1) @ query
        grad_value = weights.transpose(-2, -1) @ grad
        return grad_query, _per_key_head(grad_key, key), _per_key_head(grad_value, value)


def kernel_for(query: torch.Tensor):
    """Returns the kernel for this tensor's device and dtype."""
    if query.device.type == "cpu":
        return CpuFlash
    if query.dtype is torch.float64:
        return Plain
    return CudaEfficient if query.dtype is torch.float32 else CudaFlash


def _scores(query, key, causal: bool, scale: float) -> torch.Tensor:
    scores = query @ _per_query_head(key, query).transpose(-2, -1) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _per_query_head(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeats each head of K or V for the query heads that share it."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _per_key_head(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sums a gradient over the query heads that share a head of ``x``."""
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)
