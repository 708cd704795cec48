"""A padded batch as a trainer without shared prompts computes it."""

from __future__ import annotations

import torch


def mixed_loss(logps: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mixes rows, is not linear in the values, and is smooth: BF16 moves values over any kink."""
    count = mask.sum()
    advantage = torch.linspace(-1, 2, len(logps), dtype=logps.dtype)[:, None]
    ratio = torch.tanh(0.2 * (logps - 1.5 * logps.detach().roll(1, 0)))
    total = (ratio * advantage * mask).sum() / count
    total = total + ((logps * mask).sum(1) ** 2).mean() * 1e-2
    return total - 0.1 * (entropies * mask).sum() / count


def padded_logits(model, ids, mask) -> torch.Tensor:
    """Logits of one forward of the padded batch."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    return model(input_ids=ids, **given).logits


def padded_values(model, ids, mask, keep) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of one forward of the padded batch, as a trainer computes
    them."""
    logits = padded_logits(model, ids, mask)[:, -keep - 1 : -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = torch.log_softmax(logits, -1)
    logps = found.gather(-1, ids[:, -keep:, None])[..., 0]
    entropies = -(found.exp() * found).sum(-1)
    return logps * mask[:, -keep:], entropies * mask[:, -keep:]
