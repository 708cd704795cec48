"""Megatron-core 0.16 on a CPU, over gloo. It asks for GPUs by name, and gets the CPU.

Import this module before a model is made.
"""

import contextlib

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Functions of torch that are given a GPU as ``device`` use the CPU, and none pins memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is torch.Tensor.type and len(args) == 1:
            # Gradient clipping compares the name.
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": CPU}
        return func(*args, **kwargs)


class OneStream:
    """Everything is in order."""

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


STREAM = OneStream()
torch.cuda.current_stream = lambda *arguments: STREAM
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.cuda.current_device = lambda: CPU
torch.cuda.synchronize = lambda *arguments: None
torch.cuda.get_rng_state = lambda *arguments: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed
torch.Tensor.cuda = lambda tensor, *arguments, **named: tensor
torch.nn.Module.cuda = lambda module, *arguments: module
# The generators of tensor-parallel ranks.
random._get_cuda_rng_state = lambda *arguments, **named: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *arguments, **named: torch.set_rng_state(state)
# Experts: a name is missing without Transformer Engine, and splits must be no tensors.
token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = STREAM
moe_utils.te_general_gemm = None
token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
    tensor.numpy() if as_numpy and tensor is not None else tensor
)
OnCpu().__enter__()
