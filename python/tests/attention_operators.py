"""The GPU's attention operators on the CPU, for tests: called as torch and FlashAttention's
packages declare them, every softmax at once in FP64, with the layouts and traps of those."""

from __future__ import annotations

import types

import torch

aten = torch.ops.aten


def _scores(query, key, causal: bool, scale: float) -> torch.Tensor:
    scores = query.double() @ _shared(key, query).transpose(-2, -1) * scale
    if causal:
        rows, keys = scores.shape[-2:]
        assert rows == keys
        scores = scores.masked_fill(torch.ones(rows, keys).triu(1).bool(), -torch.inf)
    return scores


def _shared(x, query) -> torch.Tensor:
    return x.double().repeat_interleave(query.shape[1] // x.shape[1], 1)


def attend(query, key, value, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural log-sum-exp; heads before rows."""
    scores = _scores(query, key, causal, scale)
    out = scores.softmax(-1) @ _shared(value, query)
    wide = torch.promote_types(query.dtype, torch.float32)
    return out.to(query.dtype), scores.logsumexp(-1).to(wide)


def attend_backward(grad, query, key, value, out, lse, causal: bool, scale: float):
    """Gradients of a part of a softmax whose log-sum-exp and output are given."""
    weights = (_scores(query, key, causal, scale) - lse.double().unsqueeze(-1)).exp()
    grad, out = grad.double(), out.double()
    products = grad @ _shared(value, query).transpose(-2, -1)
    slopes = weights * (products - (grad * out).sum(-1, keepdim=True)) * scale
    heads = (key.shape[1], -1)
    grad_key = (slopes.transpose(-2, -1) @ query.double()).unflatten(1, heads).sum(2)
    grad_value = (weights.transpose(-2, -1) @ grad).unflatten(1, heads).sum(2)
    grads = slopes @ _shared(key, query), grad_key, grad_value
    return [each.to(x.dtype) for each, x in zip(grads, (query, key, value), strict=True)]


def bound(operator, args, kwargs) -> types.SimpleNamespace:
    """Arguments by the names that torch declares, defaults included."""
    declared = operator.default._schema.arguments
    assert set(kwargs) <= {each.name for each in declared}
    named = {each.name: each.default_value for each in declared if each.has_default_value()}
    named |= dict(zip((each.name for each in declared), args, strict=False)) | kwargs
    assert named.keys() == {each.name for each in declared}
    return types.SimpleNamespace(**named)


class CudnnOperators:
    """Keeps a plan per sizes and strides of query, key and value, as torch does: in a later
    backward it reads the output and its gradient by the strides that they had in the first.
    Gradients are NaN where those of cuDNN 9.25 on Hopper are."""

    def __init__(self, has_column: bool = True):
        """``has_column``: log-sum-exps are ``[batch, heads, rows, 1]``."""
        self._has_column = has_column
        self._plans: dict = {}
        self.backwards = 0

    def _scaled_dot_product_cudnn_attention(self, *args, **kwargs):
        a = bound(aten._scaled_dot_product_cudnn_attention, args, kwargs)
        assert (a.attn_bias, a.compute_log_sumexp) == (None, True)
        assert (a.dropout_p, a.return_debug_mask) == (0.0, False)
        out, lse = attend(a.query, a.key, a.value, a.is_causal, a.scale)
        lse = lse.unsqueeze(-1) if self._has_column else lse
        rows, keys = a.query.shape[2], a.key.shape[2]
        state = torch.zeros((), dtype=torch.int64)
        return _laid_out_as(a.query, out), lse, None, None, rows, keys, state, state, None

    def _scaled_dot_product_cudnn_attention_backward(self, *args, **kwargs):
        a = bound(aten._scaled_dot_product_cudnn_attention_backward, args, kwargs)
        assert (a.attn_bias, a.cum_seq_q, a.cum_seq_k, a.dropout_p) == (None, None, None, 0.0)
        assert (a.max_q, a.max_k) == (a.query.shape[2], a.key.shape[2])
        # On some GPUs torch converts them, used or not.
        assert a.philox_seed.dtype == a.philox_offset.dtype == torch.int64
        assert a.logsumexp.is_contiguous()
        assert a.logsumexp.dim() == 3 + self._has_column
        lse = a.logsumexp.reshape(a.query.shape[:3])
        plan = tuple((x.shape, x.stride()) for x in (a.query, a.key, a.value)), a.is_causal
        strides = self._plans.setdefault(plan, (a.out.stride(), a.grad_out.stride()))
        out, grad = (
            x.as_strided(x.shape, stride)
            for x, stride in zip((a.out, a.grad_out), strides, strict=True)
        )
        self.backwards += 1
        grads = attend_backward(grad, a.query, a.key, a.value, out, lse, a.is_causal, a.scale)
        overflows = (lse < -88.7).unsqueeze(-1)
        if not a.is_causal and a.max_k % 128 == 64:
            grads[0].masked_fill_(overflows, torch.nan)
        if not a.is_causal and a.max_q == 1 and overflows.any():
            grads[1:] = (each.fill_(torch.nan) for each in grads[1:])
        return grads


class FlashOperators:
    """FlashAttention 2 as torch contains it."""

    def __init__(self):
        self.forwards: list[tuple[int, ...] | None] = []
        """First rows of the pieces of each call; None: without."""

    def _flash_attention_forward(self, *args, **kwargs):
        a = bound(aten._flash_attention_forward, args, kwargs)
        assert (a.dropout_p, a.return_debug_mask) == (0.0, False)
        self.forwards.append(None if a.cum_seq_q is None else tuple(a.cum_seq_q.tolist()))
        lengths = a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k
        out, lse = flash(a.query, a.key, a.value, *lengths, a.is_causal, a.scale)
        return out, lse, None, None, None

    def _flash_attention_backward(self, *args, **kwargs):
        a = bound(aten._flash_attention_backward, args, kwargs)
        assert a.dropout_p == 0.0
        assert a.rng_state.shape == (2,)
        assert a.rng_state.dtype == a.unused.dtype == torch.uint64
        assert a.logsumexp.is_contiguous()
        tensors = a.grad_out, a.query, a.key, a.value, a.out, a.logsumexp
        lengths = a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k
        return flash_backward(*tensors, *lengths, a.is_causal, a.scale)


class Flash3Package:
    """``flash_attn_interface``."""

    @staticmethod
    def _flash_attn_forward(
        q,
        k,
        v,
        k_new=None,
        v_new=None,
        qv=None,
        out_=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
    ):
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return *flash(q, k, v, *lengths, causal, softmax_scale), None, None

    @staticmethod
    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        assert (sequed_q, sequed_k) == (None, None)
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        grads = flash_backward(dout, q, k, v, out, softmax_lse, *lengths, is_causal, softmax_scale)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)


class Flash4Package:
    """``flash_attn.cute.interface``."""

    @staticmethod
    def _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        softcap=None,
        return_lse=False,
    ):
        longest = _longest(cu_seqlens_q), _longest(cu_seqlens_k)
        lengths = cu_seqlens_q, cu_seqlens_k, *longest
        out, lse = flash(q, k, v, *lengths, causal, softmax_scale)
        return out, lse if return_lse else None

    @staticmethod
    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
    ):
        longest = _longest(cu_seqlens_q), _longest(cu_seqlens_k)
        lengths = cu_seqlens_q, cu_seqlens_k, *longest
        return flash_backward(dout, q, k, v, out, lse, *lengths, causal, softmax_scale)


def flash(q, k, v, starts, key_starts, longest, longest_key, causal, scale):
    """Tokens first. With ``starts``: ``[rows, heads, width]``, log-sum-exp ``[heads, rows]``."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    if starts is None:
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return out.transpose(1, 2), lse
    _check_starts(q, starts, key_starts, longest, longest_key, causal)
    parts = [
        attend(*(x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)), causal, scale)
        for begin, end in zip(starts[:-1], starts[1:], strict=True)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2)[0].transpose(0, 1), torch.cat(lses, 2)[0]


def flash_backward(
    grad, q, k, v, out, lse, starts, key_starts, longest, longest_key, causal, scale
):
    """Tokens first, as :func:`flash`."""
    tensors = grad, q, k, v, out
    if starts is None:
        grads = attend_backward(*(x.transpose(1, 2) for x in tensors), lse, causal, scale)
        return [each.transpose(1, 2) for each in grads]
    _check_starts(q, starts, key_starts, longest, longest_key, causal)
    assert lse.shape == (q.shape[1], q.shape[0])
    parts = [
        attend_backward(
            *(x[begin:end].transpose(0, 1).unsqueeze(0) for x in tensors),
            lse[None, :, begin:end],
            causal,
            scale,
        )
        for begin, end in zip(starts[:-1], starts[1:], strict=True)
    ]
    return [torch.cat(each, 2)[0].transpose(0, 1) for each in zip(*parts, strict=True)]


def _check_starts(q, starts, key_starts, longest, longest_key, causal) -> None:
    assert causal
    assert starts is key_starts
    assert starts.dtype == torch.int32
    assert (int(starts[0]), int(starts[-1])) == (0, len(q))
    assert longest == longest_key == _longest(starts)


def _longest(starts) -> int | None:
    return None if starts is None else int(starts.diff().max())


def _laid_out_as(query, out) -> torch.Tensor:
    order = sorted(range(4), key=lambda dim: -query.stride(dim))
    return out.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
