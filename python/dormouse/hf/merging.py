"""Merges two parts of attention by the library's kernel, in one pass over their outputs.

By torch's operators a merge takes five passes, two of them in FP32, and backward computes the
merged log-sum-exps anew.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch

from .. import _native as native
from ..errors import ArgumentError
from ..runtime import dtype_code

DTYPES = (torch.bfloat16, torch.float16)
# Kinds of device on which the library merges. On the CPU its kernel runs on one thread, torch's operators on all.
KINDS = {"cuda"}

# GPUs on which another allocator made tensors, which the library does not know.
_without: set[torch.device] = set()
_lock = threading.Lock()


def merge(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns output and log-sum-exp of two parts together; None where the kernel does not serve.

    ``outs``: ``[1, heads, rows, width]``, of :data:`DTYPES`. ``lses``: ``[1, heads, rows]``, FP32;
    minus infinity for rows without keys. The output is stored tokens-first. Any-thread.
    """
    like = outs[0]
    if like.dtype not in DTYPES or like.device.type not in KINDS or like.device in _without:
        return None
    out1, out2 = (_tokens_first(each) for each in outs)
    lse1, lse2 = (_tokens_first(each) for each in lses)
    out, lse = torch.empty_like(out1), torch.empty_like(lse1)
    arguments = native.MergeArgs(
        out1=out1.data_ptr(),
        lse1=lse1.data_ptr(),
        out2=out2.data_ptr(),
        lse2=lse2.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        rows=lse.numel(),
        head_dim=out.shape[-1],
        dtype=dtype_code(like.dtype),
        flags=native.MERGE_ON_GPU if like.device.type == "cuda" else 0,
    )
    try:
        native.call("kernel_merge_lse", ctypes.byref(arguments), _stream(like.device))
    except ArgumentError:
        with _lock:
            _without.add(like.device)
        return None
    return out.transpose(1, 2), lse.transpose(1, 2)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Returns ``[1, heads, rows, ...]`` as ``[1, rows, heads, ...]``, contiguous."""
    return x.transpose(1, 2).contiguous()


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
