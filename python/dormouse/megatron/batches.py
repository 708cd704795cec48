"""Batches of a data iterator: which labels carry loss, and which rows share a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..group import PROMPT_TOKENS_MIN
from ..hf.padded import Places, grouped
from ..trainers.refusals import UnsupportedTrainerError

FIELDS = ("tokens", "labels", "loss_mask")


class Microbatch(NamedTuple):
    """One batch of the data iterator, ``[rows, columns]`` each."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """The token after each token."""
    loss_mask: torch.Tensor
    """Nonzero where a label carries loss."""


Read = Callable[[object], Microbatch]


def read_batch(batch) -> Microbatch:
    """Returns the entries of a batch of Megatron's data sets.

    Raises :class:`UnsupportedTrainerError`.
    """
    try:
        return Microbatch(*(batch[name] for name in FIELDS))
    except (TypeError, KeyError, IndexError) as error:
        raise UnsupportedTrainerError(
            f"a batch of the data iterator is a {type(batch).__name__} without "
            f"{', '.join(FIELDS)} ({type(error).__name__}: {error}); accepted: a dict with them, "
            "or share(read=...)"
        ) from error


def places_of(
    microbatches: Sequence[Microbatch], *, whole: bool = False
) -> list[Places] | None:
    """Returns the groups of the rows of all microbatches, which are numbered in their order.

    The values of a response are at the places of its labels. None if a prompt is too short to be
    shared. ``whole``: responses go on to the last column, padding included, and rows without a loss
    are among them.

    Raises :class:`UnsupportedTrainerError` for labels that are not the next tokens.
    """
    found = list(_rows(microbatches, whole))
    if any(len(prompt) < PROMPT_TOKENS_MIN for _, prompt, _, _ in found):
        return None
    return grouped(found)


def shape_of(microbatches: Sequence[Microbatch]) -> tuple[int, int]:
    """Returns the number of all rows, and the columns of the widest microbatch."""
    shapes = [each.tokens.shape for each in microbatches]
    return sum(rows for rows, _ in shapes), max(columns for _, columns in shapes)


def outside_losses(microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """Returns where columns of rows are before the first one with a loss or after the last,
    ``[rows, columns]``, as :func:`shape_of`."""
    found = torch.ones(shape_of(microbatches), dtype=torch.bool)
    masks = itertools.chain.from_iterable(each.loss_mask.cpu() for each in microbatches)
    for outside, mask in zip(found, masks, strict=True):
        at = mask.nonzero().flatten().tolist()
        if at:
            outside[at[0] : at[-1] + 1] = False
    return found


def _rows(microbatches: Sequence[Microbatch], whole: bool) -> Iterator[tuple]:
    """Yields number, prompt, response and the index of its values of each row."""
    number = 0
    for microbatch in microbatches:
        check_microbatch(microbatch)
        # One copy to the host: which rows share a prompt is known before anything runs.
        for tokens, labels, mask in zip(*(each.cpu() for each in microbatch), strict=True):
            own = _loss_columns(number, tokens, labels, mask)
            if own is None and whole:
                own = PROMPT_TOKENS_MIN - 1, len(tokens)
            if own is not None:
                first, end = own[0], len(tokens) if whole else own[1]
                # That of the last column is no column's token. In padding it may be none.
                label = labels[end - 1 : end]
                label = label if mask[end - 1] else label.clamp(min=0)
                response = torch.cat([tokens[first + 1 : end], label])
                yield number, tokens[: first + 1], response, (number, slice(first, end))
            number += 1


def _loss_columns(
    number: int, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor
) -> tuple[int, int] | None:
    """Returns the first column with a loss, and the one after the last; None without one."""
    at = mask.nonzero().flatten()
    if not len(at):
        return None
    first, end = int(at[0]), int(at[-1]) + 1
    if not torch.equal(tokens[1:end], labels[: end - 1]):
        raise UnsupportedTrainerError(
            f"labels of row {number} up to its last with a loss are not the next tokens; "
            "accepted: labels[:-1] equal to tokens[1:]"
        )
    return first, end


def check_microbatch(microbatch: Microbatch) -> None:
    """Checks the shapes of a batch. Raises :class:`UnsupportedTrainerError`."""
    shapes = [tuple(each.shape) for each in microbatch]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise UnsupportedTrainerError(
            f"{', '.join(FIELDS)} of a batch have the shapes {', '.join(map(str, shapes))}; "
            "accepted: [rows, columns], the same for all"
        )
