"""The recorded rollouts (``examples/rollouts``) as padded batches, one for each group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dormouse.demo import paths, trace


@dataclass(frozen=True)
class Size:
    """What is taken of a group."""

    prompt_tokens: int
    """The last ones: the question, and what comes before it of the passage."""
    responses: int
    response_tokens: int
    """The first ones of each response."""


@dataclass(frozen=True)
class Batch:
    """Rows with one prompt, padded on the right."""

    group: str
    ids: torch.Tensor
    """``[rows, columns]``."""
    mask: torch.Tensor
    """Of the same shape: 1 for tokens."""
    keep: int
    """Columns of responses."""
    advantages: torch.Tensor
    """``[rows]``."""

    @property
    def kept(self) -> torch.Tensor:
        """Which of the last ``keep`` columns have a token, ``[rows, keep]``."""
        return self.mask[:, -self.keep :] == 1

    @property
    def labels(self) -> torch.Tensor:
        return self.ids[:, -self.keep :]

    @property
    def prompt(self) -> torch.Tensor:
        """Token ids of the rows' prompt, 1-D."""
        return self.ids[0, : -self.keep]

    def row(self, index: int) -> Batch:
        """Returns one row without its padding."""
        end = int(self.mask[index].sum())
        rows = slice(index, index + 1)
        keep = end - (self.ids.shape[1] - self.keep)
        own = self.ids[rows, :end], self.mask[rows, :end]
        return Batch(self.group, *own, keep, self.advantages[rows])


def batches(size: Size, directory: Path = paths.TRACE_DIR) -> list[Batch]:
    """Returns every group of the trace.

    Raises :class:`ValueError` for a size that a group does not have.
    """
    recorded = trace.read(directory)
    return [batch_of(recorded.load(name), size) for name in recorded.groups]


def batch_of(group: trace.RolloutGroup, size: Size) -> Batch:
    if not trace.PROMPT_TOKENS_MIN <= size.prompt_tokens <= len(group.prompt):
        raise ValueError(
            f"{size.prompt_tokens} prompt tokens of group {group.id}; accepted: "
            f"{trace.PROMPT_TOKENS_MIN} to {len(group.prompt)}"
        )
    if not 1 <= size.responses <= len(group.rollouts):
        raise ValueError(
            f"{size.responses} responses of group {group.id}; accepted: 1 to {len(group.rollouts)}"
        )
    if size.response_tokens < 1:
        raise ValueError(f"{size.response_tokens} response tokens; accepted: at least 1")
    rollouts = group.rollouts[: size.responses]
    prompt = group.prompt[-size.prompt_tokens :]
    responses = [rollout.tokens[: size.response_tokens] for rollout in rollouts]
    keep = max(map(len, responses))
    ids = torch.zeros(len(rollouts), len(prompt) + keep, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, response in enumerate(responses):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        mask[row, :end] = 1
    advantages = torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float64)
    return Batch(group.id, ids, mask, keep, advantages)
