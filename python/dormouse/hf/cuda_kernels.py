"""The attention kernels of a GPU for BF16 and FP16: cuDNN's, and FlashAttention 2, 3 and 4.

Protocol and shapes are those of :mod:`.kernels`; the log-sum-exp of all four is natural, in FP32.
None has a soft cap or a mask. A kernel raises for what it does not compute, whatever its reason,
and ``serves`` is False for calls of which it computes some wrongly; :mod:`.measured` chooses among
the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from .kernels import Causal, Pieces, Scores, narrowed, of_one_width

_aten = torch.ops.aten

# As cuDNN counts: 9.15.1. Earlier ones read past the end of sequences whose length is no multiple
# of 128 (pytorch#169849).
CUDNN_VERSION_MIN = 91_501
# 9.26, the first with correct gradients on Hopper where the last tile of keys is half full.
CUDNN_VERSION_OF_HALF_TILES = 92_600
KEY_TILE = 128
HOPPER = 9


class Cudnn:
    """cuDNN's, by torch's operator. Values may have another width. No :class:`Pieces`: in its
    variable-length form torch passes a width for a length to the backward."""

    name = "cudnn"
    # Gradients of queries are summed in the order in which blocks finish.
    is_deterministic = False

    def __init__(self):
        # torch declares log-sum-exps [batch, heads, rows, 1], and some versions drop the last
        # dimension. Backward takes what forward returned.
        self._has_column = True

    @staticmethod
    def is_enabled() -> bool:
        return torch.backends.cuda.cudnn_sdp_enabled()

    @staticmethod
    def serves(query, key, causal: Causal) -> bool:
        """Returns False for calls of which this version of cuDNN computes some wrongly. It depends
        on their values: a measurement does not see it, and a direct call goes past torch's checks.

        One row or key: gradients of keys and values may be NaN (cudnn-frontend#1072), and outputs
        wrong (pytorch#193893). Hopper, where the keys fill half of the last tile: gradients of
        queries are NaN if a log-sum-exp is below -88.7 (pytorch#196678).
        """
        keys = key.shape[2]
        if query.shape[2] == 1 or keys == 1:
            return False
        if causal or keys % KEY_TILE != KEY_TILE // 2 or _capability(query.device)[0] != HOPPER:
            return True
        try:
            return _cudnn_version() >= CUDNN_VERSION_OF_HALF_TILES
        except RuntimeError:
            return True  # forward says why it cannot run

    def forward(self, query, key, value, causal: Causal, scores: Scores):
        _refuse_pieces(causal)
        version = _cudnn_version()
        if version < CUDNN_VERSION_MIN:
            raise NotImplementedError(f"cuDNN {version}; accepted: at least {CUDNN_VERSION_MIN}")
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scores.scale
        )[:2]
        self._has_column = lse.dim() == query.dim()
        return out, lse.reshape(query.shape[:3])

    def backward(self, grad, query, key, value, out, lse, causal: Causal, scores: Scores):
        _refuse_pieces(causal)
        lse = lse.contiguous()
        unused = lse.new_empty((), dtype=torch.int64)  # the state of a dropout that is off
        return _aten._scaled_dot_product_cudnn_attention_backward(
            in_layout_of(query, grad),
            query,
            key,
            value,
            in_layout_of(query, out),
            lse.unsqueeze(-1) if self._has_column else lse,
            unused,
            unused,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            scale=scores.scale,
        )


class _Flash:
    """What the three versions share: tokens first, one width, rows of all pieces in one dimension.

    They take ``[batch, rows, heads, width]``, or ``[rows, heads, width]`` with the first row of
    each piece; and return log-sum-exps ``[batch, heads, rows]`` or ``[heads, rows]``.
    """

    @staticmethod
    def serves(query, key, causal: Causal) -> bool:
        """Returns True: no call is computed wrongly."""
        return True

    def forward(self, query, key, value, causal: Causal, scores: Scores):
        wide = (_tokens_first(x, causal) for x in of_one_width(query, key, value))
        out, lse = self._forward(*wide, _Call.of(query, key, causal, scores))
        out = _heads_first(out, causal)[..., : value.shape[-1]]
        return out, lse.unsqueeze(0) if isinstance(causal, Pieces) else lse

    def backward(self, grad, query, key, value, out, lse, causal: Causal, scores: Scores):
        wide = (_tokens_first(x, causal) for x in of_one_width(grad, query, key, value, out))
        lse = lse.contiguous()
        if isinstance(causal, Pieces):
            lse = lse.squeeze(0)
        grads = self._backward(*wide, lse, _Call.of(query, key, causal, scores))
        return tuple(
            narrowed(_heads_first(each, causal), x)
            for each, x in zip(grads, (query, key, value), strict=True)
        )


class _Call:
    """What a call says beside its tensors."""

    def __init__(self, starts, rows: int, keys: int, is_causal: bool, scale: float):
        self.starts: torch.Tensor | None = starts
        self.rows, self.keys = rows, keys
        self.is_causal, self.scale = is_causal, scale

    @classmethod
    def of(cls, query, key, causal: Causal, scores: Scores) -> _Call:
        if isinstance(causal, Pieces):
            longest = causal.longest
            return cls(causal.starts(query.device), longest, longest, True, scores.scale)
        return cls(None, query.shape[2], key.shape[2], causal, scores.scale)


class Flash2(_Flash):
    """FlashAttention 2, which torch contains; ``width`` a multiple of 8 up to 256."""

    name = "flash 2"
    # torch's operator follows torch.use_deterministic_algorithms.
    is_deterministic = True

    @staticmethod
    def is_enabled() -> bool:
        return torch.backends.cuda.flash_sdp_enabled()

    def _forward(self, query, key, value, call: _Call):
        return _aten._flash_attention_forward(
            query,
            key,
            value,
            call.starts,
            call.starts,
            call.rows,
            call.keys,
            0.0,
            call.is_causal,
            False,
            scale=call.scale,
        )[:2]

    def _backward(self, grad, query, key, value, out, lse, call: _Call):
        # The state of a dropout that is off, as forward returns it.
        state, unused = (lse.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
        return _aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            lse,
            call.starts,
            call.starts,
            call.rows,
            call.keys,
            0.0,
            call.is_causal,
            state,
            unused,
            scale=call.scale,
        )


class _Packaged(_Flash):
    """A version in a package of its own, where that is installed."""

    module: str

    @classmethod
    def is_enabled(cls) -> bool:
        return torch.backends.cuda.flash_sdp_enabled() and _is_installed(cls.module)


class Flash3(_Packaged):
    """FlashAttention 3."""

    name = "flash 3"
    module = "flash_attn_interface"
    is_deterministic = True

    def _forward(self, query, key, value, call: _Call):
        return _interface(self.module)._flash_attn_forward(
            query,
            key,
            value,
            cu_seqlens_q=call.starts,
            cu_seqlens_k=call.starts,
            max_seqlen_q=call.rows,
            max_seqlen_k=call.keys,
            softmax_scale=call.scale,
            causal=call.is_causal,
        )[:2]

    def _backward(self, grad, query, key, value, out, lse, call: _Call):
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        # By place: the name of the last differs between releases.
        _interface(self.module)._flash_attn_backward(
            grad,
            query,
            key,
            value,
            out,
            lse,
            call.starts,
            call.starts,
            None,
            None,
            call.rows,
            call.keys,
            *grads,
            call.scale,
            call.is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


class Flash4(_Packaged):
    """FlashAttention 4. Releases raise for what they do not compute on a GPU."""

    name = "flash 4"
    module = "flash_attn.cute.interface"
    is_deterministic = False

    def _forward(self, query, key, value, call: _Call):
        return _interface(self.module)._flash_attn_fwd(
            query,
            key,
            value,
            cu_seqlens_q=call.starts,
            cu_seqlens_k=call.starts,
            softmax_scale=call.scale,
            causal=call.is_causal,
            return_lse=True,
        )[:2]

    def _backward(self, grad, query, key, value, out, lse, call: _Call):
        return _interface(self.module)._flash_attn_bwd(
            query,
            key,
            value,
            out,
            grad,
            lse,
            softmax_scale=call.scale,
            causal=call.is_causal,
            cu_seqlens_q=call.starts,
            cu_seqlens_k=call.starts,
        )[:3]


CANDIDATES = (Flash2(), Cudnn(), Flash3(), Flash4())
"""The first serves a call that cannot be measured."""


def in_layout_of(query: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` dense, its dimensions in memory ordered as those of ``query``.

    torch keeps cuDNN's plan of a backward by sizes and strides of query, key and value alone: with
    ``out`` or its gradient laid out otherwise than in the first call, a later one would read them
    wrongly. This is the layout in which torch's own forward returns ``out``.
    """
    order = sorted(range(x.dim()), key=lambda dim: (-query.stride(dim), dim))
    dense = x.permute(order).contiguous()
    return dense.permute([order.index(dim) for dim in range(x.dim())])


def _cudnn_version() -> int:
    """Raises RuntimeError if the library is not the one that torch was built for."""
    return torch.backends.cudnn.version() or 0


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _refuse_pieces(causal: Causal) -> None:
    if isinstance(causal, Pieces):
        raise NotImplementedError("no variable-length form")


def _tokens_first(x: torch.Tensor, causal: Causal) -> torch.Tensor:
    return x[0].transpose(0, 1) if isinstance(causal, Pieces) else x.transpose(1, 2)


def _heads_first(x: torch.Tensor, causal: Causal) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0) if isinstance(causal, Pieces) else x.transpose(1, 2)


@functools.cache
def _is_installed(module: str) -> bool:
    """Returns whether the package is there; its import may still raise, and refuse the call."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _interface(module: str) -> Any:
    return importlib.import_module(module)
