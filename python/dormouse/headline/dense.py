"""The dense baseline on a device: every response runs the whole prompt again, ``batch`` at a time.

The fastest dense run: flash attention without a mask tensor, logits of response positions only, no
padding (all responses have one length), no host synchronisation.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# Attention kernels of torch that may be the fastest on a GPU.
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def kernel(name: str | None):
    """Selects torch's attention kernel inside the context; None leaves the choice to torch."""
    return contextlib.nullcontext() if name is None else sdpa_kernel(KERNELS[name])


def response_logits(model, prompt: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Returns logits ``[batch, len(S), vocab]`` that predict ``responses`` after ``prompt``."""
    repeated = prompt.expand(len(responses), -1)
    tokens = torch.cat([repeated, responses[:, :-1]], dim=1)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, len(prompt) - 1 :])


def backward(model, group, loss_fn, device: torch.device, batch: int = 1) -> torch.Tensor:
    """Adds the group's gradients to ``.grad``; returns the loss, still on the device."""
    prompt = group.prompt.to(device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, len(group.responses), batch):
        responses = torch.stack(group.responses[start : start + batch]).to(device)
        logits = response_logits(model, prompt, responses)
        loss = sum(
            group.weights[i] * loss_fn(logits[i - start], responses[i - start], i)
            for i in range(start, start + len(responses))
        )
        del logits
        loss.backward()
        total += loss.detach()
    return total
