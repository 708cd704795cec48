"""Models whose layers are split over ranks by DTensor: ``tp_plan`` of transformers, or torch's own
``parallelize_module``.

Every rank of a mesh runs the same passes over its part of each layer, on the same batch, so the
collectives inside them match. K and V of the prefix are those of a rank's own heads
(docs/method.md §9). What a rank decides may therefore depend on nothing that ranks do not share,
such as its free memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .support import UnsupportedModelError

if dist.is_available():
    from torch.distributed.tensor import DTensor

# The class of transformers that adds up a whole parameter's gradient over ranks in a hook.
_SUMMING_STYLE = "ReplicatedWithGradAllReduce"


def has_parts(model: torch.nn.Module) -> bool:
    """Returns whether parameters are parts of those of a mesh."""
    return dist.is_available() and any(isinstance(p, DTensor) for p in model.parameters())


def check(model: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` for what is known to be inexact."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if getattr(forward, "__qualname__", "").startswith(_SUMMING_STYLE):
            raise UnsupportedModelError(
                f"{name!r} adds up its parameters' gradients over ranks after every backward "
                "(replicated_with_grad_allreduce), and a step has several; accepted: a tp_plan "
                "without it"
            )


def refuse_step() -> None:
    raise UnsupportedModelError(
        "step() averages gradients over ranks, and layers of this model are split over ranks; "
        "accepted: score() or backward() with the same batch on every rank of the mesh"
    )


def refuse_sharded(name: str) -> None:
    raise UnsupportedModelError(
        f"parameter {name!r} is split over ranks beside fully_shard; accepted: fully_shard or "
        "tensor parallelism"
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
