"""What a call of the schedule runs in shared passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..hf.padded import Places
from .batches import Microbatch, outside_losses
from .replicas import Dealt


@dataclass(frozen=True)
class Work:
    """Of one rank."""

    places: list[Places]
    """The groups that it runs."""
    shape: tuple[int, int]
    """Of the values of their rows, and of one more: see :attr:`dummy_row`."""
    options: dict
    """Of a window."""
    balanced: list[Microbatch] | None
    """The trainer's batches, with whole rows, if routers balance experts over them."""
    dealt: Dealt | None
    """Of rows that replicas run for each other."""

    @property
    def dummy_row(self) -> int:
        """The row of the values of all dummies. No microbatch reads it."""
        return self.shape[0] - 1

    @property
    def without_loss(self) -> torch.Tensor | None:
        """Where passes have values of labels without a loss, for routers alone; None: nowhere."""
        return None if self.balanced is None else outside_losses(self.balanced)
