"""A synthetic rollout group and its GRPO loss, with all inputs of the loss on the device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

import dormouse

from ..demo.grpo import CLIP

SEED = 2026
ADVANTAGES = (1.0, -1.0, 0.5, -0.5)


def synthetic(vocab: int, prompt: int, response: int, responses: int) -> dormouse.Group:
    """Returns a group of random tokens from a fixed seed, with weights ``1/N``."""
    generator = torch.Generator().manual_seed(SEED)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocab, (count,), generator=generator)

    return dormouse.Group(tokens(prompt), [tokens(response) for _ in range(responses)])


class DeviceGrpoLoss:
    """The demo's actor loss with logarithms in FP32, as trainers compute it for BF16 models.

    ``old_logprobs``: per response, one tensor on the device. ``advantages``: one number each.
    """

    def __init__(self, old_logprobs: list[torch.Tensor], advantages: list[float]):
        self._old = old_logprobs
        self._advantages = advantages

    @classmethod
    def synthetic(cls, vocab: int, group: dormouse.Group, device: torch.device) -> DeviceGrpoLoss:
        """Creates a loss whose recorded policy gives every token the same probability."""
        old = [torch.full((len(r),), -math.log(vocab), device=device) for r in group.responses]
        return cls(old, [ADVANTAGES[i % len(ADVANTAGES)] for i in range(len(old))])

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, i: int) -> torch.Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = -F.cross_entropy(wide, labels, reduction="none")
        ratio = torch.exp(logprobs - self._old[i].to(wide.dtype))
        advantage = self._advantages[i]
        clipped = ratio.clamp(1.0 - CLIP, 1.0 + CLIP)
        return -torch.minimum(ratio * advantage, clipped * advantage).mean()
