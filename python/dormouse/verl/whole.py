"""All weights of a model under ``fully_shard``, in place for the time of a batch.

Ranks' batches share different prompts, so their passes differ, and no pass may contain a
collective. The weights are gathered before the first pass, and gradients are averaged after the
last. In between every module holds whole parameters and is of its own class, without the sharding's
hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from ..hf import sharding, substitutes
from ..trainers import UnsupportedTrainerError

# Where the hooks that gather weights around a forward are defined.
_HOOKS = "torch.distributed.fsdp."


class WholeWeights:
    """A whole parameter for every sharded one. Every method but :meth:`in_place` holds collectives:
    all ranks call it, in the same order."""

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ):
        """``device``, ``dtype``: of floating parameters in the passes. ``reduce_dtype``: of their
        gradients' average."""
        self.model, self._reduce_dtype = model, reduce_dtype
        self._modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
        sharding.reshard(model)
        self._whole: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for name, own in model.named_parameters():
            if not isinstance(own, DTensor):
                raise UnsupportedTrainerError(
                    f"parameter {name!r} is on no mesh; accepted: every parameter under fully_shard"
                )
            own_dtype = dtype if own.is_floating_point() else own.dtype
            data = torch.empty(0, device=device, dtype=own_dtype)
            self._whole[own] = torch.nn.Parameter(data, requires_grad=own.requires_grad)

    def gather(self) -> None:
        """Fills the whole parameters."""
        # A forward without a backward leaves weights gathered.
        sharding.reshard(self.model)
        for own, whole in self._whole.items():
            whole.data = own.detach().to(whole.device).full_tensor().to(whole.dtype)
            whole.requires_grad_(own.requires_grad)

    def reduce(self) -> None:
        """Adds the average of the whole parameters' gradients to the sharded ones'."""
        for own, whole in self._whole.items():
            grad, whole.grad = whole.grad, None
            if not own.requires_grad:
                continue
            mesh = own.device_mesh
            if grad is None:
                if mesh.size() == 1:
                    continue
                # Rows of this rank have no response, or no loss; those of others do.
                grad = torch.zeros_like(whole)
            grad = grad.to(self._reduce_dtype)
            partial = DTensor.from_local(grad, mesh, [Partial("avg")] * mesh.ndim, run_check=False)
            average = partial.redistribute(placements=own.placements).to(own.dtype).to(own.device)
            own.grad = average if own.grad is None else own.grad + average

    def release(self) -> None:
        """Frees the whole parameters and their gradients."""
        for whole in self._whole.values():
            whole.data, whole.grad = whole.data.new_empty(0), None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context of passes without collectives."""
        places = substitutes.put(self.model, self._whole.get)
        classes = [(module, type(module)) for module in self._modules]
        hooks = [
            (table, dict(table))
            for module in self._modules
            for table in (module._forward_pre_hooks, module._forward_hooks)
        ]
        try:
            for module, sharded in classes:
                module.__class__ = sharded.__bases__[-1]
            for table, own in hooks:
                for key, hook in own.items():
                    if getattr(hook, "__module__", "").startswith(_HOOKS):
                        del table[key]
            yield
        finally:
            for table, own in hooks:
                table.clear()
                table.update(own)
            for module, sharded in classes:
                module.__class__ = sharded
            substitutes.put_back(places)
