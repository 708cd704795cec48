"""Attention of packed responses over a shared prefix and over themselves.

Two parts and a merge (docs/method.md §3): every query over the prefix's K and V, each response
causally over its own, joined by log-sum-exp. Backward calls the kernel's backward once per part, so
that each part's gradients are exact; the prefix part goes straight into the FP32 accumulators, so K
and V are read once per microbatch and never expanded per response. Phase A is the same function
without a prefix part.

Shapes, as transformers passes them: query ``[1, heads, tokens, head_dim]``, key ``[1, kv_heads,
tokens, head_dim]`` and value ``[1, kv_heads, tokens, value_dim]``, already rotated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .kernels import Plain, Scores, kernel_for

# Maximum parts of a prefix backward; each has its own K and V gradients.
PARTS_MAX = 4

# Query rows of one block of windowed attention: at least this many, else as many as the window.
BLOCK_ROWS_MIN = 256


@dataclass(frozen=True)
class Rules:
    """How one layer's attention computes its scores."""

    scale: float
    """Factor of the products of query and key."""
    window: int | None = None
    """A query at position p reads keys at positions above ``p - window``; None: all."""
    softcap: float | None = None
    """Scores s become ``softcap · tanh(s / softcap)``; None: unchanged."""

    @property
    def scores(self) -> Scores:
        """Returns what a kernel must know."""
        return Scores(self.scale, self.softcap)


def causal(query, key, value, rules: Rules, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention of rows over themselves, differentiable.

    ``sinks``: one logit per head that takes weight and has no value (``[heads]``).
    """
    kernel = kernel_for(query, rules.scores)
    # Not by the length: the graph of a short prompt stands for that of a long one (see the probe).
    if sinks is None and rules.window is None and kernel is not Plain:
        return kernel.forward(query, key, value, True, rules.scores)[0]
    packed = Packed.of([(0, query.shape[2])])
    return PackedAttention.apply(query, key, value, None, None, sinks, packed, rules, None)


class PackedAttention(torch.autograd.Function):
    """Attention of packed responses over a shared prefix (or none) and over themselves."""

    @staticmethod
    def forward(ctx, query, key, value, prefix_key, prefix_value, sinks, packed, rules, add):
        """``packed``: the rows of the responses. ``prefix_key``, ``prefix_value``: None without a
        prefix. ``add(grad_key, grad_value)`` receives the prefix part's gradients, shaped as the
        prefix K and V, once per backward; None where they need no gradient."""
        # Stored tokens-first, as the model reads it.
        _, heads, rows, _ = query.shape
        out = query.new_empty(1, rows, heads, value.shape[3]).transpose(1, 2)
        lse = None
        for run in packed.runs:
            for part in run.parts(rules.window):
                part_out, part_lse = kernel_for(query, rules.scores, part.mask).forward(
                    part.rows(query),
                    part.keys(key),
                    part.keys(value),
                    part.mask is None,
                    rules.scores,
                    part.mask_of(query),
                )
                if lse is None:
                    lse = part_lse.new_empty(query.shape[:3])
                part.rows(out).copy_(part_out)
                part.rows(lse).copy_(part_lse)
        weights = _Weights(lse, None, None)
        prefix_lse = None
        if prefix_key is not None:
            prefix_out, prefix_lse = _prefix_forward(
                query, prefix_key, prefix_value, packed, rules
            )
            weights = _Weights(lse, prefix_lse, None)
            # In the accumulation dtype: BF16 outputs are merged in FP32 and rounded once.
            out = (out * weights.own + prefix_out * weights.prefix).to(query.dtype)
        if sinks is not None:
            weights = _Weights(lse, prefix_lse, sinks)
            out = (out * weights.keys).to(query.dtype)
        ctx.save_for_backward(
            query, key, value, prefix_key, prefix_value, sinks, out, lse, prefix_lse
        )
        ctx.packed, ctx.rules, ctx.add = packed, rules, add
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, prefix_key, prefix_value, sinks, out, lse, prefix_lse = (
            ctx.saved_tensors
        )
        weights = _Weights(lse, prefix_lse, sinks)
        if prefix_key is None:
            grad_query = torch.empty_like(query).zero_()
        else:
            part_grad, part_lse = weights.seen_by_prefix(grad)
            grad_query, *prefix_grads = _prefix_backward(
                part_grad,
                query,
                prefix_key,
                prefix_value,
                out,
                part_lse,
                ctx.packed,
                ctx.rules,
            )
            if ctx.add is not None:
                ctx.add(*prefix_grads)
        # In the layout of K and V, so that the model's backward copies nothing.
        grad_key, grad_value = (torch.empty_like(x).zero_() for x in (key, value))
        part_grad, part_lse = weights.seen_by_own(grad)
        for run in ctx.packed.runs:
            for part in run.parts(ctx.rules.window):
                own = kernel_for(query, ctx.rules.scores, part.mask).backward(
                    part.rows(part_grad),
                    part.rows(query),
                    part.keys(key),
                    part.keys(value),
                    part.rows(out),
                    part.rows(part_lse),
                    part.mask is None,
                    ctx.rules.scores,
                    part.mask_of(query),
                )
                part.rows(grad_query).add_(own[0])
                part.keys(grad_key).add_(own[1])
                part.keys(grad_value).add_(own[2])
        grad_sinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            grad_sinks = weights.sinks_gradient(grad, out).to(sinks.dtype)
        return grad_query, grad_key, grad_value, None, None, grad_sinks, None, None, None


class _Weights:
    """Weights of the parts in the merged softmax, ``[1, heads, rows, 1]``.

    They are logistic functions of differences of log-sum-exps, so that they add up to one however
    large the log-sum-exps are: ``exp(lse - merged_lse)`` is off by the rounding of ``lse``, which
    backward multiplies by the whole gradient.
    """

    def __init__(self, lse, prefix_lse, sinks):
        self._lse, self._prefix_lse = lse, prefix_lse
        self._merged = lse if prefix_lse is None else torch.logaddexp(lse, prefix_lse)
        self._sinks = None if sinks is None else sinks.to(lse.dtype).view(1, -1, 1)

    @property
    def own(self) -> torch.Tensor:
        """The responses' own keys, among all keys."""
        return torch.sigmoid(self._lse - self._prefix_lse).unsqueeze(-1)

    @property
    def prefix(self) -> torch.Tensor:
        """The prefix's keys, among all keys."""
        return torch.sigmoid(self._prefix_lse - self._lse).unsqueeze(-1)

    @property
    def keys(self) -> torch.Tensor:
        """All keys, beside the sink."""
        return torch.sigmoid(self._merged - self._sinks).unsqueeze(-1)

    def seen_by_own(self, grad) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gradient and log-sum-exp for the backward of the responses' own part."""
        return self._seen(grad, self._lse, None if self._prefix_lse is None else self.own)

    def seen_by_prefix(self, grad) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gradient and log-sum-exp for the backward of the prefix part."""
        grad, lse = self._seen(grad, self._prefix_lse, self.prefix)
        # Rows that see no prefix key: exp(score - inf) is 0.
        return grad, lse.masked_fill(self._prefix_lse == -math.inf, math.inf)

    def _seen(self, grad, lse, weight):
        """A part's probabilities are ``exp(score - lse) · weight``. The kernel computes the first
        factor, from the part's own log-sum-exp; the second goes with the gradient. Below FP32 the
        product would round the gradient once more: there the kernel gets the merged log-sum-exp."""
        if grad.dtype not in (torch.float32, torch.float64):
            merged = self._merged
            if self._sinks is not None:
                merged = torch.logaddexp(merged, self._sinks.expand_as(merged))
            return grad, merged
        if weight is not None:
            grad = grad * weight
        if self._sinks is not None:
            grad = grad * self.keys
        return grad, lse

    def sinks_gradient(self, grad, out) -> torch.Tensor:
        """Returns ``-Σ weight of the sink · (dO · O)`` per head, ``[heads]``."""
        weight = torch.sigmoid(self._sinks - self._merged)
        product = (grad.to(weight.dtype) * out.to(weight.dtype)).sum(-1)
        return -(weight * product).sum((0, 2))


def _prefix_forward(query, key, value, packed: Packed, rules: Rules):
    """Attention of every row over the prefix's keys; returns out and log-sum-exp, which is -inf for
    rows that see none."""
    first, mask = packed.prefix_mask(key.shape[2], rules.window)
    key, value = key[:, :, first:], value[:, :, first:]
    if key.shape[2] == 0:
        out = value.new_zeros(*query.shape[:3], value.shape[3])
        lse_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
        return out, out.new_full(query.shape[:3], -math.inf, dtype=lse_dtype)
    grouped = _Grouped(query, key)
    rows = grouped.together(query)
    if mask is not None:
        mask = grouped.mask(mask.to(query))
    out, lse = map(
        grouped.apart,
        kernel_for(query, rules.scores, mask).forward(rows, key, value, False, rules.scores, mask),
    )
    if mask is not None:
        blind = packed.blind(rules.window).to(query.device)
        out = out.masked_fill(blind.view(1, 1, -1, 1), 0)
        lse = lse.masked_fill(blind.view(1, 1, -1), -math.inf)
    return out, lse


def _prefix_backward(grad, query, key, value, out, lse, packed: Packed, rules: Rules):
    """Runs the backward of the prefix part in equal parts that occupy all threads.

    On the CPU torch assigns one head at a time to a thread, so three heads on two threads would
    take as long as four. The K and V gradients of the parts are summed.
    """
    first, mask = packed.prefix_mask(key.shape[2], rules.window)
    if first == key.shape[2]:
        return tuple(x.new_zeros(x.shape) for x in (query, key, value))
    seen_key, seen_value = key[:, :, first:], value[:, :, first:]
    grouped = _Grouped(query, key)
    on_cpu = query.device.type == "cpu"
    parts = _parts(grouped.kv_heads, grouped.rows, torch.get_num_threads()) if on_cpu else 1

    def split(x):
        return grouped.together(x)[0].unflatten(1, (parts, -1)).transpose(0, 1)

    if mask is not None:
        mask = grouped.mask(mask.to(query)).unflatten(2, (parts, -1)).flatten(0, 1)
        mask = mask.transpose(0, 1)
    grad_query, grad_key, grad_value = kernel_for(query, rules.scores, mask).backward(
        split(grad),
        split(query),
        seen_key.expand(parts, -1, -1, -1),
        seen_value.expand(parts, -1, -1, -1),
        split(out),
        split(lse),
        False,
        rules.scores,
        mask,
    )
    grad_query = grad_query.transpose(0, 1).flatten(1, 2).unsqueeze(0)
    if parts > 1:
        grad_key, grad_value = (g.sum(0, keepdim=True) for g in (grad_key, grad_value))
    if first:
        pad = (0, 0, first, 0)
        grad_key, grad_value = (
            torch.nn.functional.pad(g, pad) for g in (grad_key, grad_value)
        )
    return grouped.apart(grad_query), grad_key, grad_value


def _parts(heads: int, rows: int, threads: int) -> int:
    """Returns the number of parts of ``rows`` with which ``heads`` divide evenly among ``threads``,
    else 1."""
    parts = threads // math.gcd(heads, threads)
    return parts if parts <= PARTS_MAX and rows % parts == 0 else 1


class _Grouped:
    """Treats query heads that share a K/V head as rows of one head: the same attention in fewer and
    larger products."""

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

    def mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Repeats a mask ``[rows, keys]`` for the grouped rows: ``[1, 1, group · rows, keys]``."""
        return mask.repeat(self._group, 1)[None, None]


class Part(NamedTuple):
    """Rows of a run, and the keys of the same responses that they attend to."""

    run: Run
    row: int
    row_end: int
    key: int
    key_end: int
    mask: torch.Tensor | None
    """Additive, ``[rows, keys]``; None: causal, with as many keys as rows."""

    def rows(self, packed: torch.Tensor) -> torch.Tensor:
        return self.run.of(packed)[:, :, self.row : self.row_end]

    def keys(self, packed: torch.Tensor) -> torch.Tensor:
        return self.run.of(packed)[:, :, self.key : self.key_end]

    def mask_of(self, query: torch.Tensor) -> torch.Tensor | None:
        """Returns the mask in the query's dtype and place, ``[1, 1, rows, keys]``."""
        return None if self.mask is None else self.mask.to(query)[None, None]


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

    def parts(self, window: int | None) -> Iterator[Part]:
        """Yields blocks of rows with the keys they see, so that a window costs no more than its
        keys."""
        if window is None or window >= self.length:
            yield Part(self, 0, self.length, 0, self.length, None)
            return
        block = max(window, BLOCK_ROWS_MIN)
        for row in range(0, self.length, block):
            row_end, key = min(row + block, self.length), max(0, row - window + 1)
            queries = torch.arange(row, row_end).unsqueeze(1)
            keys = torch.arange(key, row_end)
            seen = (keys <= queries) & (keys > queries - window)
            yield Part(self, row, row_end, key, row_end, _additive(seen))


@dataclass(frozen=True)
class Packed:
    """The rows of a microbatch: packed responses, whose first rows follow the last prefix row."""

    runs: tuple[Run, ...]
    offsets: torch.Tensor
    """Offset of each row in its response."""
    _masks: dict = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int]]) -> Packed:
        """``segments``: first and end row of each response, without gaps."""
        offsets = torch.cat([torch.arange(end - start) for start, end in segments])
        return cls(tuple(runs_of(segments)), offsets)

    @property
    def rows(self) -> int:
        """Rows of the microbatch."""
        return len(self.offsets)

    def prefix_mask(self, keys: int, window: int | None) -> tuple[int, torch.Tensor | None]:
        """Returns the first prefix key that a row sees, and an additive mask ``[rows, keys]`` over
        the keys from there on, or None if every row sees all."""
        if window is None or window >= keys + int(self.offsets.max()) + 1:
            return 0, None
        if window not in self._masks:
            first = max(0, keys - window + 1)
            queries = (keys + self.offsets).unsqueeze(1)
            self._masks[window] = first, _additive(torch.arange(first, keys) > queries - window)
        return self._masks[window]

    def blind(self, window: int) -> torch.Tensor:
        """Returns which rows lie beyond the window of every prefix key."""
        return self.offsets >= window - 1


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


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
