"""Rows of a padded batch as groups: rows with equal prompts share one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ArgumentError
from ..group import PROMPT_TOKENS_MIN, Group


@dataclass(frozen=True)
class Places:
    """A group of a padded batch, and the rows of its responses: each begins in the first column
    that is kept."""

    group: Group
    rows: list[int]
    """The row of each response."""

    def of_response(self, values: torch.Tensor, number: int) -> torch.Tensor:
        """Returns the part of ``values``, ``[rows, keep]``, that belongs to a response."""
        return values[self.rows[number], : len(self.group.responses[number])]


def groups_of(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> list[Places]:
    """Returns the groups of a padded batch, in the order of their first rows.

    ``ids``: token ids ``[rows, columns]``. ``mask``: of the same shape, nonzero for tokens, which
    are consecutive in each row: padding is on the left, on the right, or both. ``keep``: a row's
    response is its tokens in the last ``keep`` columns, its prompt those before. Rows without a
    response are in no group.

    Raises :class:`dormouse.ArgumentError`.
    """
    _check(ids, mask, keep)
    # One copy to the host: which rows share a prompt is known before anything runs.
    ids, mask = ids.cpu(), mask.cpu() != 0
    start = ids.shape[1] - keep
    found: dict[bytes, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}
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
        prompt = tokens[first:start].to(torch.int64)
        _, responses = found.setdefault(prompt.numpy().tobytes(), (prompt, {}))
        responses[row] = tokens[start:end]
    return [
        Places(Group(prompt, list(responses.values()), [1.0] * len(responses)), list(responses))
        for prompt, responses in found.values()
    ]


def _check(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> None:
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype is torch.bool:
        raise ArgumentError(
            f"ids are {ids.dtype} of shape {list(ids.shape)}; accepted: integers [rows, columns]"
        )
    if mask.shape != ids.shape:
        raise ArgumentError(
            f"mask has shape {list(mask.shape)}; accepted: that of ids, {list(ids.shape)}"
        )
    if not 1 <= keep < ids.shape[1]:
        raise ArgumentError(f"keep is {keep}; accepted: 1 to {ids.shape[1] - 1} columns")
