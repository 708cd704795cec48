"""Attention of one part of a microbatch, by torch's kernel for the device and dtype.

Every kernel returns its output and the natural log-sum-exp of each row's scores. Backward takes
both as arguments; given those of the merged softmax, the part's gradients are exact
(docs/method.md §3).

Shapes: query ``[batch, heads, rows, width]``; key ``[batch, kv_heads, keys, width]`` and value
``[batch, kv_heads, keys, value_width]``, ``heads`` a multiple of ``kv_heads``; out ``[batch, heads,
rows, value_width]``; log-sum-exp ``[batch, heads, rows]``, FP64 for FP64 and FP32 for every other
dtype. Causal: as many keys as rows. ``mask`` is added to the scores: ``[batch or 1, 1, rows,
keys]`` in the query's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

_aten = torch.ops.aten

# Scores that Plain holds at a time.
SCORES_BYTES_MAX = 64 << 20

# The efficient kernel reads log-sum-exps in blocks of this many rows; +inf weighs nothing.
EFFICIENT_ROWS = 32


class Scores(NamedTuple):
    """How a kernel computes scores from products of query and key."""

    scale: float
    softcap: float | None = None
    """Scores s become ``softcap · tanh(s / softcap)``; None: unchanged."""


class CpuFlash:
    """Every dtype, on the CPU. Without soft cap."""

    @staticmethod
    def forward(query, key, value, causal: bool, scores: Scores, mask=None):
        query, key, padded = _of_one_width(query, key, value)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, padded, 0.0, causal, attn_mask=mask, scale=scores.scale
        )
        return out[..., : value.shape[-1]], lse

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scores: Scores, mask=None):
        wide_query, wide_key, wide_value, wide_grad, wide_out = _of_one_width(
            query, key, value, grad, out
        )
        grad_query, grad_key, grad_value = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                wide_grad,
                wide_query,
                wide_key,
                wide_value,
                wide_out,
                lse,
                0.0,
                causal,
                attn_mask=mask,
                scale=scores.scale,
            )
        )
        return _narrowed(grad_query, query), _narrowed(grad_key, key), _narrowed(grad_value, value)


class CudaFlash:
    """BF16 and FP16 on a GPU; ``width`` a multiple of 8 up to 256. Without soft cap and mask."""

    @staticmethod
    def forward(query, key, value, causal: bool, scores: Scores, mask=None):
        query, key, padded = _of_one_width(query, key, value)
        out, lse = _aten._scaled_dot_product_flash_attention(
            query, key, padded, 0.0, causal, False, scale=scores.scale
        )[:2]
        return out[..., : value.shape[-1]], lse

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scores: Scores, mask=None):
        unused = lse.new_empty(2, dtype=torch.int64)  # the state of a dropout that is off
        wide_query, wide_key, wide_value, wide_grad, wide_out = _of_one_width(
            query, key, value, grad, out
        )
        grad_query, grad_key, grad_value = _aten._scaled_dot_product_flash_attention_backward(
            wide_grad,
            wide_query,
            wide_key,
            wide_value,
            wide_out,
            lse.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unused,
            unused,
            scale=scores.scale,
        )
        return _narrowed(grad_query, query), _narrowed(grad_key, key), _narrowed(grad_value, value)


class CudaEfficient:
    """FP32 on a GPU; ``width`` a multiple of 4. Without soft cap and mask. Repeats K and V where
    query heads share them."""

    @staticmethod
    def forward(query, key, value, causal: bool, scores: Scores, mask=None):
        key, value = (_per_query_head(x, query) for x in (key, value))
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scores.scale
        )
        return out, lse[:, :, : query.shape[2]]

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scores: Scores, mask=None):
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
                scale=scores.scale,
            )
        )
        return grad_query, _per_key_head(grad_key, key), _per_key_head(grad_value, value)


class Plain:
    """Everything, by matrix products, in blocks of rows whose scores take SCORES_BYTES_MAX."""

    @staticmethod
    def forward(query, key, value, causal: bool, scores: Scores, mask=None):
        value = _per_query_head(value, query)
        outs, lses = [], []
        for rows in _blocks(query, key):
            block = _scores(query, key, causal, scores, mask, rows)
            lse = block.logsumexp(-1)
            outs.append((_weights(block, lse).to(value.dtype)) @ value)
            lses.append(lse)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scores: Scores, mask=None):
        # Below FP32 the products are rounded once, at the end.
        wide = lse.dtype
        values, keys = (_per_query_head(x, query).to(wide) for x in (value, key))
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _blocks(query, key):
            block = _scores(query, key, causal, scores, mask, rows)
            weights = _weights(block, lse[:, :, rows])
            block_grad = grad[:, :, rows].to(wide)
            products = (block_grad * out[:, :, rows].to(wide)).sum(-1, keepdim=True)
            grad_scores = weights * (block_grad @ values.transpose(-2, -1) - products)
            if scores.softcap is not None:
                # A masked score is -inf, and its weight 0.
                slope = 1 - (block.masked_fill(block == -math.inf, 0) / scores.softcap).square()
                grad_scores = grad_scores * slope
            grad_scores = grad_scores * scores.scale
            grad_query[:, :, rows] = (grad_scores @ keys).to(query.dtype)
            grad_key += grad_scores.transpose(-2, -1) @ query[:, :, rows].to(wide)
            grad_value += weights.transpose(-2, -1) @ block_grad
        return (
            grad_query,
            _per_key_head(grad_key, key).to(key.dtype),
            _per_key_head(grad_value, value).to(value.dtype),
        )


def kernel_for(query: torch.Tensor, scores: Scores, mask: torch.Tensor | None = None):
    """Returns the kernel for this tensor's device and dtype, these scores and this mask."""
    if scores.softcap is not None:
        return Plain
    if query.device.type == "cpu":
        return CpuFlash
    if query.dtype is torch.float64 or mask is not None:
        return Plain
    return CudaEfficient if query.dtype is torch.float32 else CudaFlash


def _of_one_width(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pads the last dimension with zeros to the widest: they change no product."""
    width = max(t.shape[-1] for t in tensors)
    return [
        t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1]))
        for t in tensors
    ]


def _narrowed(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return grad[..., : like.shape[-1]]


def _blocks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Yields ranges of query rows."""
    row_bytes = query.shape[0] * query.shape[1] * key.shape[2] * torch.float32.itemsize
    block = max(1, SCORES_BYTES_MAX // max(1, row_bytes))
    for row in range(0, query.shape[2], block):
        yield slice(row, min(row + block, query.shape[2]))


def _scores(query, key, causal: bool, scores: Scores, mask, rows: slice) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = _per_query_head(key, query).to(wide)
    block = query[:, :, rows].to(wide) @ keys.transpose(-2, -1) * scores.scale
    if scores.softcap is not None:
        block = scores.softcap * torch.tanh(block / scores.softcap)
    if mask is not None:
        block = block + mask[:, :, rows]
    if causal:
        count = rows.stop - rows.start
        later = torch.ones(count, key.shape[2], dtype=torch.bool, device=query.device)
        block = block.masked_fill(later.triu(1 + rows.start), -math.inf)
    return block


def _weights(block: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Returns probabilities; 0 for a row without keys, whose log-sum-exp is -inf or +inf."""
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return (block - lse.unsqueeze(-1)).exp()


def _per_query_head(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeats each head of K or V for the query heads that share it."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _per_key_head(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sums a gradient over the query heads that share a head of ``x``."""
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)
