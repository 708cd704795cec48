"""Runs the probe: a miniature of the step that finds which tensors phase B uses."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import support
from .batch import Sample
from .graph import LayerGraph
from .late_reads import Touches, late_read, still_held
from .microbatch import Pack, microbatch_output
from .outputs import PLAIN, Request
from .prefix import PrefixForward, ProbeForward
from .probe import PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS, Probe, TouchRecorder
from .sharding import ReplicatedWeights


def probe_step(
    view: support.ModelView,
    weights: ReplicatedWeights,
    sample: Sample,
    device: torch.device,
    *,
    prefix_is_longer: bool,
    is_inner: bool = False,
    request: Request = PLAIN,
) -> Probe:
    """Runs the miniature step on tokens of ``sample``. Does not change any ``.grad``.

    ``is_inner``: the prefix follows another one. ``request``: what losses read.
    """
    graphs, layers, kept, after = _run(
        view, weights, sample, device, prefix_is_longer, is_inner, request
    )
    view.forget()
    # Nothing of the step is left: what is alive is held by others, who may read it in a step.
    held = still_held(layers)
    late = late_read(layers, after, kept, held.keys())
    return Probe.from_step(graphs, layers, after, late, set(held.values()))


def _run(
    view: support.ModelView,
    weights: ReplicatedWeights,
    sample: Sample,
    device: torch.device,
    prefix_is_longer: bool,
    is_inner: bool,
    request: Request,
) -> tuple[list[LayerGraph], list[Touches], set[StorageWeakRef], Touches]:
    """Returns the graphs and the touches of the prefix's layers, the storages that a step keeps
    awake anyway, and the touches of the microbatch."""
    long, short = PROBE_LONG_TOKENS, PROBE_SHORT_TOKENS
    prefix_tokens, microbatch_tokens = (long, short) if prefix_is_longer else (short, long)
    tokens, experts = (
        None if each is None else each[torch.arange(long, device="cpu") % len(each)].to(device)
        for each in sample
    )

    def recorded(rows: int) -> torch.Tensor | None:
        return None if experts is None else experts[:rows]

    path: list[PrefixForward] = []
    first = 0
    if is_inner:
        path.append(PrefixForward(view, weights))
        path[0].forward(tokens[:short], experts=recorded(short))
        first = short
    with TouchRecorder() as recorder:
        prefix = ProbeForward(view, weights, recorder, path)
        own = recorded(prefix_tokens)
        prefix.forward(tokens[:prefix_tokens], first, request, experts=own)
    path.append(prefix)
    first += prefix_tokens
    half = microbatch_tokens // 2
    segments = [(0, half), (half, microbatch_tokens)]
    positions = torch.cat([torch.arange(first, first + half, device=device)] * 2)
    own = recorded(microbatch_tokens)
    pack = Pack(tokens[:microbatch_tokens], positions, segments, own)
    with TouchRecorder() as recorder:
        # A part that is computed again touches what its forward touched.
        output = microbatch_output(view, path, pack, request, checkpoints=False)
        loss = output.logits.float().logsumexp(-1).sum()
        # The lowest trainable parameters pull the gradient through every layer above them; their
        # own gradients are small, and no .grad changes.
        lowest = _lowest_trainable(view, weights)
        if lowest:
            torch.autograd.grad(loss, lowest, allow_unused=True)
    return prefix.graphs, prefix.touched, prefix.kept, recorder.take()


def _lowest_trainable(
    view: support.ModelView, weights: ReplicatedWeights
) -> list[torch.nn.Parameter]:
    for module in (*view.layers, view.model):
        parameters = [p for p in weights.weights(module) if p.requires_grad]
        if parameters:
            return parameters
    return []
