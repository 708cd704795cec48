"""Which tokens of responses a trainer keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch

from ...errors import ArgumentError
from ..padded import RowPlaces

TokenChoice = torch.Tensor | Callable[[int, torch.Tensor], torch.Tensor]
"""Kept tokens of all responses, bool in the layout of the batch's values; or a function that
receives the number of a row (of a packed batch, of a sequence) and the log-probabilities of its
response, ``[len(S_i)]``, and returns its kept tokens, bool ``[len(S_i)]``."""


def top_share(loss: torch.Tensor, reference_loss: torch.Tensor, share: float) -> torch.Tensor:
    """Returns the tokens whose loss exceeds the reference's by most, bool, shaped as ``loss``.

    ``loss``, ``reference_loss``: of each token, for example ``-log_probabilities``, of equal shape.
    ``share``: of the tokens that are kept, 0 to 1; their number is rounded up, as of the decimal
    number that Python prints for the share. Of equal differences the first are kept.

    Raises :class:`dormouse.ArgumentError`.
    """
    if loss.shape != reference_loss.shape:
        raise ArgumentError(
            f"reference_loss has shape {list(reference_loss.shape)}; accepted: that of loss, "
            f"{list(loss.shape)}"
        )
    if not 0 <= share <= 1:
        raise ArgumentError(f"share is {share}; accepted: 0 to 1")
    difference = (loss.detach() - reference_loss.detach()).flatten()
    # 0.07 of 100 are 7, but 8 in binary.
    count = math.ceil(Fraction(str(float(share))) * len(difference))
    best = difference.argsort(descending=True, stable=True)[:count]
    keep = torch.zeros(len(difference), dtype=torch.bool, device=loss.device)
    keep[best] = True
    return keep.view(loss.shape)


class Chosen:
    """The tokens that a filter keeps of the responses of a batch."""

    def __init__(self, token_filter: TokenChoice, shape: tuple[int, ...]):
        """``shape``: of the values of the batch. Raises :class:`dormouse.ArgumentError`."""
        self._filter = token_filter
        if isinstance(token_filter, torch.Tensor):
            check_mask("token_filter", token_filter, shape)
        elif not callable(token_filter):
            raise ArgumentError(
                f"token_filter is {type(token_filter).__name__}; accepted: a tensor of torch.bool, "
                "or a function"
            )

    def of(
        self, places: RowPlaces, number: int, log_probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Returns the kept tokens of a response, bool ``[len(S_i)]``."""
        if isinstance(self._filter, torch.Tensor):
            keep = places.of_response(self._filter, number)
        else:
            row = places.rows[number]
            keep = self._filter(row, log_probabilities)
            name = f"token_filter({row}, log_probabilities)"
            check_mask(name, keep, log_probabilities.shape)
        return keep.to(log_probabilities.device)


def check_mask(name: str, keep: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises :class:`dormouse.ArgumentError` for a mask of another shape or dtype."""
    if not isinstance(keep, torch.Tensor) or keep.dtype is not torch.bool:
        kind = keep.dtype if isinstance(keep, torch.Tensor) else type(keep).__name__
        raise ArgumentError(f"{name} is {kind}; accepted: a tensor of torch.bool")
    if tuple(keep.shape) != tuple(shape):
        raise ArgumentError(
            f"{name} has shape {list(keep.shape)}; accepted: one element per token, {list(shape)}"
        )
