"""Hidden states between the stages of a pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Hidden:
    """Hidden states that a pipeline stage receives and returns, ``[rows, 1, hidden_size]``. With
    sequence parallelism rows are this rank's part."""

    received: torch.Tensor | None = None
    """None: others that follow from the tokens, for passes of this stage alone."""
    returned: torch.Tensor | None = None
    is_sent: bool = False
    """Whether the next stage reads what this one returns. Otherwise losses of a check do, which
    read the rows of all parts."""

    def take_received(self, like: torch.Tensor, tokens: torch.Tensor, width: int) -> torch.Tensor:
        """Returns what the stage's layers read. ``like``: has their dtype and device. ``tokens``:
        of this rank's rows."""
        received, self.received = self.received, None
        if received is not None:
            return received
        generator = torch.Generator().manual_seed(0)
        turns = torch.rand(width, generator=generator, dtype=torch.float64) * 2 * math.pi
        made = torch.sin((tokens.cpu().double()[:, None, None] + 1) * turns) * math.sqrt(2)
        return made.to(like.device, like.dtype).requires_grad_()
