"""Megatron-core 0.16 on a CPU, over gloo. It asks for GPUs by name, and gets the CPU.

Import this module before a model is made.
"""

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Functions of torch that are given a GPU as ``device`` use the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1:
            # Gradient clipping compares the name.
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        return func(*args, **kwargs)


torch.cuda.current_device = lambda: CPU
torch.cuda.synchronize = lambda *arguments: None
torch.cuda.get_rng_state = lambda *arguments: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed
torch.Tensor.cuda = lambda tensor, *arguments, **named: tensor
torch.nn.Module.cuda = lambda module, *arguments: module
# The generators of tensor-parallel ranks.
random._get_cuda_rng_state = lambda *arguments, **named: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *arguments, **named: torch.set_rng_state(state)
OnCpu().__enter__()
