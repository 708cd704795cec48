"""Ways to add the gradients of a batch's GRPO loss: a padded batch, one row at a time, shared."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from recorded import Batch

from dormouse.demo.grpo import CLIP

Old = torch.Tensor
"""Log-probabilities of the policy that a batch's ratios are to, ``[rows, keep]``."""
Way = Callable[[Batch, Old], float]
"""Adds the gradients of a batch to ``.grad``; returns the loss."""


def dense_log_probabilities(model, batch: Batch) -> torch.Tensor:
    """Returns log-probabilities of the responses' tokens, ``[rows, keep]``, by one forward of the
    padded batch."""
    # The last column predicts what follows the batch.
    logits = model(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        use_cache=False,
        logits_to_keep=batch.keep + 1,
    ).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values = -F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return values.view_as(batch.labels)


def row_losses(values: torch.Tensor, old: Old, batch: Batch) -> torch.Tensor:
    """Returns the loss of each row, ``[rows]``: the clipped ratio to ``old`` times the advantage,
    averaged over the row's tokens."""
    ratio = torch.exp(values - old.to(values.dtype))
    advantages = batch.advantages.to(values.dtype)[:, None]
    clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    kept = batch.kept
    return losses.masked_fill(~kept, 0.0).sum(1) / kept.sum(1)


def whole(log_probabilities: Callable[[Batch], torch.Tensor]) -> Way:
    """Returns the way with one loss over the whole batch."""

    def run(batch: Batch, old: Old) -> float:
        loss = row_losses(log_probabilities(batch), old, batch).mean()
        loss.backward()
        return float(loss.detach())

    return run


def by_rows(log_probabilities: Callable[[Batch], torch.Tensor]) -> Way:
    """Returns the way with a microbatch for each row, without padding."""

    def run(batch: Batch, old: Old) -> float:
        total = 0.0
        for index in range(len(batch.ids)):
            row = batch.row(index)
            own = old[index : index + 1, : row.keep]
            loss = row_losses(log_probabilities(row), own, row).sum() / len(batch.ids)
            loss.backward()
            total += float(loss.detach())
        return total

    return run
