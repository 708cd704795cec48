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
from .support import UnsupportedModelError

if dist.is_available():
    from torch.distributed.tensor import DTensor, Partial

# Where the hooks that gather weights around a forward are defined.
_HOOKS = "torch.distributed.fsdp."


class _Sharded(NamedTuple):
    """What ``fully_shard`` says of one parameter."""

    dtype: torch.dtype
    """In which it is gathered."""
    reduce_dtype: torch.dtype | None
    """Of its gradient's average; None: :attr:`dtype`."""
    divisor: float | None
    """Of the sum of gradients; None: the number of ranks."""


class _Gathered(NamedTuple):
    """One parameter of a call."""

    data: torch.Tensor
    is_trained: bool
    sharded: _Sharded


class WholeParameters:
    """A whole parameter for every sharded one, without memory but in the passes of a call."""

    def __init__(self, model: torch.nn.Module, device: torch.device):
        """``device``: of the passes."""
        self._model, self._device = model, device
        self._whole: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def gather(self) -> WholeWeights:
        """Returns the weights as they are now. A collective of the ranks.

        Raises :class:`.UnsupportedModelError` for parameters that the sharding leaves out, and for
        what a call does not do as ``fully_shard`` does.
        """
        # A forward without a backward leaves weights gathered.
        sharding.reshard(self._model)
        modules = sharding.sharded_modules(self._model)
        sharding.check_meshes(self._model, modules)
        _check(modules)
        sharded = _sharded(modules.values())
        known, self._whole = self._whole, {}
        gathered = {}
        for name, own in self._model.named_parameters():
            if not isinstance(own, DTensor):
                continue
            if own not in sharded:
                raise UnsupportedModelError(
                    f"parameter {name!r} is a DTensor that fully_shard leaves out; accepted: every "
                    "DTensor under fully_shard"
                )
            dtype = sharded[own].dtype
            whole = known.get(own)
            if whole is None or whole.dtype != dtype:
                whole = torch.nn.Parameter(torch.empty(0, device=self._device, dtype=dtype))
            self._whole[own] = whole
            data = own.detach().to(self._device, dtype).full_tensor()
            gathered[own] = _Gathered(data, own.requires_grad, sharded[own])
        return WholeWeights(self._model, modules, self._whole, gathered)


class WholeWeights(sharding.ReplicatedWeights):
    """The weights of one call."""

    def __init__(
        self,
        model: torch.nn.Module,
        modules: dict[str, torch.nn.Module],
        whole: dict[torch.nn.Parameter, torch.nn.Parameter],
        gathered: dict[torch.nn.Parameter, _Gathered],
    ):
        """``modules``: to which ``fully_shard`` was applied. ``whole``, ``gathered``: by sharded
        parameter."""
        super().__init__(model)
        self._modules, self._whole, self._gathered = modules, whole, gathered
        self._sharded = {each: own for own, each in whole.items()}
        self.sums_wide = any(_is_narrowed(own, each.sharded) for own, each in gathered.items())

    @property
    def updates(self):
        """A number that follows from the shards' bytes: optimizers that write to many tensors at
        once do not move versions of DTensors."""
        device = next(iter(self._sharded)).device
        sums = [_digest(own.to_local()).to(device) for own in self._gathered]
        return int(torch.stack(sums).sum())

    def receivers(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return [self._sharded.get(each, each) for each in parameters]

    def handed(self, twins):
        """A collective of the ranks."""
        _check(self._modules)
        owners = self.receivers(twins.trainable)
        gradients = twins.take(rounded=False)
        on_some_rank = _on_some_rank(list(zip(owners, gradients, strict=True)))
        shards = []
        # A whole gradient is freed as soon as it is reduced.
        gradients.reverse()
        for own in owners:
            gradient = gradients.pop()
            shards.append(self._averaged(own, gradient) if own in on_some_rank else None)
        return shards

    def _averaged(self, own: torch.nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor:
        """Returns the shard of the average over the ranks."""
        data, _, (gathered_dtype, reduce_dtype, divisor) = self._gathered[own]
        if gradient is None:
            # Rows of this rank have no response, or no loss; those of others do.
            gradient = torch.zeros_like(data)
        mesh, gradient = own.device_mesh, gradient.to(reduce_dtype or gathered_dtype)
        kind = Partial("avg" if divisor is None else "sum")
        partial = DTensor.from_local(gradient, mesh, [kind] * mesh.ndim, run_check=False)
        shard = partial.redistribute(placements=own.placements)
        if divisor is not None:
            shard = shard / divisor
        return shard.to(own.device, own.dtype)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        # A forward of the model's own since may have left weights gathered.
        sharding.reshard(self._module)
        for own, gathered in self._gathered.items():
            whole = self._whole[own]
            whole.data = gathered.data
            # Another call may have begun with other parameters trained.
            whole.requires_grad_(gathered.is_trained)
        modules = self._modules.values()
        hooks = [
            (table, number)
            for module in modules
            for table in (module._forward_pre_hooks, module._forward_hooks)
            for number, hook in table.items()
            if getattr(hook, "__module__", "").startswith(_HOOKS)
        ]
        classes = [(module, type(module)) for module in modules]
        places = substitutes.put(self._module, self._whole.get)
        try:
            for module, sharded in classes:
                module.__class__ = sharded.__bases__[-1]
            with substitutes.without_hooks(hooks):
                yield
        finally:
            for module, sharded in classes:
                module.__class__ = sharded
            substitutes.put_back(places)
            for whole in self._whole.values():
                whole.data = whole.data.new_empty(0)


def _sharded(modules) -> dict[torch.nn.Parameter, _Sharded]:
    return {
        each.sharded_param: _Sharded(
            dtype, sharding.policy_of(each, group).reduce_dtype, group.gradient_divide_factor
        )
        for each, group, dtype in sharding.shards(modules)
    }


def _is_narrowed(own: torch.nn.Parameter, sharded: _Sharded) -> bool:
    """Returns whether FSDP adds up the gradients of microbatches in a wider dtype than passes."""
    dtypes = (own.dtype, sharded.reduce_dtype or own.dtype)
    return max(each.itemsize for each in dtypes) > sharded.dtype.itemsize


def _check(modules: dict[str, torch.nn.Module]) -> None:
    """Raises :class:`.UnsupportedModelError` for what a call does not do as ``fully_shard``."""
    dtypes = set()
    for each, group, _ in sharding.shards(modules.values()):
        dtypes.add(sharding.policy_of(each, group).param_dtype)
        if group._all_reduce_hook is not None:
            raise UnsupportedModelError(
                "set_all_reduce_hook was called, and score() reduces gradients by itself; "
                "accepted: no such hook"
            )
        if _waits(each, group) and group.reduce_grads and group.all_reduce_grads:
            raise UnsupportedModelError(
                "gradients of an unsynchronised backward of the model's own wait for a reduction, "
                "which score() does not do; accepted: a backward of the model's own as the last of "
                "an accumulation"
            )
    if len(dtypes) > 1:
        raise UnsupportedModelError(
            "modules under fully_shard have policies with param_dtype "
            f"{', '.join(sorted(map(str, dtypes)))}, and score() casts nothing between them; "
            "accepted: one param_dtype"
        )


def _waits(shard, group) -> bool:
    """Returns whether FSDP keeps a gradient that is not reduced, or not over all dimensions of the
    mesh."""
    if group._partial_reduce_output is not None:
        return True
    unsharded = getattr(shard, "_unsharded_param", None)
    waiting = unsharded is not None and unsharded.grad is not None
    # torch 2.12 and before keeps one in another dtype beside it.
    waiting = waiting or getattr(shard, "unsharded_accumulated_grad", None) is not None
    return waiting and not _is_in_backward(group)


def _is_in_backward(group) -> bool:
    """Returns whether FSDP reduces at the end of the backward that is running."""
    return group._training_state.name != "IDLE"


def _on_some_rank(pairs) -> set[torch.nn.Parameter]:
    """Returns the parameters that have a gradient on some rank: one that no rank's passes use has
    none. ``pairs``: parameters and gradients."""
    found = set()
    for mesh in dict.fromkeys(own.device_mesh for own, _ in pairs):
        own_pairs = [pair for pair in pairs if pair[0].device_mesh == mesh]
        found_here = [grad is not None for _, grad in own_pairs]
        has = torch.tensor(found_here, dtype=torch.int32, device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(has, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        found |= {own for (own, _), some in zip(own_pairs, has.tolist(), strict=True) if some}
    return found


def _digest(shard: torch.Tensor) -> torch.Tensor:
    """Returns a number that follows from the bytes of a shard."""
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return shard.detach().contiguous().view(as_integers[shard.itemsize]).sum(dtype=torch.int64)
