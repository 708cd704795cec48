"""What routers count and log in a call of the schedule."""

from __future__ import annotations

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe import moe_utils

Tensors = dict[str, torch.Tensor]

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
