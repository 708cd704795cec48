"""A rollout group: one prompt, several responses, a weight for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .errors import ArgumentError

PROMPT_TOKENS_MIN = 2


class Group:
    """One prompt and its responses, as 1-D integer tensors or lists.

    ``prompt``: at least two token ids. ``responses``: at least one, none empty. ``weights``: one
    finite float each; the step's loss is ``Σ weights[i] · loss_i`` (default: ``1/N`` each).
    Token ids are checked against the model's vocabulary when a step is planned.

    Raises :class:`dormouse.ArgumentError` naming the value and what is accepted.
    """

    def __init__(
        self,
        prompt: torch.Tensor | Sequence[int],
        responses: Sequence[torch.Tensor | Sequence[int]],
        weights: Sequence[float] | None = None,
    ):
        self.prompt = tokens_of(prompt, "prompt")
        if len(self.prompt) < PROMPT_TOKENS_MIN:
            raise ArgumentError(
                f"prompt has {len(self.prompt)} tokens; accepted: at least {PROMPT_TOKENS_MIN}"
            )
        self.responses = [tokens_of(r, f"response {i}") for i, r in enumerate(responses)]
        if not self.responses:
            raise ArgumentError("0 responses; accepted: at least 1")
        for i, response in enumerate(self.responses):
            if len(response) == 0:
                raise ArgumentError(f"response {i} has 0 tokens; accepted: at least 1")
        n = len(self.responses)
        self.weights = [1.0 / n] * n if weights is None else [float(w) for w in weights]
        if len(self.weights) != n:
            raise ArgumentError(f"{len(self.weights)} weights for {n} responses; accepted: {n}")
        for i, weight in enumerate(self.weights):
            if not math.isfinite(weight):
                raise ArgumentError(f"weight {i} is {weight}; accepted: finite numbers")

    def named_responses(self) -> list[tuple[str, torch.Tensor]]:
        """Each response with its name in error messages."""
        return [(f"response {i}", response) for i, response in enumerate(self.responses)]

    def __repr__(self) -> str:
        lengths = [len(r) for r in self.responses]
        return f"Group(prompt={len(self.prompt)} tokens, responses={lengths} tokens)"


def tokens_of(values, name: str) -> torch.Tensor:
    """Returns 1-D int64 token ids in host memory. ``name``: in error messages."""
    tensor = torch.as_tensor(values)
    if tensor.dim() != 1:
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}; accepted: 1-D token ids")
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        raise ArgumentError(f"{name} has dtype {tensor.dtype}; accepted: integers")
    tensor = tensor.to(dtype=torch.int64, device="cpu").contiguous()
    if tensor.numel() and int(tensor.min()) < 0:
        raise ArgumentError(f"{name} has token id {int(tensor.min())}; accepted: 0 and above")
    return tensor
