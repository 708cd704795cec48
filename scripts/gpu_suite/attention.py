"""``python -m gpu_suite.attention [--tiny]``: our attention kernels at the headline's shapes.

Rates of those of :mod:`dormouse.hf.cuda_kernels` that are enabled, forward and backward, and
whether each gives exact gradients as the shared schedule calls it: its backward fed the output and
log-sum-exp of a merged softmax, and unequal rows in one call. The truth is FP64.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
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
PIECES = (100, 28)  # of EXACT_ROWS
# A gradient may be this much farther from FP64 than the kernel's own in one call.
OVER_PLAIN_MAX = 1.25
# Of BF16 gradients to FP64: rounding is below 0.02, and zeros are at 1.
DISTANCE_MAX = 0.1
NAMES = ("queries", "keys", "values")


def main(tiny: bool) -> int:
    """Measures each kernel at each shape; returns the part's status."""
    import torch

    for kernel in _kernels():
        for shape in SHAPES:
            _rate(torch, kernel, shape, tiny)
        _judged(torch, kernel, "merged softmax ÷ whole", _merged)
        _judged(torch, kernel, "unequal rows in one call ÷ one by one", _in_pieces)
    return DONE


def _kernels() -> list:
    """Those that may run here. Without the cuDNN that torch was built for, torch may crash instead
    of refusing."""
    import torch

    from dormouse.hf.cuda_kernels import CANDIDATES

    try:
        has_cudnn = bool(torch.backends.cudnn.version())
    except RuntimeError:
        has_cudnn = False
    enabled = [each for each in CANDIDATES if each.is_enabled()]
    return enabled if has_cudnn else [each for each in enabled if each.name != "cudnn"]


def _scores():
    from dormouse.hf.kernels import Scores

    return Scores(1 / math.sqrt(HEAD_DIM))


def _rate(torch, kernel, shape, tiny: bool) -> None:
    name, batch, heads, kv_heads, rows, keys, causal = shape
    if tiny:
        rows, keys = rows // TINY_DIVISOR, keys // TINY_DIVISOR
    operands = _operands(torch, batch, heads, kv_heads, rows, keys)
    scores = batch * heads * rows * (keys / 2 if causal else keys)
    flops = 4.0 * scores * HEAD_DIM
    row_name = f"{kernel.name}, {name}"
    how = (causal, _scores())
    try:
        out, lse = kernel.forward(*operands, *how)
        grad = torch.randn_like(out)
        ahead = _seconds(torch, lambda: kernel.forward(*operands, *how))
        back = _seconds(torch, lambda: kernel.backward(grad, *operands, out, lse, *how))
    except Exception as error:  # whatever a kernel raises for what it does not compute
        say("row", row(row_name, "TFLOP/s", None, how=_refused(error)))
        return
    say("row", row(row_name, "TFLOP/s", 3.5 * flops / (ahead + back) / 1e12,
                   how="forward and backward together; each alone", forward=flops / ahead / 1e12,
                   backward=2.5 * flops / back / 1e12))  # fmt: skip


def _refused(error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"refused: {first}"


def _judged(torch, kernel, what: str, gradients: Callable) -> None:
    """Gradients of one way of calling a kernel beside those of a plain call: the tensor that is
    farthest from FP64 over the plain call's."""
    name = f"{kernel.name}: gradients, {what}, distance to FP64"
    bar = {"bar": OVER_PLAIN_MAX, "better": LOWER}
    try:
        ours, plain, truth = gradients(torch, kernel)
    except NotImplementedError as error:
        say("row", row(name, "ratio", None, how=_refused(error)))
        return
    except Exception as error:
        say("row", row(name, "ratio", None, how=_refused(error), **bar))
        return
    distances = [
        (_distance(one, exact), _distance(other, exact))
        for one, other, exact in zip(ours, plain, truth, strict=True)
    ]
    ratio, worst = None, distances[0]
    how = f"no figure: distances {distances}; accepted: above 0, below {DISTANCE_MAX}"
    # False for NaN.
    if all(0.0 < each < DISTANCE_MAX for pair in distances for each in pair):
        ratios = [one / other for one, other in distances]
        ratio = max(ratios)
        at = ratios.index(ratio)
        worst, how = distances[at], f"BF16; the worst: {NAMES[at]}"
    say("row", row(name, "ratio", ratio, how=how, ours_distance=worst[0],
                   plain_distance=worst[1], **bar))  # fmt: skip


def _merged(torch, kernel):
    """Two parts of the keys, merged, and all keys at once."""
    query, key, value = _operands(torch, 1, EXACT_HEADS, EXACT_HEADS, EXACT_ROWS, EXACT_KEYS)
    halves = [
        tuple(x[:, :, cut].contiguous() for x in (key, value))
        for cut in (slice(0, EXACT_KEYS // 2), slice(EXACT_KEYS // 2, EXACT_KEYS))
    ]
    how = (False, _scores())
    parts = [kernel.forward(query, *half, *how) for half in halves]
    lse = torch.logaddexp(*(part_lse for _, part_lse in parts))
    merged = sum(
        part.float() * (part_lse - lse).exp().unsqueeze(-1) for part, part_lse in parts
    ).to(query.dtype)
    grad = torch.randn_like(merged)
    found = [kernel.backward(grad, query, *half, merged, lse, *how) for half in halves]
    by_name = list(zip(*found, strict=True))
    ours = (sum(x.float() for x in by_name[0]), *(torch.cat(x, 2) for x in by_name[1:]))
    plain = kernel.backward(grad, query, key, value, *kernel.forward(query, key, value, *how), *how)
    return ours, plain, _exact(torch, grad, query, key, value, causal=False)


def _in_pieces(torch, kernel):
    """Sequences of unequal lengths in one call, and each in its own."""
    from dormouse.hf.kernels import Pieces

    operands = _operands(torch, 1, EXACT_HEADS, EXACT_HEADS, EXACT_ROWS, EXACT_ROWS)
    grad = torch.randn_like(operands[0])

    def backward(grad, operands, causal):
        how = (causal, _scores())
        return kernel.backward(grad, *operands, *kernel.forward(*operands, *how), *how)

    ours = backward(grad, operands, Pieces(PIECES))
    each = list(zip(*(x.split(PIECES, 2) for x in (grad, *operands)), strict=True))
    alone = [backward(own.contiguous(), [x.contiguous() for x in of], True) for own, *of in each]
    exact = [_exact(torch, *of, causal=True) for of in each]
    joined = [
        tuple(torch.cat(x, 2) for x in zip(*of, strict=True)) for of in (alone, exact)
    ]
    return ours, *joined


def _operands(torch, batch, heads, kv_heads, rows, keys):
    generator = torch.Generator("cuda").manual_seed(1)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    query = torch.randn(batch, heads, rows, HEAD_DIM, **options)
    key, value = (torch.randn(batch, kv_heads, keys, HEAD_DIM, **options) for _ in range(2))
    return query, key, value


def _exact(torch, grad, query, key, value, *, causal: bool):
    """Returns the gradients of query, key and value in FP64."""
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
    scores = wide[0] @ wide[1].transpose(-2, -1) / math.sqrt(HEAD_DIM)
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, grad.double())


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
