"""Rows of a padded or packed batch as groups: rows with equal prompts share one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..errors import ArgumentError
from ..group import PROMPT_TOKENS_MIN, Group
from .batch import Batch, GroupBatch
from .outputs import Losses

Index = tuple[int | slice, ...]
"""Of a response's values in the batch's layout."""


class RowPlaces:
    """Rows of a batch that share passes, and where their responses are."""

    rows: list[int]
    """The row of each response."""
    indices: list[Index]
    microbatches: int
    """At least so many run, for ranks whose passes wait for each other: then all responses run,
    whatever losses depend on, and dummies follow them."""
    kept_tokens: int
    """At most so many tokens are in microbatches."""
    prefix_tokens: int
    """Upper bound on the tokens that are in a prefix and in no microbatch."""
    label_tokens: int
    """Number of tokens of responses."""
    prompts: int
    """Number of different prompts."""

    def first_label(self, number: int) -> int:
        """Returns the position of a response's first token in its sequence."""
        raise NotImplementedError

    def batch(self, losses: Losses = Losses(), weights: list[float] | None = None) -> Batch:
        """Returns what a step runs. ``weights``: of the responses; None: 1 each."""
        raise NotImplementedError

    def of_response(self, values: torch.Tensor, number: int) -> torch.Tensor:
        """Returns the part of ``values``, in the batch's layout, that belongs to a response."""
        return values[self.indices[number]]

    def of_prompt(self, values: torch.Tensor, number: int) -> torch.Tensor:
        """Returns the part that belongs to a response's prompt, without its first token.
        ``values``: of a padded batch those of the columns before responses, else of all tokens."""
        count = self.first_label(number) - 1
        *row, own = self.indices[number]
        end = own.start if not row else values.shape[1]
        return values[(*row, slice(end - count, end))]


@dataclass(frozen=True)
class Places(RowPlaces):
    """A group of a batch."""

    group: Group
    rows: list[int]
    indices: list[Index]
    microbatches: int = 0
    prompts: int = 1
    prompt_rows: tuple[int, ...] | None = None
    """Rows that have the prompt, of which other ranks run some; None: :attr:`rows`."""

    @property
    def sharing_rows(self) -> Sequence[int]:
        """Rows that have the prompt, of all ranks."""
        return self.rows if self.prompt_rows is None else self.prompt_rows

    def first_label(self, number):
        return len(self.group.prompt)

    def batch(self, losses=Losses(), weights=None):
        group = self.group
        if weights is not None:
            group = Group(group.prompt, group.responses, weights)
        return GroupBatch(group, losses)

    @property
    def kept_tokens(self):
        return self.label_tokens

    @property
    def prefix_tokens(self):
        return len(self.group.prompt) - 1

    @property
    def label_tokens(self):
        return sum(map(len, self.group.responses))


def groups_of(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> list[Places]:
    """Returns the groups of a padded batch, in the order of their first rows.

    ``ids``: token ids ``[rows, columns]``. ``mask``: of the same shape, nonzero for tokens, which
    are consecutive in each row: padding is on the left, on the right, or both. ``keep``: a row's
    response is its tokens in the last ``keep`` columns, its prompt those before. Rows without a
    response are in no group. Values are ``[rows, keep]``; each response begins in the first column.

    Raises :class:`dormouse.ArgumentError`.
    """
    _check(ids, mask, keep)
    # One copy to the host: which rows share a prompt is known before anything runs.
    ids, mask = ids.cpu(), mask.cpu() != 0
    start = ids.shape[1] - keep

    def rows():
        for row, (tokens, has) in enumerate(zip(ids, mask, strict=True)):
            at = has.nonzero().flatten()
            if len(at) == 0 or int(at[-1]) < start:
                continue
            first, end = int(at[0]), int(at[-1]) + 1
            if end - first != len(at):
                raise ArgumentError(
                    f"row {row} has {len(at)} tokens within {end - first} columns; accepted: "
                    "consecutive tokens, padded on either side"
                )
            if start - first < PROMPT_TOKENS_MIN:
                raise ArgumentError(
                    f"row {row} has {max(0, start - first)} tokens before the last {keep} columns; "
                    f"accepted: a prompt of at least {PROMPT_TOKENS_MIN}"
                )
            yield row, tokens[first:start], tokens[start:end], (row, slice(0, end - start))

    return grouped(rows())


def groups_of_packed(
    ids: torch.Tensor, cu_seqlens: torch.Tensor, prompt_lengths: torch.Tensor
) -> list[Places]:
    """Returns the groups of a packed batch, in the order of their first sequences.

    ``ids``: token ids ``[tokens]`` of all sequences, one after another. ``cu_seqlens``: where each
    begins, and the end, ``[sequences + 1]``. ``prompt_lengths``: tokens of each sequence's prompt,
    ``[sequences]``. Sequences without a response are in no group. Values are ``[tokens]``.

    Raises :class:`dormouse.ArgumentError`.
    """
    if ids.dim() != 1 or not _is_integer(ids):
        raise ArgumentError(
            f"ids are {ids.dtype} of shape {list(ids.shape)}; accepted: integers [tokens]"
        )
    bounds, prompts = cu_seqlens.tolist(), prompt_lengths.tolist()
    if bounds[:1] != [0] or bounds[-1] != len(ids) or bounds != sorted(bounds):
        raise ArgumentError(
            f"cu_seqlens are {bounds} with {len(ids)} tokens; accepted: ascending, from 0 to the "
            "number of tokens"
        )
    if len(prompts) != len(bounds) - 1:
        raise ArgumentError(
            f"prompt_lengths are {len(prompts)} for {len(bounds) - 1} sequences; accepted: one each"
        )
    ids = ids.cpu()

    def rows():
        for row, prompt in enumerate(prompts):
            first, end = bounds[row], bounds[row + 1]
            if end - first <= prompt:
                continue
            if prompt < PROMPT_TOKENS_MIN:
                raise ArgumentError(
                    f"prompt_lengths[{row}] is {prompt}; accepted: at least {PROMPT_TOKENS_MIN}"
                )
            start = first + prompt
            yield row, ids[first:start], ids[start:end], (slice(start, end),)

    return grouped(rows())


def grouped(rows: Iterable[tuple[int, torch.Tensor, torch.Tensor, Index]]) -> list[Places]:
    """Returns the groups of rows, in the order of their first ones. ``rows``: number, prompt,
    response, and the index of the response's values."""
    found: dict[bytes, tuple[torch.Tensor, list[tuple]]] = {}
    for row, prompt, response, index in rows:
        prompt = prompt.to(torch.int64)
        _, own = found.setdefault(prompt.numpy().tobytes(), (prompt, []))
        own.append((row, response, index))
    places = []
    for prompt, own in found.values():
        numbers, responses, indices = map(list, zip(*own, strict=True))
        places.append(Places(Group(prompt, responses, [1.0] * len(own)), numbers, indices))
    return places


def _is_integer(ids: torch.Tensor) -> bool:
    return not ids.is_floating_point() and ids.dtype is not torch.bool


def _check(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> None:
    if ids.dim() != 2 or not _is_integer(ids):
        raise ArgumentError(
            f"ids are {ids.dtype} of shape {list(ids.shape)}; accepted: integers [rows, columns]"
        )
    if mask.shape != ids.shape:
        raise ArgumentError(
            f"mask has shape {list(mask.shape)}; accepted: that of ids, {list(ids.shape)}"
        )
    if not 1 <= keep < ids.shape[1]:
        raise ArgumentError(f"keep is {keep}; accepted: 1 to {ids.shape[1] - 1} columns")
