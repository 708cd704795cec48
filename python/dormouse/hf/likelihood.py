"""Log-probabilities and entropies of tokens from logits, differentiable.

Both compute in FP32 (FP64 for FP64 logits), one block of rows at a time: neither the forward nor
the graph holds a copy of all logits in FP32. The graph keeps the logits as they are, and two
numbers per row.

Equal logits give equal bits: :meth:`SharedPrefix.score` and loss functions that use these functions
compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..errors import ArgumentError

# Logits of one block, in the dtype of the computation. Within a cache of a CPU; on a GPU a kernel
# must outlast its launch: 40 µs at 3 TB/s.
BLOCK_BYTES_MAX = {"cpu": 8 << 20, "cuda": 128 << 20}


def log_probabilities(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Returns ``log_softmax(logits / temperature)`` at the labels, ``[rows]``, in FP32 or FP64.

    ``logits``: ``[rows, vocab]``. ``labels``: token ids, ``[rows]``.
    """
    check_temperature(temperature)
    _check_rows(logits)
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise ArgumentError(
            f"labels of {labels.dtype} have shape {list(labels.shape)} with logits of "
            f"{list(logits.shape)}; accepted: one token id per row"
        )
    return _LogProbabilities.apply(logits, labels, temperature)


def entropies(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Returns entropies of ``softmax(logits / temperature)`` in nats, ``[rows]``, in FP32 or FP64.

    ``logits``: ``[rows, vocab]``.
    """
    check_temperature(temperature)
    _check_rows(logits)
    return _Entropies.apply(logits, temperature)


class Norms(NamedTuple):
    """Two numbers per row that turn logits into log-probabilities. Their sum would round
    differences between a likely token and the largest."""

    largest: torch.Tensor
    """The largest logit, ``[rows]``."""
    log_sums: torch.Tensor
    """The logarithm of the sum of exponentials of what exceeds it, ``[rows]``."""

    @classmethod
    def for_rows(cls, logits: torch.Tensor) -> Norms:
        """Returns norms to be filled in."""
        return cls(_per_row(logits), _per_row(logits))

    def center(self, rows: slice, block: torch.Tensor) -> torch.Tensor:
        """Subtracts the largest of each row from scaled logits in place, and keeps it."""
        self.largest[rows] = block.amax(1)
        return block.sub_(self.largest[rows, None])

    def normalise(self, rows: slice, block: torch.Tensor) -> torch.Tensor:
        """Turns scaled logits into log-probabilities in place, and keeps the rows' numbers."""
        self.center(rows, block)
        self.log_sums[rows] = block.exp().sum(1).log()
        return block.sub_(self.log_sums[rows, None])

    def again(self, rows: slice, block: torch.Tensor) -> torch.Tensor:
        """Turns scaled logits into log-probabilities in place by numbers that were kept."""
        return block.sub_(self.largest[rows, None]).sub_(self.log_sums[rows, None])


@torch.no_grad()
def values_of(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, with_entropies: bool
) -> tuple[tuple[torch.Tensor, ...], Norms]:
    """Returns log-probabilities of the labels and, if asked for, entropies, without a graph: the
    same bits as those of :func:`log_probabilities` and :func:`entropies`. And the rows' norms."""
    norms = Norms.for_rows(logits)
    found = tuple(_per_row(logits) for _ in range(1 + with_entropies))
    for rows, block in _blocks(logits, temperature):
        if with_entropies:
            log_softmax = norms.normalise(rows, block)
            found[0][rows] = log_softmax.gather(1, labels[rows, None])[:, 0]
            found[1][rows] = torch.special.entr(log_softmax.exp_()).sum(1)
        else:
            # The same, but that only the labels' elements are computed to the end.
            own = norms.center(rows, block).gather(1, labels[rows, None])[:, 0]
            norms.log_sums[rows] = block.exp_().sum(1).log()
            found[0][rows] = own.sub_(norms.log_sums[rows])
    return found, norms


@torch.no_grad()
def overwrite_with_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    norms: Norms,
    of_log_probabilities: torch.Tensor | None,
    of_entropies: torch.Tensor | None,
) -> None:
    """Overwrites logits with their gradient, given those of the two values; None: of no loss."""
    of_log_probabilities, of_entropies = (
        None if each is None else each / temperature
        for each in (of_log_probabilities, of_entropies)
    )
    for rows, block in _blocks(logits, temperature, in_place=True):
        norms.again(rows, block)
        found = None
        if of_entropies is not None:
            p = block.exp()
            found = _entropy_gradient(p, torch.special.entr(p).sum(1), of_entropies[rows])
        if of_log_probabilities is not None:
            own = _label_gradient(block.exp_(), labels[rows], of_log_probabilities[rows])
            found = own if found is None else found.add_(own)
        if found is None:
            logits[rows] = 0
        elif found.data_ptr() != logits[rows].data_ptr():
            logits[rows] = found


def check_temperature(temperature: float) -> None:
    """Raises :class:`dormouse.ArgumentError` unless logits can be divided by it."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ArgumentError(f"temperature is {temperature}; accepted: finite numbers above 0")


def _check_rows(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ArgumentError(
            f"logits of {logits.dtype} have shape {list(logits.shape)}; accepted: floating-point "
            "[rows, vocab]"
        )


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature):
        (out,), norms = values_of(logits, labels, temperature, with_entropies=False)
        ctx.save_for_backward(logits, labels, *norms)
        ctx.temperature = temperature
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, labels, *norms = ctx.saved_tensors
        grad = grad / ctx.temperature
        result = torch.empty_like(logits)
        for rows, block in _blocks(logits, ctx.temperature):
            p = Norms(*norms).again(rows, block).exp_()
            result[rows] = _label_gradient(p, labels[rows], grad[rows])
        return result, None, None


class _Entropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature):
        out = _per_row(logits)
        norms = Norms.for_rows(logits)
        for rows, block in _blocks(logits, temperature):
            out[rows] = torch.special.entr(norms.normalise(rows, block).exp_()).sum(1)
        ctx.save_for_backward(logits, out, *norms)
        ctx.temperature = temperature
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, entropy, *norms = ctx.saved_tensors
        grad = grad / ctx.temperature
        result = torch.empty_like(logits)
        for rows, block in _blocks(logits, ctx.temperature):
            p = Norms(*norms).again(rows, block).exp_()
            result[rows] = _entropy_gradient(p, entropy[rows], grad[rows])
        return result, None


def _label_gradient(p: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient by logit j of each row, grad · ([j is the label] - p_j), in the memory
    of ``p``."""
    grad = grad.to(p.dtype).unsqueeze(1)
    return p.mul_(-grad).scatter_add_(1, labels.unsqueeze(1), grad)


def _entropy_gradient(p: torch.Tensor, entropy: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient by logit j of each row, -grad · p_j · (log p_j + entropy). Overwrites
    ``p``."""
    found = torch.special.entr(p)
    return found.sub_(p.mul_(entropy.unsqueeze(1))).mul_(grad.unsqueeze(1))


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _per_row(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(len(logits), dtype=_wide(logits))


def _blocks(
    logits: torch.Tensor, temperature: float, *, in_place: bool = False
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields ranges of rows and their logits, divided by ``temperature``: a copy, unless they may be
    overwritten and have the dtype of the computation."""
    wide = _wide(logits)
    block_bytes = BLOCK_BYTES_MAX[logits.device.type]
    step = max(1, block_bytes // (logits.shape[1] * wide.itemsize))
    for row in range(0, len(logits), step):
        rows = slice(row, min(row + step, len(logits)))
        block = logits[rows].to(wide, copy=not in_place)
        yield rows, block if temperature == 1.0 else block.div_(temperature)
