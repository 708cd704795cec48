"""The GRPO actor loss of one response: clipped ratio against the recorded policy.

Per token, with ratio ``r = exp(logp - logp_old)`` and the response's advantage ``A``:
``-min(r·A, clip(r, 1-ε, 1+ε)·A)``, averaged over the response's tokens. Responses are averaged by
the group's weights, ``1/N`` each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

CLIP = 0.2


class GrpoLoss:
    """``loss(logits[S_i, vocab], labels[S_i], i) -> scalar`` for one rollout group.

    ``old_logprobs``: the recorded log-probability of each response token, one list per response.
    ``advantages``: one number per response. Computes in the logits' dtype.
    """

    def __init__(
        self,
        old_logprobs: Sequence[Sequence[float]],
        advantages: Sequence[float],
        clip: float = CLIP,
    ):
        if len(old_logprobs) != len(advantages):
            raise ValueError(
                f"{len(advantages)} advantages for {len(old_logprobs)} responses; "
                f"accepted: {len(old_logprobs)}"
            )
        # FP64 until the dtype is known, so that six decimals are rounded once.
        self._old = [torch.tensor(values, dtype=torch.float64) for values in old_logprobs]
        self._advantages = [float(a) for a in advantages]
        self._clip = clip

    @classmethod
    def of(cls, rollouts) -> GrpoLoss:
        """Creates the loss from recorded rollouts."""
        return cls([r.logprobs for r in rollouts], [r.advantage for r in rollouts])

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, i: int) -> torch.Tensor:
        old = self._old[i].to(logits.dtype)
        if len(labels) != len(old):
            raise ValueError(f"response {i}: {len(labels)} labels for {len(old)} log-probabilities")
        # Cross-entropy without reduction is the negative log-probability of the label, in one fused
        # pass.
        logprobs = -F.cross_entropy(logits, labels, reduction="none")
        ratio = torch.exp(logprobs - old)
        advantage = self._advantages[i]
        clipped = ratio.clamp(1.0 - self._clip, 1.0 + self._clip)
        return -torch.minimum(ratio * advantage, clipped * advantage).mean()
