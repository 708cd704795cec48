"""Which attention kernel serves a call: for BF16 and FP16 on a GPU the one measured as the fastest.

A measurement runs forward and backward of one kernel on random numbers, laid out as those of the
call, and times them. Before its time counts, its results are compared with matrix products: a
kernel whose log-sum-exp has another base, or whose backward does not use the one it is given, is
refused.

The choice holds for the process and for all calls of a :class:`Kind`, so forward, backward and what
checkpointing computes again meet one kernel, and so do a step and a score. It depends on times, so
two processes may choose differently; under ``torch.use_deterministic_algorithms`` nothing is timed,
and the first deterministic kernel listed serves. torch's switches
(``torch.nn.attention.sdpa_kernel``) take candidates away, and calls that a kernel does not serve
are kinds of their own. No measurement holds a collective: ranks choose on their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import is_out_of_memory
from . import cuda_kernels
from .kernel_choice import Choice, Choices
from .kernels import Causal, CpuFlash, CudaEfficient, Pieces, Plain, PlainPieces, Scores

# Fewer rows, or keys, are one kind.
SMALL_ROWS = 256
# Timed runs of a measurement after one that builds plans and compiles; the least counts.
TIMED_RUNS = 3
# Distance of a correct kernel, relative, L2, in units of the dtype's spacing: it rounds
# probabilities, their gradients, the output and each result.
ROUNDINGS_MAX = 4
SEED = 0

Timer = Callable[[Callable[[], object], torch.device], float]
"""Returns seconds of a call on a device."""


class Kind(NamedTuple):
    """Calls that one choice serves. Sizes are rounded up to powers of two."""

    candidates: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    form: str
    """``"all keys"``, ``"causal"`` or ``"pieces"``."""
    batch: int
    """Sequences."""
    rows: int
    """Of the longest sequence."""
    keys: int
    heads: int
    kv_heads: int
    width: int
    value_width: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.form}, {self.batch} × up to {self.rows} rows × {self.keys} keys, "
            f"{self.heads}/{self.kv_heads} heads of {self.width}/{self.value_width}, {dtype}"
        )


class DiffersError(ArithmeticError):
    """A kernel's result is not that of matrix products."""


def seconds_on_stream(run: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds of :data:`TIMED_RUNS` calls on the current stream."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        seconds = []
        for _ in range(TIMED_RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            run()
            end.record(stream)
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return min(seconds)


class Measured:
    """A kernel by the protocol of :mod:`.kernels`, each call by the fastest of several.

    Without soft cap and mask. Takes :class:`.kernels.Pieces`. Thread-safe.
    """

    def __init__(self, candidates=cuda_kernels.CANDIDATES, seconds_of: Timer = seconds_on_stream):
        self._candidates, self._seconds_of = candidates, seconds_of
        self.choices = Choices(PlainPieces, is_out_of_memory)

    def forward(self, query, key, value, causal: Causal, scores: Scores, mask=None):
        return self._run(
            (query, key, value),
            causal,
            lambda kernel: kernel.forward(query, key, value, causal, scores),
        )

    def backward(
        self, grad, query, key, value, out, lse, causal: Causal, scores: Scores, mask=None
    ):
        return self._run(
            (query, key, value),
            causal,
            lambda kernel: kernel.backward(grad, query, key, value, out, lse, causal, scores),
        )

    def _run(self, tensors, causal: Causal, call):
        query, key, _ = tensors
        ordered = torch.are_deterministic_algorithms_enabled()
        candidates = [
            each
            for each in self._candidates
            if each.is_enabled()
            and (each.is_deterministic or not ordered)
            and each.serves(query, key, causal)
        ]
        kind = kind_of(*tensors, causal, tuple(each.name for each in candidates))

        def measurement() -> _Measurement:
            return _Measurement(*tensors, causal, self._seconds_of)

        self.choices.settle(kind, candidates, None if ordered else measurement)
        return self.choices.run(kind, call)


def kind_of(query, key, value, causal: Causal, candidates: tuple[str, ...]) -> Kind:
    """Returns the kind of a call."""
    batch, heads, rows, width = query.shape
    keys, form = key.shape[2], "causal" if causal else "all keys"
    if isinstance(causal, Pieces):
        batch, rows, keys, form = len(causal.lengths), causal.longest, causal.longest, "pieces"
    sizes = _rounded(batch), _rounded(rows, SMALL_ROWS), _rounded(keys, SMALL_ROWS)
    own = heads, key.shape[1], width, value.shape[3]
    return Kind(candidates, query.device, query.dtype, form, *sizes, *own)


def _rounded(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


class _Measurement:
    """Measures kernels on random tensors laid out as those of a call. Draws from a generator of its
    own: the step's random numbers stay as they are."""

    def __init__(self, query, key, value, causal: Causal, seconds_of: Timer):
        self._like, self._causal, self._seconds_of = (query, key, value), causal, seconds_of
        # Scores of about 1: none takes the whole weight of its row, as some of a model's may.
        self._scores = Scores(query.shape[3] ** -0.5)
        self._tensors = self._wanted = None

    def __call__(self, kernel) -> float:
        # Here, so that want of memory is that of a measurement.
        if self._wanted is None:
            self._tensors = self._draw()
            self._wanted = self._results(PlainPieces)
        self._compare(self._results(kernel))
        return self._seconds_of(lambda: self._results(kernel), self._like[0].device)

    def _draw(self) -> list[torch.Tensor]:
        """Returns gradient, query, key and value."""
        query, _, value = self._like
        generator = torch.Generator(query.device).manual_seed(SEED)
        drawn = [
            x.new_empty_strided(x.shape, x.stride()).normal_(generator=generator)
            for x in self._like
        ]
        # Stored tokens-first, as the gradient of what the model reads.
        batch, heads, rows, _ = query.shape
        grad = query.new_empty(batch, rows, heads, value.shape[3]).normal_(generator=generator)
        return [grad.transpose(1, 2), *drawn]

    def _results(self, kernel) -> tuple[torch.Tensor, ...]:
        """Returns what a kernel computes: output, log-sum-exp, and the gradients of a part merged
        with another of equal weight and output 0."""
        grad, *tensors = self._tensors
        out, lse = kernel.forward(*tensors, self._causal, self._scores)
        merged = out / 2, lse + math.log(2)
        grads = kernel.backward(grad, *tensors, *merged, self._causal, self._scores)
        return out, lse, *grads

    def _compare(self, results: tuple[torch.Tensor, ...]) -> None:
        names = "output", "log-sum-exp", "query gradient", "key gradient", "value gradient"
        # Compared in FP32.
        spacing = max(torch.finfo(each).eps for each in (self._like[0].dtype, torch.float32))
        accepted = ROUNDINGS_MAX * spacing
        for name, got, wanted in zip(names, results, self._wanted, strict=True):
            distance = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            # Written so that NaN is refused.
            if not distance <= accepted:
                raise DiffersError(
                    f"{name} differs from matrix products by {distance:.2g}; accepted: at most "
                    f"{accepted:.2g}"
                )


MEASURED = Measured()


def kernel_for(query: torch.Tensor, scores: Scores, mask: torch.Tensor | None = None):
    """Returns the kernel for this tensor's device and dtype, these scores and this mask."""
    if scores.softcap is not None:
        return Plain
    if query.device.type == "cpu":
        return CpuFlash
    if query.dtype is torch.float64 or mask is not None:
        return Plain
    return CudaEfficient if query.dtype is torch.float32 else MEASURED


def attention_choices() -> list[dict]:
    """Returns which attention kernel serves which calls on this process's GPU, in order of choice.

    Each has ``calls``, what they are in words; ``kernel``, its name; ``seconds``, of a forward and
    a backward by each kernel that was measured; ``refused``, by name, why the others do not serve.
    Empty on the CPU, where nothing is to be chosen.
    """
    return [_described(kind, choice) for kind, choice in MEASURED.choices.known().items()]


def _described(kind: Kind, choice: Choice) -> dict:
    kernel = next(iter(choice.ranked), PlainPieces)
    return {
        "calls": str(kind),
        "kernel": kernel.name,
        "seconds": dict(choice.seconds),
        "refused": dict(choice.refused),
    }
