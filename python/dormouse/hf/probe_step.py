"""Runs the probe: a miniature of the step that finds which tensors phase B uses."""

from __future__ import annotations

import torch

from . import support
from .prefix import ProbeForward
from .probe import PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS, Probe, TouchRecorder
from .sharding import ReplicatedWeights
from .step import microbatch_logits


def probe_step(
    view: support.ModelView,
    weights: ReplicatedWeights,
    prompt: torch.Tensor,
    prefix_is_longer: bool,
    device: torch.device,
) -> Probe:
    """Runs the miniature step on the first tokens of the prompt. Does not change any ``.grad``."""
    long, short = PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS
    prefix_tokens, microbatch_tokens = (long, short) if prefix_is_longer else (short, long)
    sample = prompt[torch.arange(long) % len(prompt)].to(device)
    with TouchRecorder() as recorder:
        prefix = ProbeForward(view, weights, recorder)
        prefix.forward(sample[:prefix_tokens])
    half = microbatch_tokens // 2
    segments = [(0, half), (half, microbatch_tokens)]
    positions = torch.cat([torch.arange(prefix_tokens, prefix_tokens + half, device=device)] * 2)
    with TouchRecorder() as recorder:
        # A part that is computed again touches what its forward touched.
        logits = microbatch_logits(
            prefix,
            sample[:microbatch_tokens],
            positions,
            segments,
            lambda layer: None,
            checkpoints=False,
        )
        loss = logits.float().logsumexp(-1).sum()
        # The lowest trainable parameters pull the gradient through every layer above them; their
        # own gradients are small, and no .grad changes.
        lowest = _lowest_trainable(view, weights)
        if lowest:
            torch.autograd.grad(loss, lowest, allow_unused=True)
    return Probe.from_step(prefix.graphs, [*prefix.touched, recorder.addresses])


def _lowest_trainable(
    view: support.ModelView, weights: ReplicatedWeights
) -> list[torch.nn.Parameter]:
    for module in (*view.layers, view.model):
        parameters = [p for p in weights.weights(module) if p.requires_grad]
        if parameters:
            return parameters
    return []
