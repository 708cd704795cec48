"""Attention of one part of a microbatch: what a kernel is, and those with no choice.

Every kernel returns its output and the natural log-sum-exp of each row's scores. Backward takes
both as arguments; given those of the merged softmax, the part's gradients are exact
(docs/method.md §3).

Shapes: query ``[batch, heads, rows, width]``; key ``[batch, kv_heads, keys, width]`` and value
``[batch, kv_heads, keys, value_width]``, ``heads`` a multiple of ``kv_heads``; out ``[batch, heads,
rows, value_width]``; log-sum-exp ``[batch, heads, rows]``, FP64 for FP64 and FP32 for every other
dtype. ``causal``: see :data:`Causal`. ``mask`` is added to the scores: ``[batch or 1, 1, rows,
keys]`` in the query's dtype.

On the CPU, for FP32 and FP64, and under a mask one kernel serves. For BF16 and FP16 on a GPU
:mod:`.measured` chooses among those of :mod:`.cuda_kernels`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_aten = torch.ops.aten

# Scores that Plain holds at a time. On a GPU a block of fewer rows leaves multiprocessors idle.
SCORES_BYTES_MAX = {"cpu": 64 << 20, "cuda": 256 << 20}

# The efficient kernel reads log-sum-exps in blocks of this many rows; +inf weighs nothing.
EFFICIENT_ROWS = 32


class Scores(NamedTuple):
    """How a kernel computes scores from products of query and key."""

    scale: float
    softcap: float | None = None
    """Scores s become ``softcap · tanh(s / softcap)``; None: unchanged."""


@dataclass(frozen=True)
class Pieces:
    """Sequences of unequal lengths, one after another in the rows of a batch of 1."""

    lengths: tuple[int, ...]
    """Rows of each, at least 1."""
    _starts: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def longest(self) -> int:
        """Rows of the longest."""
        return max(self.lengths)

    @property
    def ends(self) -> list[int]:
        """The row after the last of each."""
        return list(itertools.accumulate(self.lengths))

    def starts(self, device: torch.device) -> torch.Tensor:
        """Returns the first row of each and the row after the last, INT32 ``[pieces + 1]``. Made
        once per device; the copy there does not wait."""
        if device not in self._starts:
            starts = torch.tensor([0, *self.ends], dtype=torch.int32, device="cpu")
            self._starts[device] = starts.to(device, non_blocking=True)
        return self._starts[device]


Causal = bool | Pieces
"""False: every row attends to every key. True: to the keys up to its own, of as many keys as rows.
:class:`Pieces`: to those of its own piece."""


class CpuFlash:
    """Every dtype, on the CPU. Without soft cap."""

    @staticmethod
    def forward(query, key, value, causal: bool, scores: Scores, mask=None):
        query, key, padded = of_one_width(query, key, value)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, padded, 0.0, causal, attn_mask=mask, scale=scores.scale
        )
        return out[..., : value.shape[-1]], lse

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: bool, scores: Scores, mask=None):
        wide_query, wide_key, wide_value, wide_grad, wide_out = of_one_width(
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
        return narrowed(grad_query, query), narrowed(grad_key, key), narrowed(grad_value, value)


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
        unused = torch.zeros((), dtype=torch.int64, device="cpu")  # the state of a dropout that is off
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


def _outside_autocast(run: Callable) -> Callable:
    """Autocast would round FP32 products; its context also holds inside autograd functions."""

    @functools.wraps(run)
    def own(first: torch.Tensor, *others):
        with torch.autocast(first.device.type, enabled=False):
            return run(first, *others)

    return own


class Plain:
    """Everything, by matrix products, in blocks of rows whose scores take SCORES_BYTES_MAX. The
    same under autocast."""

    @staticmethod
    @_outside_autocast
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
    @_outside_autocast
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


class PlainPieces:
    """:class:`Plain`, also over :class:`Pieces`: one after another."""

    name = "matrix products"

    @staticmethod
    def forward(query, key, value, causal: Causal, scores: Scores, mask=None):
        if not isinstance(causal, Pieces):
            return Plain.forward(query, key, value, causal, scores, mask)
        tensors = (x.split(causal.lengths, 2) for x in (query, key, value))
        parts = [Plain.forward(*each, True, scores) for each in zip(*tensors, strict=True)]
        out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
        return out, lse

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal: Causal, scores: Scores, mask=None):
        tensors = grad, query, key, value, out, lse
        if not isinstance(causal, Pieces):
            return Plain.backward(*tensors, causal, scores, mask)
        splits = (x.split(causal.lengths, 2) for x in tensors)
        parts = [Plain.backward(*each, True, scores) for each in zip(*splits, strict=True)]
        return tuple(torch.cat(each, 2) for each in zip(*parts, strict=True))


def of_one_width(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pads the last dimension with zeros to the widest: they change no product."""
    width = max(t.shape[-1] for t in tensors)
    return [
        t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1]))
        for t in tensors
    ]


def narrowed(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cuts the gradient of a padded tensor."""
    return grad[..., : like.shape[-1]]


def _blocks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Yields ranges of query rows."""
    row_bytes = query.shape[0] * query.shape[1] * key.shape[2] * torch.float32.itemsize
    block = max(1, SCORES_BYTES_MAX[query.device.type] // max(1, row_bytes))
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
