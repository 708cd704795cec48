"""Process groups that Megatron-core made for one case and the next does not use."""

from __future__ import annotations

import gc

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d


def destroy_groups() -> None:
    """Destroys all process groups but the world's, and what still refers to them: each group keeps
    threads of gloo that poll, and models are cycles, which Python collects rarely."""
    parallel_state.destroy_model_parallel()
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
