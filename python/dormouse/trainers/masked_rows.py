"""Rows of a padded batch with a mask of its actions, one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .refusals import refuse
from .short_prompts import has_short


@dataclass(frozen=True)
class Rows:
    """Token ids of all rows, and where they are in the batch."""

    ids: torch.Tensor
    cu_seqlens: torch.Tensor
    prompt_lengths: torch.Tensor
    has_token: torch.Tensor
    """``[rows, columns]``."""
    responses: int
    """Rows with a response."""

    @classmethod
    def of(
        cls, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor
    ) -> Rows:
        """Returns the rows of a batch.

        ``action_mask``: of the last columns, of all but the first at most. A response begins at its
        first token there, so tokens between two turns are part of it.

        Raises :class:`UnsupportedTrainerError`.
        """
        columns, actions = sequences.shape[1], action_mask.shape[1]
        refuse(
            (
                not 0 < actions < columns,
                f"the mask of actions has {actions} columns and the batch {columns}",
                "at least 1, and fewer than the batch",
            )
        )
        has_token = attention_mask != 0
        is_action = torch.zeros_like(has_token)
        is_action[:, columns - actions :] = action_mask != 0
        at = torch.arange(columns, device=sequences.device)
        lengths = has_token.sum(1)
        # Columns of the first token, after the last, and of the first action, or the end.
        first = torch.where(has_token, at, columns).amin(1)
        end = torch.where(has_token, at + 1, 0).amax(1)
        start = torch.where(is_action, at, columns).amin(1)
        refuse(
            (
                bool((lengths == 0).any()) or bool((end - first != lengths).any()),
                "the mask of tokens has a row without tokens, or with a hole",
                "consecutive tokens, padded on either side",
            ),
            (
                bool((is_action & ~has_token).any()),
                "the mask of actions is not 0 at a place of padding",
                "actions that are tokens",
            ),
        )
        return cls(
            ids=sequences[has_token],
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            prompt_lengths=(has_token & (at < start[:, None])).sum(1),
            has_token=has_token,
            responses=int(is_action.any(1).sum()),
        )

    @property
    def has_short_prompt(self) -> bool:
        """Whether the batch runs as in the trainer (:mod:`.short_prompts`)."""
        return has_short(self.cu_seqlens.diff(), self.prompt_lengths)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values of tokens, ``[tokens]``, at the places of the tokens before, ``[rows,
        columns - 1]``."""
        places = values.new_zeros(self.has_token.shape)
        return places.masked_scatter(self.has_token, values)[:, 1:]
