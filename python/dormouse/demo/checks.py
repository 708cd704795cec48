"""Compares gradients of the shared schedule and of the dense run with FP64, on a shortened
group."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import asdict

import torch

import dormouse

from . import dense, gradcheck
from .grpo import GrpoLoss
from .trace import RolloutGroup

# Small, so that FP64 takes seconds. Responses are short, because a lost first token has little
# effect in a long one; weights are unequal, because weights of 1 would hide a weight applied twice.
PROMPT_TOKENS = 144
RESPONSE_TOKENS = 16
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
MICROBATCH_TOKENS = 32

# Recorded log-probabilities belong to the whole prompt. The shortened one uses the policy's own,
# shifted by these in turn, so that ratios lie on both sides of the clip.
RATIO_OFFSETS = (0.0, 0.1, -0.1, 0.3, -0.3)


def grad_error(model: torch.nn.Module, shared, recorded: RolloutGroup) -> dict:
    """Returns :class:`gradcheck.GradError` as a dict. Leaves the model in FP64, without gradients.

    ``shared``: a :class:`dormouse.hf.SharedPrefix` over ``model``, in FP32.
    """
    group, loss = shortened(model, recorded)
    dense_grads = _gradients(model, lambda: dense.backward(model, group, loss))
    shared_grads = _gradients(
        model, lambda: shared.backward(group, loss, microbatch_tokens=MICROBATCH_TOKENS)
    )
    # The weights stay exact: FP64 represents every FP32 number.
    model.double()
    with exact_norms(model):
        truth = _gradients(model, lambda: dense.backward(model, group, loss))
    return asdict(gradcheck.compare(truth.items(), dense_grads, shared_grads))


def shortened(model, recorded: RolloutGroup) -> tuple[dormouse.Group, GrpoLoss]:
    """Returns the group cut to :data:`PROMPT_TOKENS` and its strongest responses, with its loss."""
    strongest = sorted(recorded.rollouts, key=lambda r: -abs(r.advantage))[: len(WEIGHTS)]
    group = dormouse.Group(
        recorded.prompt[-PROMPT_TOKENS:],
        [r.tokens[:RESPONSE_TOKENS] for r in strongest],
        WEIGHTS[: len(strongest)],
    )
    old = [_moved_logprobs(model, group.prompt, response) for response in group.responses]
    return group, GrpoLoss(old, [r.advantage for r in strongest])


@torch.no_grad()
def _moved_logprobs(model, prompt: torch.Tensor, response: torch.Tensor) -> list[float]:
    logits = dense.response_logits(model, prompt, response)
    own = torch.log_softmax(logits, dim=-1).gather(1, response.unsqueeze(1))[:, 0]
    return [value + RATIO_OFFSETS[t % len(RATIO_OFFSETS)] for t, value in enumerate(own.tolist())]


@contextlib.contextmanager
def exact_norms(model: torch.nn.Module):
    """Makes RMS norms compute in their input's dtype: those of transformers use FP32, which would
    make an FP64 run inexact."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.forward = functools.partial(_rms_norm, norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def _rms_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    return norm.weight * hidden * torch.rsqrt(variance + norm.variance_epsilon)


def _gradients(model: torch.nn.Module, run) -> dict[str, torch.Tensor]:
    """Returns every parameter's gradient after ``run`` and clears them."""
    model.zero_grad(set_to_none=True)
    run()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads
