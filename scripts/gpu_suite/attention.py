"""``python -m gpu_suite.attention [--tiny]``: torch's attention kernels at the headline's shapes.

Rates of flash and cuDNN, forward and backward, and whether each gives exact gradients when its
backward is fed the output and log-sum-exp of a merged softmax, as the shared schedule does. The
truth is FP64.
"""

from __future__ import annotations

import math
import sys
import time
from statistics import median

from .result import DONE
from .rows import LOWER, row
from .say import say

ROUNDS = 5
HEAD_DIM = 128
# (name, batch, query heads, key heads, rows, keys, causal)
SHAPES = (
    ("16k rows on a prefix of 10k", 1, 32, 8, 16384, 10240, False),
    ("own rows of 2 × 2k", 2, 32, 8, 2048, 2048, True),
    ("dense, 12k", 1, 32, 8, 12288, 12288, True),
)
TINY_DIVISOR = 64
EXACT_ROWS, EXACT_KEYS, EXACT_HEADS = 128, 256, 4
# A merged gradient may be this much farther from FP64 than the kernel's own whole gradient.
MERGED_OVER_WHOLE_MAX = 1.25
# Of BF16 gradients to FP64: rounding is below 0.02, and zeros are at 1.
DISTANCE_MAX = 0.1


def main(tiny: bool) -> int:
    """Measures each kernel at each shape; returns the part's status."""
    import torch

    for kernel in _kernels():
        for shape in SHAPES:
            _rate(torch, kernel, shape, tiny)
        _merged(torch, kernel)
    return DONE


class _Flash:
    name = "flash"

    @staticmethod
    def forward(query, key, value, causal):
        import torch

        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False
        )
        return found[0], found[1], found

    @staticmethod
    def backward(grad, query, key, value, out, lse, found, causal):
        import torch

        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, found[2], found[3], query.shape[2], key.shape[2],
            0.0, causal, found[6], found[7],
        )  # fmt: skip


class _Cudnn:
    name = "cudnn"

    @staticmethod
    def forward(query, key, value, causal):
        import torch

        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False
        )
        return found[0], found[1], found

    @staticmethod
    def backward(grad, query, key, value, out, lse, found, causal):
        import torch

        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, lse, found[6], found[7], None, found[2], found[3],
            query.shape[2], key.shape[2], 0.0, causal,
        )  # fmt: skip


def _kernels() -> tuple:
    """Those that torch can load here: without its cuDNN it may crash instead of refusing."""
    import torch

    try:
        return (_Flash, _Cudnn) if torch.backends.cudnn.version() else (_Flash,)
    except RuntimeError:
        return (_Flash,)


def _rate(torch, kernel, shape, tiny: bool) -> None:
    name, batch, heads, kv_heads, rows, keys, causal = shape
    if tiny:
        rows, keys = rows // TINY_DIVISOR, keys // TINY_DIVISOR
    query, key, value = _operands(torch, batch, heads, kv_heads, rows, keys)
    scores = batch * heads * rows * (keys / 2 if causal else keys)
    flops = 4.0 * scores * HEAD_DIM
    row_name = f"{kernel.name}, {name}"
    try:
        out, lse, found = kernel.forward(query, key, value, causal)
        grad = torch.randn_like(out)

        def both() -> None:
            kernel.backward(grad, query, key, value, out, lse, found, causal)

        ahead = _seconds(torch, lambda: kernel.forward(query, key, value, causal))
        back = _seconds(torch, both)
    except RuntimeError as error:
        say("row", row(row_name, "TFLOP/s", None, how=f"refused: {str(error).splitlines()[0]}"))
        return
    say("row", row(row_name, "TFLOP/s", 3.5 * flops / (ahead + back) / 1e12,
                   how="forward and backward together; each alone", forward=flops / ahead / 1e12,
                   backward=2.5 * flops / back / 1e12))  # fmt: skip


def _merged(torch, kernel) -> None:
    """Two parts of the keys, merged, against all keys at once; distances to FP64."""
    query, key, value = _operands(torch, 1, EXACT_HEADS, EXACT_HEADS, EXACT_ROWS, EXACT_KEYS)
    half = EXACT_KEYS // 2
    cuts = (slice(0, half), slice(half, EXACT_KEYS))
    name = f"{kernel.name}: merged-softmax gradient ÷ whole, distance to FP64"
    bar = MERGED_OVER_WHOLE_MAX if kernel is _Flash else None
    try:
        parts = [
            kernel.forward(query, key[:, :, cut].contiguous(), value[:, :, cut].contiguous(), False)
            for cut in cuts
        ]
        lses = [_rows(part[1], query) for part in parts]
        lse = torch.logaddexp(*lses)
        out = sum(
            part[0].float() * (each - lse).exp().unsqueeze(-1)
            for part, each in zip(parts, lses, strict=True)
        ).to(query.dtype)
        grad = torch.randn_like(out)
        fed = lse.view_as(parts[0][1]).to(parts[0][1].dtype).contiguous()
        merged = sum(
            kernel.backward(
                grad,
                query,
                key[:, :, cut].contiguous(),
                value[:, :, cut].contiguous(),
                out,
                fed,
                part[2],
                False,
            )[0].float()
            for cut, part in zip(cuts, parts, strict=True)
        )
        whole_out, whole_lse, found = kernel.forward(query, key, value, False)
        whole = kernel.backward(grad, query, key, value, whole_out, whole_lse, found, False)[0]
        truth = _exact_gradient(torch, query, key, value, grad)
    except RuntimeError as error:
        how = f"refused: {str(error).splitlines()[0]}"
        say("row", row(name, "ratio", None, bar=bar, better=LOWER, how=how))
        return
    distances = [_distance(each, truth) for each in (merged, whole)]
    ratio, how = None, f"no figure: distances {distances}; accepted: above 0, below {DISTANCE_MAX}"
    # False for NaN.
    if all(0.0 < each < DISTANCE_MAX for each in distances):
        ratio, how = distances[0] / distances[1], "of queries, BF16"
    say("row", row(name, "ratio", ratio, bar=bar, better=LOWER, how=how,
                   merged=distances[0], whole=distances[1]))  # fmt: skip


def _operands(torch, batch, heads, kv_heads, rows, keys):
    generator = torch.Generator("cuda").manual_seed(1)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    query = torch.randn(batch, heads, rows, HEAD_DIM, **options)
    key, value = (torch.randn(batch, kv_heads, keys, HEAD_DIM, **options) for _ in range(2))
    return query, key, value


def _rows(lse, query):
    """Log-sum-exp as ``[batch, heads, rows]``: cuDNN's has a dimension more."""
    return lse.reshape(query.shape[:3]).float()


def _exact_gradient(torch, query, key, value, grad):
    wide = [each.double() for each in (query, key, value, grad)]
    scores = (wide[0] @ wide[1].transpose(-2, -1) / math.sqrt(HEAD_DIM)).softmax(-1)
    slope = wide[3] @ wide[2].transpose(-2, -1)
    slope = scores * (slope - (slope * scores).sum(-1, keepdim=True))
    return slope @ wide[1] / math.sqrt(HEAD_DIM)


def _distance(seen, truth) -> float:
    return float((seen.double() - truth).norm() / truth.norm())


def _seconds(torch, work) -> float:
    work()
    taken = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.monotonic()
        work()
        torch.cuda.synchronize()
        taken.append(time.monotonic() - start)
    return median(taken)


if __name__ == "__main__":
    sys.exit(main("--tiny" in sys.argv[1:]))
