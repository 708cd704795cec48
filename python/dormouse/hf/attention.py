"""Attention of packed rows over shared prefixes and over themselves.

Parts and a merge (docs/method.md §3): every query over the K and V of each prefix on the path from
the root (neighbouring short ones together), each response causally over its own, merged by
log-sum-exp. Backward calls the kernel's
backward once per part, so that each part's gradients are exact; those of a prefix go straight into
its FP32 accumulators, so K and V are read once per microbatch and never expanded per response.
Phase A of a root is the same function without a prefix.

Shapes, as transformers passes them: query ``[1, heads, tokens, head_dim]``, key ``[1, kv_heads,
tokens, head_dim]`` and value ``[1, kv_heads, tokens, value_dim]``, already rotated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import merging
from .kernels import Pieces, Scores
from .measured import Measured, kernel_for

# Maximum parts of a prefix backward; each has its own K and V gradients.
PARTS_MAX = 4

# Neighbouring prefixes of a path that are shorter than this run as one part: a chain of short turns
# would cost as many kernel calls per layer as it has turns. Their K and V are copied meanwhile.
JOINED_TOKENS_MAX = 512

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
    chunk: int | None = None
    """A query reads keys whose position divided by ``chunk`` is the same; None: all. Not beside a
    window."""

    @property
    def scores(self) -> Scores:
        """Returns what a kernel must know."""
        return Scores(self.scale, self.softcap)

    @property
    def limits(self) -> bool:
        """Whether a query may not read every key before it."""
        return self.window is not None or self.chunk is not None

    def lowest(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the lowest position whose key the query at each position reads."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return torch.zeros_like(positions) if self.window is None else positions - self.window + 1


def causal(query, key, value, rules: Rules, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention of rows over themselves, differentiable.

    ``sinks``: one logit per head that takes weight and has no value (``[heads]``).
    """
    # Not by the length, and one graph for every kernel: that of a short prompt stands for that of a
    # long one (see the probe).
    if sinks is None and not rules.limits:
        return CausalAttention.apply(query, key, value, rules.scores)
    packed = Packed.of([(0, query.shape[2])])
    return PackedAttention.apply(query, key, value, sinks, packed, rules, (), None)


class CausalAttention(torch.autograd.Function):
    """Causal attention of rows over themselves, by one call of a kernel."""

    @staticmethod
    def forward(ctx, query, key, value, scores):
        out, lse = kernel_for(query, scores).forward(query, key, value, True, scores)
        # Stored tokens-first by every kernel alike: what the model does next depends on it.
        out = _tokens_first(out)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scores = scores
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        grads = kernel_for(query, ctx.scores).backward(
            grad, query, key, value, out, lse, True, ctx.scores
        )
        return *grads, None


Past = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""K and V of one layer in each prefix on the path, the root first. Their positions are
consecutive, and the packed rows follow."""

Add = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Receives an index into :data:`Past` and the gradients of that K and V, shaped as they are."""


class PackedAttention(torch.autograd.Function):
    """Attention of packed responses over shared prefixes (or none) and over themselves."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, packed, rules, past, add):
        """``packed``: the rows of the responses. ``past``: :data:`Past`. ``add``: an :data:`Add`,
        called once per prefix and backward; None if no prefix needs gradients."""
        out, lses = packed_forward(query, key, value, sinks, packed, rules, past)
        # Those of the path come last: the other slots are the same at every depth (see the probe).
        flat = itertools.chain.from_iterable(past)
        ctx.save_for_backward(query, key, value, sinks, out, *lses, *flat)
        ctx.packed, ctx.rules, ctx.add, ctx.log_sum_exps = packed, rules, add, len(lses)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, out, *others = ctx.saved_tensors
        lses, flat = others[: ctx.log_sum_exps], others[ctx.log_sum_exps :]
        past = tuple(zip(flat[::2], flat[1::2], strict=True))
        gradients = packed_backward(
            grad, query, key, value, sinks, out, lses, ctx.packed, ctx.rules, past, ctx.add
        )
        return *gradients, None, None, None, None


def packed_forward(
    query, key, value, sinks, packed: Packed, rules: Rules, past: Past
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the output of :class:`PackedAttention`, and the log-sum-exps of its parts, or that of
    all keys alone (see :class:`Weights`)."""
    start = sum(key.shape[2] for key, _ in past)
    out, lse = _own_forward(query, key, value, packed.parts(query, rules, start), rules)
    outs, lses = [out], [lse]
    for part in _parts_of_path(past):
        past_out, past_lse = past_forward(
            query, *part.pair(past), part.place, packed, rules
        )
        outs.append(past_out)
        lses.append(past_lse)
    # Under a limit backward asks which rows see no key of a part.
    if len(outs) == 2 and sinks is None and not rules.limits:
        whole = merging.merge(outs, lses)
        if whole is not None:
            return whole[0], [whole[1]]
    weights = Weights(lses, sinks)
    if past:
        out = _merged(outs, weights)
    if sinks is not None:
        out = (out * weights.keys).to(query.dtype)
    return out, lses


def packed_backward(
    grad,
    query,
    key,
    value,
    sinks,
    out,
    lses: Sequence[torch.Tensor],
    packed: Packed,
    rules: Rules,
    past: Past,
    add: Add | None,
    own_backward: OwnBackward | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Returns the gradients of query, key, value and sinks of :class:`PackedAttention`; those of
    ``past`` go to ``add``. ``own_backward``: runs the part of the rows' own keys."""
    weights = Weights(lses, sinks)
    grad_query = torch.empty_like(query).zero_() if not past else None
    for index, part in enumerate(_parts_of_path(past)):
        part_grad, part_lse = weights.seen_by(index + 1, grad)
        part_query, *past_grads = past_backward(
            part_grad,
            query,
            *part.pair(past),
            out,
            part_lse,
            part.place,
            packed,
            rules,
        )
        grad_query = part_query if grad_query is None else grad_query.add_(part_query)
        if add is not None:
            splits = (each.split(part.lengths, 2) for each in past_grads)
            for prefix, grads in zip(part.prefixes, zip(*splits, strict=True), strict=True):
                add(prefix, *grads)
    if own_backward is None:
        start = sum(key.shape[2] for key, _ in past)
        parts = packed.parts(query, rules, start)
        own = (query, key, value, out, parts, rules)
        grad_key, grad_value = _own_backward(grad_query, *weights.seen_by(0, grad), *own)
    else:
        grad_key, grad_value = own_backward(grad_query, *weights.seen_by(0, grad))
    grad_sinks = None
    if sinks is not None and sinks.requires_grad:
        grad_sinks = weights.sinks_gradient(grad, out).to(sinks.dtype)
    return grad_query, grad_key, grad_value, grad_sinks


OwnBackward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Receives the gradient of the query, to which it adds, the part's gradient and its log-sum-exp;
returns the gradients of key and value."""


def _own_backward(
    grad_query, grad, lse, query, key, value, out, parts: Iterator[Part | UnequalPart], rules: Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the backward of every row over the keys of its own response."""
    # In the layout of K and V, so that the model's backward copies nothing.
    grad_key, grad_value = (torch.empty_like(x).zero_() for x in (key, value))
    for part in parts:
        own = kernel_for(query, rules.scores, part.mask).backward(
            part.rows(grad),
            part.rows(query),
            part.keys(key),
            part.keys(value),
            part.rows(out),
            part.rows(lse),
            part.causal,
            rules.scores,
            part.mask,
        )
        part.rows(grad_query).add_(own[0])
        part.keys(grad_key).add_(own[1])
        part.keys(grad_value).add_(own[2])
    return grad_key, grad_value


class Place(NamedTuple):
    """Where a prefix, or several, lie on the path."""

    first: int
    """Position of its first key."""
    end: int
    """Position after its last key."""
    rows: int
    """Position of the first packed row of each response."""


class PathPart(NamedTuple):
    """Prefixes of a path that run as one part."""

    prefixes: range
    """Indices into :data:`Past`."""
    lengths: list[int]
    place: Place

    def pair(self, past: Past) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns their K and V."""
        pairs = past[self.prefixes.start : self.prefixes.stop]
        if len(pairs) == 1:
            return pairs[0]
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)


def _parts_of_path(past: Past) -> list[PathPart]:
    lengths = [key.shape[2] for key, _ in past]
    ends = [0, *itertools.accumulate(lengths)]
    parts, index = [], 0
    for is_short, run in itertools.groupby(length < JOINED_TOKENS_MAX for length in lengths):
        count = len(list(run))
        step = count if is_short else 1
        for first in range(index, index + count, step):
            prefixes = range(first, first + step)
            place = Place(ends[first], ends[first + step], ends[-1])
            parts.append(PathPart(prefixes, lengths[first : first + step], place))
        index += count
    return parts


class Weights:
    """Weights of the parts in the merged softmax, ``[1, heads, rows, 1]``.

    They are functions of differences of log-sum-exps, so that they add up to one however large the
    log-sum-exps are: ``exp(lse - merged_lse)`` is off by the rounding of ``lse``, which backward
    multiplies by the whole gradient.
    """

    def __init__(self, lses: list[torch.Tensor], sinks: torch.Tensor | None):
        """``lses``: log-sum-exps of the parts, the rows' own keys first. Below FP32, where every row
        sees keys of every part, that of all keys serves alone: nothing else is asked then but
        :meth:`seen_by`."""
        self._lses = lses
        self._sinks = None if sinks is None else sinks.to(lses[0].dtype).view(1, -1, 1)
        if len(lses) == 1:
            self._merged, self._parts = lses[0], None
        else:
            stacked = torch.stack(lses)
            self._merged, self._parts = stacked.logsumexp(0), stacked.softmax(0)

    def of(self, part: int) -> torch.Tensor:
        """The keys of a part, among all keys."""
        return self._parts[part].unsqueeze(-1)

    @property
    def keys(self) -> torch.Tensor:
        """All keys, beside the sink."""
        return torch.sigmoid(self._merged - self._sinks).unsqueeze(-1)

    def seen_by(self, part: int, grad) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gradient and log-sum-exp for the backward of a part.

        A part's probabilities are ``exp(score - lse) · weight``. The kernel computes the first
        factor, from the part's own log-sum-exp; the second goes with the gradient. Below FP32 the
        product would round the gradient once more: there the kernel gets the merged log-sum-exp.
        """
        if grad.dtype not in (torch.float32, torch.float64):
            seen = self._merged
            if self._sinks is not None:
                seen = torch.logaddexp(seen, self._sinks.expand_as(seen))
            if len(self._lses) == 1:
                return grad, seen
        else:
            seen = self._lses[part]
            if self._parts is not None:
                grad = grad * self.of(part)
            if self._sinks is not None:
                grad = grad * self.keys
        # Rows that see no key of the part: exp(score - inf) is 0.
        is_blind = self._lses[part] == -math.inf
        return grad, seen.masked_fill(is_blind, math.inf) if part else seen

    def sinks_gradient(self, grad, out) -> torch.Tensor:
        """Returns ``-Σ weight of the sink · (dO · O)`` per head, ``[heads]``."""
        weight = torch.sigmoid(self._sinks - self._merged)
        product = (grad.to(weight.dtype) * out.to(weight.dtype)).sum(-1)
        return -(weight * product).sum((0, 2))


def _own_forward(query, key, value, parts: Iterator[Part | UnequalPart], rules: Rules):
    """Attention of every row over the keys of its own response; returns out, stored tokens-first as
    the model reads it, and log-sum-exp."""
    def run(part: Part | UnequalPart):
        forward = kernel_for(query, rules.scores, part.mask).forward
        own = part.rows(query), part.keys(key), part.keys(value)
        return forward(*own, part.causal, rules.scores, part.mask)

    first, *others = parts
    part_out, part_lse = run(first)
    lse = part_lse.new_empty(query.shape[:3])
    first.rows(lse).copy_(part_lse)
    if not others:
        return first.joined(part_out), lse
    _, heads, rows, _ = query.shape
    out = query.new_empty(1, rows, heads, value.shape[3]).transpose(1, 2)
    first.rows(out).copy_(part_out)
    for part in others:
        part_out, part_lse = run(part)
        part.rows(out).copy_(part_out)
        part.rows(lse).copy_(part_lse)
    return out, lse


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Returns ``[batch, heads, tokens, width]`` stored as ``[batch, tokens, heads, width]``, the
    same tensor if it is."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _merged(outs: list[torch.Tensor], weights: Weights) -> torch.Tensor:
    """Returns the weighted sum of the parts' outputs, at least two, laid out as the first. BF16 and
    FP16 outputs are added in FP32 and rounded once."""
    merged = outs[0] * weights.of(0)
    for part, each in enumerate(outs[1:-1], 1):
        merged.addcmul_(each, weights.of(part))
    # The last sum is rounded as it is written.
    out = torch.empty_like(outs[0])
    return torch.addcmul(merged, outs[-1], weights.of(len(outs) - 1), out=out)


def past_forward(query, key, value, place: Place, packed: Packed, rules: Rules):
    """Attention of every row over a prefix's keys; returns out and log-sum-exp, which is -inf for
    rows that see none."""
    first, mask = packed.past_mask(place, rules, query)
    key, value = key[:, :, first:], value[:, :, first:]
    if key.shape[2] == 0:
        out = value.new_zeros(*query.shape[:3], value.shape[3])
        lse_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
        return out, out.new_full(query.shape[:3], -math.inf, dtype=lse_dtype)
    kernel = kernel_for(query, rules.scores, mask)
    if isinstance(kernel, Measured):
        return kernel.forward(query, key, value, False, rules.scores)
    grouped = _Grouped(query, key)
    rows = grouped.together(query)
    if mask is not None:
        mask = grouped.mask(mask)
    out, lse = map(
        grouped.apart, kernel.forward(rows, key, value, False, rules.scores, mask)
    )
    if mask is not None:
        blind = packed.blind(place, rules, query.device)
        out = out.masked_fill(blind.view(1, 1, -1, 1), 0)
        lse = lse.masked_fill(blind.view(1, 1, -1), -math.inf)
    return out, lse


def past_backward(
    grad, query, key, value, out, lse, place: Place, packed: Packed, rules: Rules
):
    """Returns the gradients of query, key and value of :func:`past_forward`."""
    first, mask = packed.past_mask(place, rules, query)
    if first == key.shape[2]:
        return tuple(x.new_zeros(x.shape) for x in (query, key, value))
    kernel = kernel_for(query, rules.scores, mask)
    own = grad, query, key[:, :, first:], value[:, :, first:], out, lse
    if isinstance(kernel, Measured):
        grad_query, grad_key, grad_value = kernel.backward(*own, False, rules.scores)
    else:
        grad_query, grad_key, grad_value = _grouped_backward(kernel, *own, rules, mask)
    if first:
        pad = (0, 0, first, 0)
        grad_key, grad_value = (
            torch.nn.functional.pad(g, pad) for g in (grad_key, grad_value)
        )
    return grad_query, grad_key, grad_value


def _grouped_backward(kernel, grad, query, key, value, out, lse, rules: Rules, mask):
    """Runs a prefix's part with the rows of query heads that share K and V together, on the CPU in
    equal parts that occupy all threads.

    torch assigns one head at a time to a thread there, so three heads on two threads would take as
    long as four. The K and V gradients of the parts are summed.
    """
    grouped = _Grouped(query, key)
    on_cpu = query.device.type == "cpu"
    parts = _parts(grouped.kv_heads, grouped.rows, torch.get_num_threads()) if on_cpu else 1

    def split(x):
        return grouped.together(x)[0].unflatten(1, (parts, -1)).transpose(0, 1)

    if mask is not None:
        mask = grouped.mask(mask).unflatten(2, (parts, -1)).flatten(0, 1)
        mask = mask.transpose(0, 1)
    grad_query, grad_key, grad_value = kernel.backward(
        split(grad),
        split(query),
        key.expand(parts, -1, -1, -1),
        value.expand(parts, -1, -1, -1),
        split(out),
        split(lse),
        False,
        rules.scores,
        mask,
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
    """Treats query heads that share a K/V head as rows of one head: the same attention in fewer and
    larger products. The kernels of :mod:`.cuda_kernels` do so themselves, without copies."""

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
    """Additive, in the query's dtype and place, ``[1, 1, rows, keys]``; None: causal, with as many
    keys as rows."""

    @property
    def causal(self) -> bool:
        """See :data:`.kernels.Causal`."""
        return self.mask is None

    def rows(self, packed: torch.Tensor) -> torch.Tensor:
        return self.run.of(packed)[:, :, self.row : self.row_end]

    def keys(self, packed: torch.Tensor) -> torch.Tensor:
        return self.run.of(packed)[:, :, self.key : self.key_end]

    def joined(self, out: torch.Tensor) -> torch.Tensor:
        """Reverses :meth:`rows`, of a part that has all rows; stored tokens-first."""
        return _tokens_first(out.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2))


class UnequalPart(NamedTuple):
    """Consecutive packed rows of unequal causal sequences, which run in one call."""

    start: int
    """First row."""
    causal: Pieces
    mask: None = None

    def rows(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[:, :, self.start : self.start + self.causal.ends[-1]]

    keys = rows

    def joined(self, out: torch.Tensor) -> torch.Tensor:
        """Reverses :meth:`rows`, of a part that has all rows; stored tokens-first."""
        return _tokens_first(out)


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

    def pieces(self, rules: Rules, start: int) -> list[int] | None:
        """Returns the rows of each part of a response, if all parts are causal; None under a window
        that is shorter. ``start``: the position of each response's first row."""
        if rules.chunk is not None:
            lengths, row = [], 0
            while row < self.length:
                to_end = rules.chunk - (start + row) % rules.chunk
                lengths.append(min(to_end, self.length - row))
                row += lengths[-1]
            return lengths
        is_whole = rules.window is None or rules.window >= self.length
        return [self.length] if is_whole else None

    def parts(self, query: torch.Tensor, rules: Rules, start: int) -> Iterator[Part]:
        """Yields blocks of rows with the keys they see, so that a window costs no more than its
        keys. ``start``: as for :meth:`pieces`."""
        pieces = self.pieces(rules, start)
        if pieces is not None:
            for row_end, rows in zip(itertools.accumulate(pieces), pieces, strict=True):
                yield Part(self, row_end - rows, row_end, row_end - rows, row_end, None)
            return
        window = rules.window
        block = min(max(window, BLOCK_ROWS_MIN), self.length)
        # Of the first row's window and the block: which keys a row sees does not depend on where
        # the block is.
        rows = torch.arange(block, device=query.device).unsqueeze(1)
        keys = torch.arange(1 - window, block, device=query.device)
        mask = _additive((keys > rows) | (keys <= rows - window), query)[None, None]
        for row in range(0, self.length, block):
            row_end, first = min(row + block, self.length), row - window + 1
            key = max(0, first)
            own = mask[:, :, : row_end - row, key - first : row_end - first]
            yield Part(self, row, row_end, key, row_end, own)


@dataclass(frozen=True)
class Packed:
    """The rows of a microbatch: packed responses, whose first rows follow the last prefix row."""

    runs: tuple[Run, ...]
    offsets: torch.Tensor
    """Offset of each row in its response."""
    _lowest: dict = field(default_factory=dict, compare=False)
    _pieces: dict = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int]]) -> Packed:
        """``segments``: first and end row of each response, without gaps."""
        offsets = torch.cat([torch.arange(end - start, device="cpu") for start, end in segments])
        return cls(tuple(runs_of(segments)), offsets)

    @property
    def rows(self) -> int:
        """Rows of the microbatch."""
        return len(self.offsets)

    def parts(self, query: torch.Tensor, rules: Rules, start: int) -> Iterator[Part | UnequalPart]:
        """Yields parts that cover all rows, each for one call of the kernel that serves it.

        ``start``: the position of each response's first row.
        """
        pieces = {run: run.pieces(rules, start) for run in self.runs}
        together = isinstance(kernel_for(query, rules.scores), Measured)
        for is_masked, runs in itertools.groupby(self.runs, lambda run: pieces[run] is None):
            runs = list(runs)
            is_one = len(runs) == 1 and len(pieces[runs[0]] or ()) == 1
            if is_masked or is_one or not together:
                for run in runs:
                    yield from run.parts(query, rules, start)
                continue
            lengths = itertools.chain.from_iterable(run.count * pieces[run] for run in runs)
            yield UnequalPart(runs[0].start, self._pieces_of(tuple(lengths)))

    def _pieces_of(self, lengths: tuple[int, ...]) -> Pieces:
        """Returns the same object for the same lengths: its tensors are made once."""
        return self._pieces.setdefault(lengths, Pieces(lengths))

    def past_mask(
        self, place: Place, rules: Rules, query: torch.Tensor
    ) -> tuple[int, torch.Tensor | None]:
        """Returns the first key of a prefix that a row sees, and an additive mask ``[rows, keys]``
        over the keys from there on, in the query's dtype and place, or None if every row sees
        all. It is made anew: kept, it would take memory between the layers that read it, and one
        from the host would wait for the GPU."""
        if not rules.limits:
            return 0, None
        first, is_cut, lowest = self._lowest_of(place, rules, query.device)
        mask = None
        if is_cut:
            keys = torch.arange(first, place.end, device=query.device)
            mask = _additive(keys < lowest.unsqueeze(1), query)
        return first - place.first, mask

    def blind(self, place: Place, rules: Rules, device: torch.device) -> torch.Tensor:
        """Returns which rows see no key of a prefix."""
        return self._lowest_of(place, rules, device)[2] >= place.end

    def _lowest_of(
        self, place: Place, rules: Rules, device: torch.device
    ) -> tuple[int, bool, torch.Tensor]:
        """Returns the lowest position in a prefix that any row reads, whether other rows begin
        behind it, and the lowest position that each row reads. Copied to a device once."""
        key = place, rules.window, rules.chunk, device
        if key not in self._lowest:
            lowest = rules.lowest(place.rows + self.offsets)
            first = min(max(place.first, int(lowest.min())), place.end)
            is_cut = int(lowest.max()) > first
            self._lowest[key] = first, is_cut, lowest.to(device, non_blocking=True)
        return self._lowest[key]


def _additive(hidden: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns a mask in the query's dtype."""
    return torch.where(hidden, -math.inf, query.new_zeros(()))


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
