"""The dense baseline: every response runs the whole prompt again, forward and backward.

The fastest run without prefix sharing here: one sequence at a time, causal flash attention without
a mask tensor, logits of response positions only, no padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LossFn = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def response_logits(model, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Returns logits ``[len(response), vocab]`` that predict ``response`` after ``prompt``."""
    tokens = torch.cat([prompt, response[:-1]])
    hidden = model.model(input_ids=tokens.unsqueeze(0), use_cache=False).last_hidden_state
    return model.lm_head(hidden[0, len(prompt) - 1 :])


def backward(
    model, group, loss_fn: LossFn, on_response: Callable[[int], None] | None = None
) -> float:
    """Adds the group's gradients to ``.grad``; returns ``Σ weights[i] · loss_i``.

    ``group``: a :class:`dormouse.Group`. ``on_response(i)`` is called after each response.
    """
    total = 0.0
    for i, (response, weight) in enumerate(zip(group.responses, group.weights, strict=True)):
        logits = response_logits(model, group.prompt, response)
        loss = weight * loss_fn(logits, response, i)
        del logits
        loss.backward()
        total += float(loss.detach())
        if on_response is not None:
            on_response(i)
    return total
