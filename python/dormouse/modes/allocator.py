"""Mode ``"allocator"``: dormouse allocates every CUDA tensor of this process."""

from __future__ import annotations

import torch

from .. import _native as native
from . import exports, history, profiling, stats

RECORD_STREAM = "set_record_stream_fn"

# Setters of torch's allocator object that some torch versions lack: our function for each, and the
# loss without it.
OPTIONAL_HOOKS = {
    "set_reset_fn": ("torch_empty_cache", "torch.cuda.empty_cache() does nothing"),
    "set_memory_fraction_fn": (
        "torch_set_memory_fraction",
        "torch.cuda.set_per_process_memory_fraction() does nothing",
    ),
    "set_base_alloc_fn": ("torch_get_base", "torch cannot tell a tensor's block from its address"),
}

# The same for CUDA graphs: memory is private to a graph only if torch announces every capture.
GRAPH_HOOKS = {
    "set_begin_allocate_to_pool": "torch_begin_pool",
    "set_end_allocate_to_pool_fn": "torch_end_pool",
    "set_release_pool": "torch_release_pool",
}


# What torch refuses to any pluggable allocator.
REFUSED = (
    "checkpoints of pools (torch.compile with graph trees)",
    "tensors shared between processes (IPC)",
    "torch.cuda.MemPool (mode 'pool' has memory pools)",
    "cuDNN's convolutions while torch.backends.cudnn.benchmark is True",
)


def unavailable_because() -> str | None:
    """Returns why the mode cannot be activated now, or None. Does not initialize CUDA."""
    if torch.cuda.is_initialized():
        return (
            "torch's CUDA was already in use, and torch accepts an allocator only before that; "
            "call dormouse.install() before the first CUDA tensor, stream or set_device"
        )
    if torch.cuda.memory.get_allocator_backend() == "pluggable":
        return "torch already has a pluggable allocator, and it accepts one only once"
    kind = getattr(torch._C, "_CUDAPluggableAllocator", None)
    if not hasattr(kind, RECORD_STREAM):
        return (
            f"torch {torch.__version__} has no {RECORD_STREAM}, without which it would reuse "
            "memory that another stream still reads"
        )
    return None


def activate() -> list[str]:
    """Makes dormouse torch's allocator until the process ends. Returns a sentence for
    everything that this torch lacks.

    Requires :func:`unavailable_because` to be None. Raises RuntimeError if torch refuses.
    """
    allocator = pluggable("torch_malloc", "torch_free")
    lost = []
    for setter, (name, loss) in OPTIONAL_HOOKS.items():
        if hasattr(allocator.allocator(), setter):
            getattr(allocator.allocator(), setter)(native.address_of(name))
        else:
            lost.append(f"torch {torch.__version__} has no {setter}: {loss}")
    missing = [setter for setter in GRAPH_HOOKS if not hasattr(allocator.allocator(), setter)]
    if missing:
        names = ", ".join(missing)
        lost.append(f"torch {torch.__version__} has no {names}: memory for CUDA graphs is refused")
    else:
        for setter, name in GRAPH_HOOKS.items():
            getattr(allocator.allocator(), setter)(native.address_of(name))
    torch.cuda.memory.change_current_allocator(allocator)
    # From here on dormouse queries the capture state only after torch has announced a capture.
    native.library().dormouse_torch_set_graph_hooks(int(not missing))
    refused = "unavailable with any pluggable allocator of torch: " + "; ".join(REFUSED)
    notices = *exports.notice(), *profiling.notice(), stats.notice(), history.notice()
    return [*lost, *notices, refused]


def pluggable(malloc: str, free: str) -> torch.cuda.memory.CUDAPluggableAllocator:
    """Returns torch's allocator object for our functions, with ``record_stream`` support."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(native.library_path()), f"dormouse_{malloc}", f"dormouse_{free}"
    )
    record_stream = getattr(allocator.allocator(), RECORD_STREAM)
    record_stream(native.address_of("torch_record_stream"))
    return allocator
