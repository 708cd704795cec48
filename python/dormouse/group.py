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
    ``routed_experts``: for mixture-of-experts models, the experts that routers select in a step,
    as a rollout engine recorded them: one integer tensor per response, ``[tokens, layers, experts
    per token]``, over the prompt and the response (the last token may be missing: it is not run).
    ``layers``: those with a router, or all. The prompt's rows follow those of the first response
    that runs. Default: routers select by themselves.

    Raises :class:`dormouse.ArgumentError` naming the value and what is accepted.
    """

    def __init__(
        self,
        prompt: torch.Tensor | Sequence[int],
        responses: Sequence[torch.Tensor | Sequence[int]],
        weights: Sequence[float] | None = None,
        *,
        routed_experts: Sequence[torch.Tensor] | None = None,
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
        self.routed_experts = None
        if routed_experts is not None:
            if len(routed_experts) != n:
                raise ArgumentError(
                    f"routed_experts of {len(routed_experts)} responses; accepted: {n}"
                )
            lengths = [len(self.prompt) + len(response) for response in self.responses]
            names = [f"response {i}" for i in range(n)]
            self.routed_experts = records_of(
                list(map(experts_of, routed_experts, lengths, names))
            )

    def named_responses(self) -> list[tuple[str, torch.Tensor]]:
        """Each response with its name in error messages."""
        return [(f"response {i}", response) for i, response in enumerate(self.responses)]

    def __repr__(self) -> str:
        lengths = [len(r) for r in self.responses]
        return f"Group(prompt={len(self.prompt)} tokens, responses={lengths} tokens)"


def tokens_of(values, name: str) -> torch.Tensor:
    """Returns 1-D int64 token ids in host memory. ``name``: in error messages."""
    tensor = torch.as_tensor(values, device="cpu")
    if tensor.dim() != 1:
        raise ArgumentError(f"{name} has shape {list(tensor.shape)}; accepted: 1-D token ids")
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        raise ArgumentError(f"{name} has dtype {tensor.dtype}; accepted: integers")
    tensor = tensor.to(dtype=torch.int64).contiguous()
    if tensor.numel() and int(tensor.min()) < 0:
        raise ArgumentError(f"{name} has token id {int(tensor.min())}; accepted: 0 and above")
    return tensor


def experts_of(values, tokens: int, name: str) -> torch.Tensor:
    """Returns int64 expert ids of the rows that run, ``[tokens - 1, layers, experts per token]``,
    in host memory. ``name``: in error messages."""
    tensor = torch.as_tensor(values, device="cpu")
    if tensor.dim() != 3 or len(tensor) not in (tokens - 1, tokens) or 0 in tensor.shape[1:]:
        raise ArgumentError(
            f"routed_experts of {name} have shape {list(tensor.shape)}; accepted: [{tokens}, "
            "layers, experts per token], with or without the last token"
        )
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise ArgumentError(
            f"routed_experts of {name} have dtype {tensor.dtype}; accepted: integers"
        )
    tensor = tensor[: tokens - 1].to(dtype=torch.int64, device="cpu").contiguous()
    if tensor.numel() and int(tensor.min()) < 0:
        raise ArgumentError(
            f"routed_experts of {name} have id {int(tensor.min())}; accepted: 0 and above"
        )
    return tensor


def records_of(experts: list[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """Returns the recorded experts of all sequences of a step; None if none has any."""
    shapes = {None if each is None else tuple(each.shape[1:]) for each in experts}
    if len(shapes) > 1:
        seen = ", ".join(sorted("none" if shape is None else str(shape) for shape in shapes))
        raise ArgumentError(
            f"routed_experts of (layers, experts per token): {seen}; accepted: the same for all "
            "sequences, or none for any"
        )
    return None if shapes <= {None} else experts
