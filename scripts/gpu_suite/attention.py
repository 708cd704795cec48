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
CUDNN = "cudnn"
# (name, batch, query heads, key heads, rows, keys, causal)
SHAPES = (
    ("16k rows on a prefix of 10k", 1, 32, 8, 16384, 10240, False),
    ("own rows of 2 × 2k", 2, 32, 8, 2048, 2048, True),
    ("dense, 12k", 1, 32, 8, 12288, 12288, True),
)
TINY_DIVISOR = 64
# More rows and keys than a tile has, heads that share keys, and pieces longer than a tile.
EXACT_ROWS, EXACT_KEYS, EXACT_HEADS, EXACT_KV_HEADS = 320, 512, 4, 2
PIECES = (260, 60)  # of EXACT_ROWS
# A gradient may be this much farther from FP64 than the kernel's own in one call.
OVER_PLAIN_MAX = 1.25
# Of BF16 gradients to FP64: rounding is below 0.02, one lost key of those above at 0.04.
DISTANCE_MAX = 4 * 2**-7
NAMES = ("queries", "keys", "values")


def main(tiny: bool) -> int:
    """Measures each kernel at each shape; returns the part's status."""
    import torch

    for kernel in _kernels():
        for shape in SHAPES:
            _rate(torch, kernel, shape, tiny)
        _judged(torch, kernel, "merged softmax ÷ whole", _merged)
        if kernel.name != CUDNN:  # which has no such form
            _judged(torch, kernel, "unequal rows in one call ÷ one by one", _in_pieces)
    return DONE


def _kernels() -> list:
    """Those that may run here; says which may not. Without the cuDNN that torch was built for, torch
    may crash instead of refusing."""
    from dormouse.hf.cuda_kernels import CANDIDATES

    left_out = {each.name: "not enabled" for each in CANDIDATES if not each.is_enabled()}
    why = _no_cudnn()
    if why is not None:
        left_out[CUDNN] = why
    for name, reason in left_out.items():
        say("row", row(f"{name}, left out", "TFLOP/s", None, how=reason))
    return [each for each in CANDIDATES if each.name not in left_out]


def _no_cudnn() -> str | None:
    import torch

    try:
        return None if torch.backends.cudnn.version() else "torch has no cuDNN"
    except RuntimeError as error:
        return _refused(error)


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
    except Exception as error:  # whatever a kernel raises for what it does not compute
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
    query, key, value = _operands(torch, 1, EXACT_HEADS, EXACT_KV_HEADS, EXACT_ROWS, EXACT_KEYS)
    halves = [
        tuple(_dense(x[:, :, cut]) for x in (key, value))
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

    operands = _operands(torch, 1, EXACT_HEADS, EXACT_KV_HEADS, EXACT_ROWS, EXACT_ROWS)
    grad = torch.randn_like(operands[0])

    def backward(grad, operands, causal):
        how = (causal, _scores())
        return kernel.backward(grad, *operands, *kernel.forward(*operands, *how), *how)

    ours = backward(grad, operands, Pieces(PIECES))
    each = list(zip(*(x.split(PIECES, 2) for x in (grad, *operands)), strict=True))
    alone = [backward(_dense(own), list(map(_dense, of)), True) for own, *of in each]
    exact = [_exact(torch, *of, causal=True) for of in each]
    joined = [
        tuple(torch.cat(x, 2) for x in zip(*of, strict=True)) for of in (alone, exact)
    ]
    return ours, *joined


def _operands(torch, batch, heads, kv_heads, rows, keys):
    generator = torch.Generator("cuda").manual_seed(1)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    shapes = ((rows, heads), (keys, kv_heads), (keys, kv_heads))
    made = (torch.randn(batch, *shape, HEAD_DIM, **options) for shape in shapes)
    return [x.transpose(1, 2) for x in made]  # tokens first in memory, as models have them


def _dense(x):
    """The same values by themselves, tokens first in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _exact(torch, grad, query, key, value, *, causal: bool):
    """Returns the gradients of query, key and value in FP64."""
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
    shared = query.shape[1] // key.shape[1]
    own_key, own_value = (x.repeat_interleave(shared, 1) for x in wide[1:])
    scores = wide[0] @ own_key.transpose(-2, -1) / math.sqrt(HEAD_DIM)
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.autograd.grad(scores.softmax(-1) @ own_value, wide, grad.double())


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
