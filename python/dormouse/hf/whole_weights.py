"""All weights of a model under ``fully_shard``, whole for the passes of a call.

Ranks' batches share different prompts, so their passes differ, and no pass may contain a
collective. A call gathers the weights before its first pass, and its backward averages gradients
after the last. In between every module holds whole parameters and is of its own class, without the
sharding's hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import sharding, substitutes

if dist.is_available():
    from torch.distributed.tensor import DTensor, Partial

# Where the hooks that gather weights around a forward are defined.
_HOOKS = "torch.distributed.fsdp."


class _Dtypes(NamedTuple):
    """Of one parameter, as its ``MixedPrecisionPolicy`` says."""

    passes: torch.dtype
    reduction: torch.dtype | None
    """Of the gradient's average; None: the gradient's own."""
    divisor: float | None
    """Of the gradients' sum; None: the number of ranks."""


class WholeParameters:
    """A whole parameter for every sharded one, without memory but in the passes of a call."""

    def __init__(self, model: torch.nn.Module, device: torch.device):
        """``device``: of the passes."""
        self._model, self._device = model, device
        self._whole: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def gather(self) -> WholeWeights:
        """Returns the weights as they are now. A collective of the ranks.

        Raises :class:`.UnsupportedModelError` for parameters that the sharding leaves out.
        """
        # A forward without a backward leaves weights gathered.
        sharding.reshard(self._model)
        modules = sharding.sharded_modules(self._model)
        sharding.check_meshes(self._model, modules)
        dtypes = _dtypes_of(modules.values())
        known, self._whole = self._whole, {}
        data = {}
        for own in self._model.parameters():
            if not isinstance(own, DTensor):
                continue
            dtype = dtypes[own].passes
            whole = known.get(own)
            if whole is None or whole.dtype != dtype:
                empty = torch.empty(0, device=self._device, dtype=dtype)
                whole = torch.nn.Parameter(empty, requires_grad=own.requires_grad)
            self._whole[own] = whole.requires_grad_(own.requires_grad)
            data[own] = own.detach().to(self._device, dtype).full_tensor()
        return WholeWeights(self._model, list(modules.values()), self._whole, data, dtypes)


class WholeWeights(sharding.ReplicatedWeights):
    """The weights of one call."""

    def __init__(
        self,
        model: torch.nn.Module,
        modules: list[torch.nn.Module],
        whole: dict[torch.nn.Parameter, torch.nn.Parameter],
        data: dict[torch.nn.Parameter, torch.Tensor],
        dtypes: dict[torch.nn.Parameter, _Dtypes],
    ):
        """``modules``: to which ``fully_shard`` was applied. The rest: by sharded parameter."""
        super().__init__(model)
        self._modules, self._whole, self._data, self._dtypes = modules, whole, data, dtypes
        self._sharded = {each: own for own, each in whole.items()}

    @property
    def updates(self):
        """Of the shards, which the optimizer writes to."""
        return sum(own._version + own.to_local()._version for own in self._data)

    def receivers(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return [self._sharded.get(each, each) for each in parameters]

    def handed(self, parameters, gradients):
        """A collective of the ranks."""
        receivers = self.receivers(parameters)
        return [self._averaged(*pair) for pair in zip(receivers, gradients, strict=True)]

    def _averaged(
        self, own: torch.nn.Parameter, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the shard of the average over the ranks."""
        mesh, (_, dtype, divisor) = own.device_mesh, self._dtypes[own]
        if gradient is None:
            if mesh.size() == 1:
                return None
            # Rows of this rank have no response, or no loss; those of others do.
            gradient = torch.zeros_like(self._data[own])
        gradient = gradient.to(dtype or gradient.dtype)
        kind = Partial("avg" if divisor is None else "sum")
        partial = DTensor.from_local(gradient, mesh, [kind] * mesh.ndim, run_check=False)
        shard = partial.redistribute(placements=own.placements)
        if divisor is not None:
            shard = shard / divisor
        return shard.to(own.device, own.dtype)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        for own, data in self._data.items():
            self._whole[own].data = data
        places = substitutes.put(self._module, self._whole.get)
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
            for whole in self._whole.values():
                whole.data = whole.data.new_empty(0)


def _dtypes_of(modules) -> dict[torch.nn.Parameter, _Dtypes]:
    return {
        each.sharded_param: _Dtypes(
            dtype, sharding.policy_of(each, group).reduce_dtype, group.gradient_divide_factor
        )
        for each, group, dtype in sharding.shards(modules)
    }
