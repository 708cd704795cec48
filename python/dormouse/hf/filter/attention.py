"""The backward of attention for kept rows.

Kept queries attend to every key, with the log-sum-exp of all: their gradients need K and V whole.
Keys and values of dropped rows get no gradient. So the kernel runs over kept queries and kept keys,
which is causal as the whole was, and the scores of kept queries with dropped keys are computed for
the gradient of queries alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .. import attention as packed_attention
from ..attention import CausalAttention, PackedAttention, Packed, Rules
from ..kernels import Scores
from ..measured import kernel_for
from .marks import GraphEdge, sources_of
from .rows import Layout, NotByRowsError, Rows
from .rules import Gradients, Operation, Plan, by_edges, kind_of
from .saved import are_by_hooks

# Rows of queries whose scores with dropped keys are computed at a time.
BLOCK_ROWS = 128

# Of a query [batch, heads, columns, width].
_QUERY = Layout(2, 0)


class Segment(NamedTuple):
    """Rows that attend to each other: a sequence."""

    compact: slice
    """Its kept rows among the compact ones."""
    batch: int
    start: int
    """Its first row in K and V ``[batch, heads, columns, width]``."""
    kept: torch.Tensor
    """Kept rows, counted from :attr:`start`, ascending."""
    dropped: torch.Tensor

    def keys(self, whole: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Returns keys of the segment, ``[1, heads, keys, width]``."""
        return whole[self.batch : self.batch + 1].index_select(2, index + self.start)


def segments(rows: Rows, bounds: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    """Yields the segments of a flattened batch that have kept rows. ``bounds``: their first and end
    rows."""
    for start, end in bounds:
        kept = rows.index[(rows.index >= start) & (rows.index < end)]
        if len(kept) == 0:
            continue
        dropped = rows.dropped[(rows.dropped >= start) & (rows.dropped < end)]
        first = int((rows.index < start).sum())
        batch, column = divmod(start, rows.columns)
        own = slice(first, first + len(kept))
        yield Segment(own, batch, column, kept - start, dropped - start)


def of_segments(
    grad, query, key, value, out, lse, of: Sequence[Segment], is_causal: bool, scores: Scores,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the compact gradients of query, key and value. ``key`` and ``value`` are whole, the
    rest compact, ``[1, heads, kept, ...]``. ``mask``: added to the scores, whole, ``[batch or 1,
    heads or 1, rows, keys]``."""
    grad_query = torch.empty_like(query)
    sizes = (1, key.shape[1], query.shape[2])
    grad_key = key.new_empty(*sizes, key.shape[3])
    grad_value = value.new_empty(*sizes, value.shape[3])
    for each in of:
        own = [x[:, :, each.compact] for x in (grad, query, out, lse)]
        near = far = None
        if mask is not None:
            of_rows = mask[each.batch if mask.shape[0] > 1 else slice(1)]
            of_rows = of_rows.reshape(1, -1, *mask.shape[2:])[:, :, each.kept + each.start]
            near, far = (of_rows[..., i + each.start] for i in (each.kept, each.dropped))
        own_grad, own_query, own_out, own_lse = own
        found = kernel_for(query, scores, near).backward(
            own_grad,
            own_query,
            each.keys(key, each.kept),
            each.keys(value, each.kept),
            own_out,
            own_lse,
            is_causal,
            scores,
            near,
        )
        for whole, part in zip((grad_query, grad_key, grad_value), found, strict=True):
            whole[:, :, each.compact] = part
        if len(each.dropped):
            # Autocast would round the products below FP32.
            with torch.autocast(query.device.type, enabled=False):
                by_dropped_keys(
                    grad_query[:, :, each.compact], *own, each, key, value, is_causal, scores, far
                )
    return grad_query, grad_key, grad_value


def by_dropped_keys(
    grad_query, grad, query, out, lse, segment: Segment, key, value, is_causal: bool,
    scores: Scores, mask: torch.Tensor | None,
) -> None:
    """Adds to the gradient of a segment's kept queries what dropped keys contribute."""
    # Below FP32 the products are rounded once, at the end.
    wide = lse.dtype
    kv_heads = key.shape[1]
    group = query.shape[1] // kv_heads
    keys, values = (
        segment.keys(x, segment.dropped)[0].to(wide) for x in (key, value)
    )
    # Keys before the first row of a block need no mask, those after its last row are not read.
    seen = torch.searchsorted(segment.dropped, segment.kept).tolist()

    def together(x: torch.Tensor) -> torch.Tensor:
        """Query heads that share a K/V head as rows of one."""
        return x[0].unflatten(0, (kv_heads, group)).flatten(1, 2).to(wide)

    for first in range(0, len(segment.kept), BLOCK_ROWS):
        rows = slice(first, min(first + BLOCK_ROWS, len(segment.kept)))
        count = seen[rows.stop - 1] if is_causal else len(segment.dropped)
        if count == 0:
            continue
        queries, grads, outs = (together(x[:, :, rows]) for x in (query, grad, out))
        block = queries @ keys[:, :count].transpose(1, 2) * scores.scale
        by_head = block.unflatten(1, (group, -1))
        if mask is not None:
            part = mask[0, :, rows, :count].to(wide)
            by_head += part if len(part) == 1 else part.unflatten(0, (kv_heads, group))
        least = seen[first]
        if is_causal and least < count:
            later = segment.dropped[least:count] > segment.kept[rows].unsqueeze(1)
            by_head[..., least:].masked_fill_(later, -torch.inf)
        # Rows that see no key: exp(score - inf) is 0.
        own_lse = lse[0, :, rows].unflatten(0, (kv_heads, group)).flatten(1, 2)
        own_lse = own_lse.masked_fill(own_lse == -torch.inf, torch.inf)
        block = block.sub_(own_lse.unsqueeze(-1)).exp_()
        products = (grads * outs).sum(-1, keepdim=True)
        block = block.mul_((grads @ values[:, :count].transpose(1, 2)).sub_(products))
        found = (block @ keys[:, :count]).mul_(scores.scale)
        grad_query[0, :, rows] += found.unflatten(1, (group, -1)).flatten(0, 1).to(query.dtype)


def dense(op: Operation) -> Plan:
    """torch's attention of a batch of sequences with their own keys."""
    node, rows = op.node, op.rows
    if not rows.are_equal(op.layouts.get(0), _QUERY) or op.layouts.keys() != {0}:
        raise NotByRowsError("attention whose output is stored otherwise")
    if not _is_over_own_rows(node, rows, op.began):
        raise NotByRowsError("attention over another sequence")
    if node._saved_dropout_p or are_by_hooks(node):
        return with_all_rows(op)
    saved = dict(op.saved.tensors(node))
    names = _DENSE[node.name()]
    query, key, value, out, lse = (saved[f"_saved_{name}"] for name in names[:5])
    mask = saved.get(f"_saved_{names[5]}")
    sizes = query.shape[0], query.shape[2]
    if sizes != (rows.sequences, rows.columns) or key.shape[2] != query.shape[2]:
        raise NotByRowsError(f"attention of {query.shape[2]} rows over {key.shape[2]} keys")
    is_causal = node._saved_is_causal
    scale = node._saved_scale
    scores = Scores(query.shape[3] ** -0.5 if scale is None else scale)
    for name in names:
        if f"_saved_{name}" in saved:
            is_of_queries = name in (names[0], *names[3:5])
            op.saved.gather(node, f"_saved_{name}", _QUERY if is_of_queries else None)
    starts = range(0, rows.total, rows.columns)
    own = list(segments(rows, [(start, start + rows.columns) for start in starts]))
    del query, key, value, out, lse, mask, saved

    def run(gradients: Gradients) -> Gradients:
        *tensors, mask = (getattr(node, f"_saved_{name}") for name in names)
        if mask is not None:
            mask = _expanded(mask, rows.columns, tensors[0].dtype)
        grads = of_segments(gradients[0], *tensors, own, is_causal, scores, mask)
        return [*grads, *[None] * (len(op.inputs) - 3)]

    layouts = [_QUERY if sizes is not None else None for sizes in op.inputs[:3]]
    return Plan([*layouts, *[None] * (len(op.inputs) - 3)], run)


def _expanded(mask: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask that torch accepts as :func:`of_segments` takes it."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask.expand(-1, -1, columns, columns)


# Attributes of query, key, value, output, log-sum-exp and mask, by the name of the node.
_DENSE = {
    "ScaledDotProductFlashAttentionForCpuBackward0": (
        *("query", "key", "value", "output", "logsumexp", "attn_mask"),
    ),
}


def causal(op: Operation) -> Plan:
    """:class:`.CausalAttention`: one sequence over itself."""
    node, rows = op.node, op.rows
    _check_one_row(op)
    if are_by_hooks(node):
        return with_all_rows(op)
    query, key, value, out, lse = range(5)
    for item in (query, out, lse):
        op.saved.gather_item(node, item, _QUERY)
    for item in (key, value):
        op.saved.gather_item(node, item, None)
    own = list(segments(rows, [(0, rows.columns)]))

    def run(gradients):
        grads = of_segments(gradients[0], *node.saved_tensors, own, True, node.scores)
        return by_edges(node, [*grads, None])

    return Plan(by_edges(node, [_QUERY, _QUERY, _QUERY, None]), run)


def packed(op: Operation) -> Plan:
    """:class:`.PackedAttention`: packed sequences over shared prefixes and over themselves."""
    node, rows = op.node, op.rows
    _check_one_row(op)
    rules: Rules = node.rules
    if are_by_hooks(node):
        return with_all_rows(op)
    saved = node.saved_tensors
    if rules.limits or rules.softcap is not None or saved[3] is not None:
        # A window, a soft cap or sinks.
        return with_all_rows(op)
    of_queries = {0, 4, *range(5, 5 + node.log_sum_exps)}
    for item, tensor in enumerate(saved):
        if tensor is not None:
            op.saved.gather_item(node, item, _QUERY if item in of_queries else None)
    del saved
    bounds = [
        (run.start + i * run.length, run.start + (i + 1) * run.length)
        for run in node.packed.runs
        for i in range(run.count)
    ]
    own = list(segments(rows, bounds))
    kept = Packed((), node.packed.offsets[rows.index.cpu()])

    def run(gradients):
        query, key, value, _, out, *others = node.saved_tensors
        lses, flat = others[: node.log_sum_exps], others[node.log_sum_exps :]
        past = tuple(zip(flat[::2], flat[1::2], strict=True))

        def of_own(grad_query, part_grad, part_lse):
            tensors = part_grad, query, key, value, out, part_lse
            part_query, *grads = of_segments(*tensors, own, True, rules.scores)
            grad_query.add_(part_query)
            return grads

        grads = packed_attention.packed_backward(
            gradients[0], query, key, value, None, out, lses, kept, rules, past, node.add, of_own
        )
        return by_edges(node, [*grads, None, None, None, None])

    return Plan(by_edges(node, [_QUERY, _QUERY, _QUERY, *[None] * 5]), run)


def with_all_rows(op: Operation) -> Plan:
    """Runs attention with zeros in dropped rows. Their keys and values get no gradient."""
    rows, sizes = op.rows, op.output
    layouts = [
        _QUERY if own is not None and len(own) == 4 and own[2] == rows.columns else None
        for own in op.inputs
    ]

    def run(gradients):
        found = op.call([rows.scatter(gradients[0], _QUERY, sizes)])
        both = zip(found, layouts, strict=True)
        return [x if x is None or own is None else rows.gather(x, own) for x, own in both]

    return Plan(layouts, run, is_whole=True)


def _check_one_row(op: Operation) -> None:
    """These functions attend to the rows of one batch row."""
    if op.rows.sequences != 1 or not op.rows.are_equal(op.layouts.get(0), _QUERY):
        raise NotByRowsError("attention whose output is stored otherwise")


def _is_over_own_rows(node, rows: Rows, began: int) -> bool:
    """Returns whether query, key and value are of the layers' own sequence: from one tensor of it.
    Sizes do not tell, where another sequence is as long."""
    first, *others = (sources_of(edge, rows, began) for edge in GraphEdge(node, 0).below())
    return None not in first and all(each == first for each in others)


def anchor(node, rows: Rows, began: int) -> Layout | None:
    """Returns the layout of what an attention of the batch returns; None for other nodes."""
    kind = kind_of(node)
    if kind not in KNOWN:
        return None
    if kind in _DENSE and not _is_over_own_rows(node, rows, began):
        return None
    sizes = node._input_metadata[0].shape
    has_rows = len(sizes) == 4 and (sizes[0], sizes[2]) == (rows.sequences, rows.columns)
    return _QUERY if has_rows else None


KNOWN = {
    **{name: dense for name in _DENSE},
    CausalAttention: causal,
    PackedAttention: packed,
}
"""Rules by :func:`.rules.kind_of` nodes."""
