"""What routers count and log in a call of the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe import moe_utils

Tensors = dict[str, torch.Tensor]

# Of values that are logged in FP32, and sums of them over ranks.
LOGGED_TOLERANCE = 1e-6
# Tokens per expert, as the last call of finalize() found them.
COUNTED: Tensors = {}


def finalize(model: list, *args, **named) -> None:
    """Megatron's own, which sets the counts of routers to zero."""
    COUNTED.clear()
    COUNTED.update(
        (f"{number}.{name}", each.clone())
        for number, chunk in enumerate(model)
        for name, each in chunk.named_buffers()
        if "tokens_per_expert" in name
    )
    finalize_model_grads(model, *args, **named)


def balance(ddp: list) -> Tensors:
    """Returns the biases of experts, their counts, and what routers logged since the last call of
    this."""
    logged = {
        name: own["values"].clone()
        for name, own in moe_utils.get_moe_layer_wise_logging_tracker().items()
    }
    moe_utils.clear_aux_losses_tracker()
    biases = {
        f"{number}.{name}": each.clone()
        for number, chunk in enumerate(ddp)
        for name, each in chunk.named_buffers()
        if "expert_bias" in name
    }
    return logged | biases | COUNTED


def differing(theirs: Sequence[Tensors], ours: Sequence[Tensors]) -> list[str]:
    """Returns the names of what differs between two runs: values of the ranks of a stage, which are
    summed, and names themselves. Tensor-parallel ranks log values of their rows, which are
    others."""
    if [each.keys() for each in theirs] != [each.keys() for each in ours]:
        return ["names"]
    found = []
    for name in theirs[0]:
        sums = (sum(each[name] for each in way) for way in (theirs, ours))
        if not torch.allclose(*sums, rtol=LOGGED_TOLERANCE, atol=LOGGED_TOLERANCE):
            found.append(name)
    return found
