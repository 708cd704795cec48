"""Attention of a microbatch over a prefix it does not own, and its registration with transformers.

Two attention calls and a merge (docs/method.md §3): every query of the microbatch over the prefix's
K and V without a mask, each response causally over its own, joined by log-sum-exp. Backward calls
the kernel's backward for each part with the *merged* output and log-sum-exp, which makes each
part's gradients exact; the prefix part goes straight into the FP32 accumulators, so K and V are
read once per microbatch and never expanded per response.

Shapes, as transformers passes them: query ``[1, heads, tokens, head_dim]``, key and value
``[1, kv_heads, tokens, head_dim]``, already rotated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from .kernels import kernel_for

NAME = "dormouse"

# Maximum parts of a prefix backward; each has its own K and V gradients.
PARTS_MAX = 4

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

_active = threading.local()


class use:
    """Context: this thread's registry attention calls go to ``attend`` (layer, q, k, v, scale)."""

    def __init__(self, attend: Attend):
        self._attend = attend

    def __enter__(self):
        self._before = getattr(_active, "attend", None)
        _active.attend = self._attend

    def __exit__(self, *exc):
        _active.attend = self._before


def _registry_attention(module, query, key, value, attention_mask, scaling=None, **_):
    attend = getattr(_active, "attend", None)
    if attend is None:
        raise RuntimeError(
            "attention implementation 'dormouse' runs only inside dormouse.hf.SharedPrefix"
        )
    if attention_mask is not None:
        raise RuntimeError("a shared-prefix step takes no attention mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # As autocast does for torch's attention: rotary embedding returns FP32.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # Flash returns [1, heads, tokens, head_dim] stored tokens-first: the transpose is contiguous.
    return attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None


# No mask function is registered: the schedule defines which row attends to which key, and building
# a mask would synchronise with the GPU in every microbatch.
AttentionInterface.register(NAME, _registry_attention)


def causal(query, key, value, scale: float) -> torch.Tensor:
    """Ordinary causal attention of the prefix over itself, differentiable."""
    return kernel_for(query).forward(query, key, value, True, scale)[0]


class MicrobatchAttention(torch.autograd.Function):
    """Attention of packed responses over a shared prefix and over themselves.

    ``add_prefix_grad(grad_key, grad_value)`` receives the prefix part's gradients, shaped as the
    prefix K and V, once per backward; it is not called where the prefix K and V need no gradient.
    """

    @staticmethod
    def forward(ctx, query, key, value, prefix_key, prefix_value, runs, scale, add_prefix_grad):
        """``runs``: the rows of the packed responses, in order."""
        kernel, grouped = kernel_for(query), _Grouped(query, prefix_key)
        out, lse = map(
            grouped.apart,
            kernel.forward(grouped.together(query), prefix_key, prefix_value, False, scale),
        )
        own, own_lse = torch.empty_like(out), torch.empty_like(lse)
        for run in runs:
            each, each_lse = kernel.forward(run.of(query), run.of(key), run.of(value), True, scale)
            run.of(own).copy_(each)
            run.of(own_lse).copy_(each_lse)
        # In the accumulation dtype: BF16 outputs are merged in FP32 and rounded once.
        merged_lse = torch.logaddexp(lse, own_lse)
        weight = (lse - merged_lse).exp_().unsqueeze(-1)
        own_weight = (own_lse - merged_lse).exp_().unsqueeze(-1)
        merged = (out * weight + own * own_weight).to(out.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, merged, merged_lse)
        ctx.runs, ctx.scale, ctx.add_prefix_grad = runs, scale, add_prefix_grad
        return merged

    @staticmethod
    def backward(ctx, grad):
        query, key, value, prefix_key, prefix_value, out, lse = ctx.saved_tensors
        kernel = kernel_for(query)
        grad_query, grad_prefix_key, grad_prefix_value = _prefix_backward(
            grad, query, prefix_key, prefix_value, out, lse, ctx.scale
        )
        if ctx.add_prefix_grad is not None:
            ctx.add_prefix_grad(grad_prefix_key, grad_prefix_value)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        for run in ctx.runs:
            own = kernel.backward(
                run.of(grad),
                run.of(query),
                run.of(key),
                run.of(value),
                run.of(out),
                run.of(lse),
                True,
                ctx.scale,
            )
            run.of(grad_query).add_(own[0])
            run.of(grad_key).copy_(own[1])
            run.of(grad_value).copy_(own[2])
        return grad_query, grad_key, grad_value, None, None, None, None, None


def _prefix_backward(grad, query, key, value, out, lse, scale: float):
    """Runs the unmasked backward in equal parts that occupy all threads.

    On the CPU torch assigns one head at a time to a thread, so three heads on two threads would
    take as long as four. The K and V gradients of the parts are summed.
    """
    grouped = _Grouped(query, key)
    on_cpu = query.device.type == "cpu"
    parts = _parts(grouped.kv_heads, grouped.rows, torch.get_num_threads()) if on_cpu else 1

    def split(x):
        return grouped.together(x)[0].unflatten(1, (parts, -1)).transpose(0, 1)

    grad_query, grad_key, grad_value = kernel_for(query).backward(
        split(grad),
        split(query),
        key.expand(parts, -1, -1, -1),
        value.expand(parts, -1, -1, -1),
        split(out),
        split(lse),
        False,
        scale,
    )
    grad_query = grad_query.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    if parts > 1:
        grad_key, grad_value = (g.sum(0, keepdim=True) for g in (grad_key, grad_value))
    return grouped.apart(grad_query), grad_key, grad_value


def _parts(heads: int, rows: int, threads: int) -> int:
    """Returns the number of parts of ``rows`` with which ``heads`` divide evenly among ``threads``,
    else 1."""
    parts = threads // math.gcd(heads, threads)
    return parts if parts <= PARTS_MAX and rows % parts == 0 else 1


class _Grouped:
    """Treats query heads that share a K/V head as rows of one head: without a mask this is the same
    attention in fewer and larger products."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor):
        self.kv_heads = key.shape[1]
        self._group = query.shape[1] // self.kv_heads
        self.rows = self._group * query.shape[2]

    def together(self, x: torch.Tensor) -> torch.Tensor:
        """Reshapes ``[1, heads, tokens, ...]`` to ``[1, kv_heads, group · tokens, ...]``."""
        return x.unflatten(1, (self.kv_heads, self._group)).flatten(2, 3)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """Reverses the grouping."""
        return x.unflatten(2, (self._group, -1)).flatten(1, 2)


@dataclass(frozen=True)
class Run:
    """Consecutive packed responses of equal length, which run in one call."""

    start: int
    """First row."""
    count: int
    """Number of responses."""
    length: int
    """Rows per response."""

    def of(self, packed: torch.Tensor) -> torch.Tensor:
        """Returns a view of ``[1, heads, tokens, ...]`` as ``[count, heads, length, ...]``."""
        rows = packed[0, :, self.start : self.start + self.count * self.length]
        return rows.unflatten(1, (self.count, self.length)).transpose(0, 1)


def runs_of(segments: Sequence[tuple[int, int]]) -> list[Run]:
    """Groups consecutive ``(start, end)`` rows of equal length into runs."""
    runs: list[Run] = []
    for start, end in segments:
        last = runs[-1] if runs else None
        if last and last.length == end - start:
            runs[-1] = Run(last.start, last.count + 1, last.length)
        else:
            runs.append(Run(start, 1, end - start))
    return runs
