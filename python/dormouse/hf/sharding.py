"""Placement of a model's weights over ranks, and what the passes of a step do about it.

:class:`ReplicatedWeights`: every rank has all weights (a plain model, or DistributedDataParallel).
No pass contains a collective; the step averages gradients after the last pass. DDP's own forward is
never called, so its hooks stay inactive (unless the trainer called it with gradients enabled and
never ran the backward: then they fire in the next one).

:class:`ShardedWeights`: ``fully_shard`` (FSDP2). Its hooks gather weights around each forward and
backward of a sharded module, and free them again. Three things follow. Every pass enters and
leaves each sharded module through its hooks, including phase A, which ends inside the last layer.
The last layer's K and V are its output there, so that a backward from them runs the gathering
hook. Gathered weights are allocated anew in each phase and are never named dormant. Ranks with
trees run passes that others cannot match: then all weights are gathered once per step.

:class:`EngineWeights`: DeepSpeed's engine, which owns the backward (:mod:`.deepspeed_engine`). A
call's passes find all weights whole.

:class:`SplitWeights`: tensor parallelism (:mod:`.tensor_parallel`). All ranks of the mesh run the
same passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import ranks
from . import calls, deepspeed_engine, substitutes, tensor_parallel
from .support import ModelView, UnsupportedModelError, free_bytes
from .trial import TRIAL_COPIES, Trial
from .twins import Twins

if dist.is_available():
    from torch.distributed.fsdp import (
        FSDPModule,
        FullyShardedDataParallel,
    )
    from torch.distributed.tensor import DTensor

class PrefixDone(Exception):
    """Ends phase A at the last layer's K and V: the rest is dead work (docs/method.md §4)."""


class ReplicatedWeights:
    """Every rank has all weights."""

    passes_hold_collectives = False
    sums_wide = False
    """Whether gradients of a call's passes add up in FP32 (:class:`.twins.Twins`)."""
    needs_zeros = True
    """Whether a call whose loss depends on no token gives parameters zeros, as a dense run does.
    Without a gradient an optimizer skips a parameter, and DeepSpeed's engine does not reduce it."""

    def __init__(self, module: torch.nn.Module):
        self._module = module

    @property
    def accumulate_in_place(self) -> bool:
        """Whether a product may add to the gradient of a weight (:mod:`.accumulation`): no hook of a
        framework waits for each backward, and the sum has the weight's dtype."""
        return not self.sums_wide

    @property
    def description(self) -> str:
        """Text that is equal on all ranks with the same placement."""
        return "whole"

    @property
    def updates(self) -> int:
        """Updates of the weights that their versions do not show."""
        return 0

    def check_backward(self, what: str) -> None:
        """Raises :class:`UnsupportedModelError` if ``what`` may not add to ``.grad`` by itself."""

    def receivers(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Returns the trainer's parameters in the place of those that passes compute with."""
        return list(parameters)

    def handed(self, twins: Twins) -> list[torch.Tensor | None]:
        """Returns the gradients of the :meth:`receivers` of the parameters that have twins, and
        clears the twins' own."""
        return twins.take()

    def in_place(self) -> contextlib.AbstractContextManager:
        """Returns the context in which modules hold what passes compute with."""
        return contextlib.nullcontext()

    def stepping(self) -> contextlib.AbstractContextManager:
        """Returns the context for all passes of a step."""
        return contextlib.nullcontext()

    def run_prefix(self, view: ModelView, work: Callable[[], object], boundary) -> None:
        """Runs phase A: a forward that ends with :class:`PrefixDone` in the last layer."""
        try:
            work()
        except PrefixDone as done:
            # The traceback keeps the last layer's frame and its unused query alive.
            done.__traceback__ = None

    @property
    def splits_prompts(self) -> bool:
        """Whether a rank's pass of a prompt has some of its rows."""
        return False

    def seam(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the last layer's K and V as boundary tensors."""
        return key, value

    def gathered(self) -> contextlib.AbstractContextManager:
        """Returns the context in which all weights stay gathered, so that no pass contains a
        collective."""
        return contextlib.nullcontext()

    def keep_in_next_backwards(self) -> None:
        """Called before the first backward of a step."""

    def reduce_in_next_backward(self) -> None:
        """Called before the last backward of a step."""

    def weights(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Returns the parameters ``module`` computes with."""
        return list(module.parameters())

    def trial(self, model: torch.nn.Module, dtype: torch.dtype | None) -> Trial:
        """Returns the context of a check. ``dtype``: see :class:`Trial`."""
        return Trial(model, dtype)

    def agreed(self, numbers: Sequence[int]) -> list[int]:
        """Returns the largest of each number over the ranks that run the same passes. What a rank
        finds out about its own model must not decide alone which passes follow."""
        return list(numbers)

    def fits_twice(self, model: torch.nn.Module, dtype: torch.dtype) -> bool:
        """Returns whether copies of the weights in ``dtype`` fit beside them, with gradients."""
        parameters = list(model.parameters())
        needed_bytes = sum(p.numel() for p in parameters) * dtype.itemsize * TRIAL_COPIES
        return needed_bytes <= free_bytes(parameters[0].device)

    def gathered_now(self) -> Sequence[torch.Tensor]:
        """Returns temporarily gathered weights, which never sleep. Those freed since have no
        memory."""
        return ()

    def average(self, process_group, device: torch.device) -> None:
        """Averages gradients over ranks, once, after the last backward."""
        trainable = [p for p in self._module.parameters() if p.requires_grad]
        ranks.average_gradients(process_group, trainable, device)


class EngineWeights(ReplicatedWeights):
    """Of DeepSpeed's engine: whole in :func:`around_passes`."""

    def __init__(self, engine: torch.nn.Module):
        super().__init__(engine.module)
        self._engine = engine
        # A call has more passes than the engine has microbatches.
        self.sums_wide = deepspeed_engine.sums_wide(engine)

    @property
    def updates(self) -> int:
        """ZeRO writes to weights through flat tensors that share their memory."""
        return self._engine.global_steps

    def check_backward(self, what: str) -> None:
        deepspeed_engine.refuse_own_backward(what)


class SplitWeights(ReplicatedWeights):
    """Every rank has a part of each layer."""

    accumulate_in_place = False

    @property
    def description(self) -> str:
        return "parts of layers"

    def check_backward(self, what: str) -> None:
        if what == "step()":
            tensor_parallel.refuse_step()

    def trial(self, model, dtype):
        return _PartsTrial(model, dtype)

    def agreed(self, numbers):
        table = torch.tensor(list(map(int, numbers)), device="cpu")
        return _reduced(self._module, table, dist.ReduceOp.MAX).tolist()

    def fits_twice(self, model, dtype):
        """Ranks that check together may not decide by their own free memory."""
        return False


class ShardedWeights(ReplicatedWeights):
    """``fully_shard`` has been applied to the model and to modules in it."""

    passes_hold_collectives = True
    accumulate_in_place = False

    def __init__(self, module: torch.nn.Module, modules: dict[str, torch.nn.Module]):
        super().__init__(module)
        self._modules = modules
        self._gathered: dict[torch.nn.Module, list[torch.nn.Parameter]] = {}

    @property
    def description(self) -> str:
        """Names the sharded modules, which determine the collective order."""
        return "fully_shard of " + ", ".join(name or "the model" for name in self._modules)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        handles = [m.register_forward_pre_hook(self._note) for m in self._modules.values()]
        self._reduce(False)
        try:
            yield
        except BaseException:
            # Gathered weights and armed hooks would break the next forward. Collectives that a dead
            # rank left in flight fail again; the error in flight is more specific.
            with contextlib.suppress(Exception):
                self._module.reset_iter_state()
            raise
        finally:
            self._reduce(True)
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def gathered(self):
        groups = [group for module in self._modules.values() for group in parameter_groups(module)]
        before = [(group, group.post_forward_mesh_info) for group in groups]
        after = [(group, group.reshard_after_backward) for group in groups]
        for group in groups:
            group.post_forward_mesh_info, group.reshard_after_backward = None, False
        try:
            for module in self._modules.values():
                module.unshard()
            yield
        finally:
            for group, mesh_info in before:
                group.post_forward_mesh_info = mesh_info
            for group, wanted in after:
                group.reshard_after_backward = wanted
            reshard(self._module)

    def run_prefix(self, view, work, boundary):
        def stop(module, args, output):
            raise PrefixDone

        last = view.layers[-1]
        around = [m for m in self._modules.values() if m is not last and _contains(m, last)]
        with contextlib.ExitStack() as stack:
            for module in (last, *around):
                stack.enter_context(_ending(module, boundary))
                if module is not self._module:
                    # After the sharding's own hook, which has freed the weights by then.
                    stack.callback(module.register_forward_hook(stop).remove)
            work()

    def seam(self, key, value):
        return _Seam.apply(key, value)

    def keep_in_next_backwards(self):
        self._reduce(False)

    def reduce_in_next_backward(self):
        self._reduce(True)

    def _reduce(self, wanted: bool) -> None:
        self._module.set_requires_gradient_sync(wanted)
        self._module.set_is_last_backward(wanted)

    def weights(self, module):
        noted = (self._gathered.get(each, []) for each in module.modules())
        return [parameter for parameters in noted for parameter in parameters]

    def trial(self, model, dtype):
        return _ShardedTrial(model, dtype)

    def fits_twice(self, model, dtype):
        return False

    def gathered_now(self):
        return [p for parameters in self._gathered.values() for p in parameters]

    def _note(self, module, args) -> None:
        """Records the gathered parameters of a module whose forward begins: the same objects in
        every pass, with new memory in each."""
        for each in module.modules():
            held = [p for p in each._parameters.values() if type(p) is torch.nn.Parameter]
            if held:
                self._gathered[each] = held

    def average(self, process_group, device):
        """Does nothing: the last backward has reduced the gradients."""


def groups_of(model: torch.nn.Module) -> list[dist.ProcessGroup]:
    """Returns the process group of each dimension of the model's mesh."""
    mesh = _a_part(model).device_mesh
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def _a_part(model: torch.nn.Module) -> DTensor:
    return next(p for p in model.parameters() if isinstance(p, DTensor))


def _reduced(model: torch.nn.Module, table: torch.Tensor, op) -> torch.Tensor:
    """Returns a table reduced over the ranks of the model's mesh."""
    table = table.to(_a_part(model).device)
    for group in groups_of(model):
        dist.all_reduce(table, op, group=group)
    return table.cpu()


class _PartsTrial(Trial):
    """Of weights of which each rank holds a part: in their own dtype."""

    def _copy(self, tensor):
        if type(tensor) is not DTensor:
            return super()._copy(tensor)
        if tensor not in self._copies:
            self._copies[tensor] = substitutes.parameter_like(tensor, tensor.detach())
        return self._copies[tensor]

    def _local(self, grad):
        return tensor_parallel.local(grad)

    def summed(self, table):
        return _reduced(self._model, table, dist.ReduceOp.SUM)


class _ShardedTrial(_PartsTrial):
    """Of sharded weights: in place."""

    def __enter__(self):
        reshard(self._model)
        return super().__enter__()

    def adopt(self, output):
        """Does nothing: gathered weights are leaves that no module holds."""

    def take(self, *, kept: bool = False):
        reshard(self._model)
        return super().take(kept=kept)

    def _substitute(self):
        return []


class _Seam(torch.autograd.Function):
    """Passes K and V through a graph node of their own, as tensors that are not views: torch drops
    hooks on a view when it is written to, with a warning."""

    @staticmethod
    def forward(ctx, key, value):
        return key.detach(), value.detach()

    @staticmethod
    def backward(ctx, grad_key, grad_value):
        return grad_key, grad_value


@contextlib.contextmanager
def _ending(module: torch.nn.Module, result: Callable[[], object]) -> Iterator[None]:
    """Makes a forward of ``module`` that :class:`PrefixDone` ends return ``result()``, so that its
    post-forward hooks run."""
    own = module.__dict__.get("forward")
    forward = module.forward

    def ending(*args, **kwargs):
        try:
            return forward(*args, **kwargs)
        except PrefixDone as done:
            # The traceback keeps the forward's frame and its unused query alive.
            done.__traceback__ = None
            return result()

    module.forward = ending
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside DistributedDataParallel or DeepSpeed's engine, or the model itself.

    Raises :class:`UnsupportedModelError` for an engine that is not supported.
    """
    if deepspeed_engine.is_engine(model):
        deepspeed_engine.check(model)
        return model.module
    return model.module if isinstance(model, DistributedDataParallel) else model


class _Work(torch.nn.Module):
    """A module in place of the wrapped one, with its parameters and buffers."""

    def __init__(self, own: torch.nn.Module, work: Callable[[], object]):
        super().__init__()
        # Not as a module of this one.
        self.__dict__["_own"] = own
        self._work = work

    def forward(self, *unused):
        return self._work()

    def named_parameters(self, *arguments, **options):
        return self._own.named_parameters(*arguments, **options)

    def named_buffers(self, *arguments, **options):
        return self._own.named_buffers(*arguments, **options)


def inside(wrapped: torch.nn.Module, work: Callable[[], object]):
    """Returns ``work()``, run as the forward of the wrapped model if it is wrapped: what
    DistributedDataParallel and DeepSpeed's engine do around a forward prepares the backward."""
    if deepspeed_engine.is_engine(wrapped):
        return deepspeed_engine.inside(wrapped, _Work(wrapped.module, work))
    if not isinstance(wrapped, DistributedDataParallel):
        return work()
    own = wrapped._modules["module"]
    wrapped._modules["module"] = _Work(own, work)
    try:
        # With device_ids it moves arguments to the device, and fails where there are none.
        return wrapped(None)
    finally:
        wrapped._modules["module"] = own


def around_passes(
    wrapped: torch.nn.Module, *, in_backward: bool = False
) -> contextlib.AbstractContextManager:
    """Returns the context of all passes of a forward, or of those in a node of a backward."""
    if deepspeed_engine.is_engine(wrapped):
        return deepspeed_engine.around_passes(wrapped, in_backward=in_backward)
    return contextlib.nullcontext()


def keeps_graphs(wrapped: torch.nn.Module) -> bool:
    """Returns whether graphs may be kept by default between the passes of a forward and those of
    its backward. They would keep weights that are gathered for each, and ranks that run the same
    passes would have to agree that they fit."""
    if deepspeed_engine.is_engine(wrapped):
        return not deepspeed_engine.gathers(wrapped)
    return not tensor_parallel.has_parts(wrapped)


def check_windows(wrapped: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` if no backward may leave parameters without gradient."""
    if deepspeed_engine.is_engine(wrapped):
        deepspeed_engine.refuse_windows()


def process_group_of(model: torch.nn.Module):
    """Returns the process group of DistributedDataParallel; None for other models."""
    return model.process_group if isinstance(model, DistributedDataParallel) else None


def reshard(model: torch.nn.Module) -> None:
    """Frees gathered weights: a forward without backward, such as for log-probabilities, leaves
    some."""
    for module in sharded_modules(model).values():
        module.reshard()


def of(model: torch.nn.Module, view: ModelView) -> ReplicatedWeights:
    """Returns the placement of ``model``'s weights.

    Raises :class:`UnsupportedModelError`.
    """
    if deepspeed_engine.is_engine(model):
        return EngineWeights(model)
    if isinstance(model, DistributedDataParallel):
        return ReplicatedWeights(model.module)
    if not dist.is_available():
        return ReplicatedWeights(model)
    wrapped = [n for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
    if wrapped:
        raise UnsupportedModelError(
            f"{wrapped[0] or 'the model'!r} is in FullyShardedDataParallel, which flattens "
            "parameters; accepted: fully_shard, DistributedDataParallel, or neither"
        )
    modules = sharded_modules(model)
    if not modules and tensor_parallel.has_parts(model):
        tensor_parallel.check(model)
        return SplitWeights(model)
    if not modules:
        return ReplicatedWeights(model)
    _check_sharded(model, view, modules)
    return ShardedWeights(model, modules)


def sharded_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns the modules to which ``fully_shard`` was applied, by name."""
    if not dist.is_available():
        return {}
    return {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}


def parameter_groups(module: FSDPModule) -> list:
    """Returns torch's groups of parameters that a module gathers together. Its public setters
    cannot tell what they replaced."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.12 and before: at most one.
    return [group for group in [state._fsdp_param_group] if group is not None]


def shards(modules: Iterable[FSDPModule]) -> Iterator[tuple[object, object, torch.dtype]]:
    """Yields torch's object of each sharded parameter, that of the parameters gathered with it, and
    the dtype in which it is gathered. torch keeps the dtype, but only since a first forward."""
    for module in modules:
        for group in parameter_groups(module):
            for each in group.fsdp_params:
                yield each, group, _gathered_dtype(each.sharded_param, policy_of(each, group))


def lowest_dtype(model: torch.nn.Module) -> torch.dtype:
    """Returns the narrowest dtype of floating weights in passes: as they are gathered, where a
    ``MixedPrecisionPolicy`` narrows them."""
    dtypes = {p.dtype for p in model.parameters()}
    dtypes |= {dtype for _, _, dtype in shards(sharded_modules(model).values())}
    floating = (dtype for dtype in dtypes if dtype.is_floating_point)
    return min(floating, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


def policy_of(shard, group):
    """Returns the ``MixedPrecisionPolicy`` of a parameter of :func:`shards`."""
    # torch 2.12 and before: one for all of a group.
    return shard.mp_policy if hasattr(shard, "mp_policy") else group.mp_policy


def _gathered_dtype(parameter: torch.nn.Parameter, policy) -> torch.dtype:
    narrows = policy.param_dtype is not None and parameter.is_floating_point()
    return policy.param_dtype if narrows else parameter.dtype


def _contains(module: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(each is inner for each in module.modules())


def _check_sharded(model, view: ModelView, modules: dict[str, torch.nn.Module]) -> None:
    for caller in calls.callers(view.layers, calls.RECURRENT):
        raise UnsupportedModelError(
            f"fully_shard of a model with recurrent layers ({type(caller.module).__name__}): phase "
            "A's backward would not gather the last layer's weights; accepted: softmax attention"
        )
    if "" not in modules:
        raise UnsupportedModelError(
            f"fully_shard was applied to {', '.join(modules)} but not to the model itself; "
            "accepted: fully_shard(model), after its layers"
        )
    inner = {m for layer in view.layers for m in layer.modules()} - set(view.layers)
    for name, module in modules.items():
        if module in inner and "attention" in type(module).__name__.lower():
            raise UnsupportedModelError(
                f"fully_shard of {name!r}: phase A would not complete its forward; accepted: the "
                "model, its decoder, layers, and their submodules except attention"
            )
    check_meshes(model, modules)


def check_meshes(model: torch.nn.Module, modules: dict[str, torch.nn.Module]) -> None:
    """Raises :class:`UnsupportedModelError` for parameters that the sharding leaves out, or that are
    split in other ways too. ``modules``: :func:`sharded_modules`."""
    # A mesh of more dimensions than the sharding's own.
    own = {g.mesh_info.mesh.ndim for m in modules.values() for g in parameter_groups(m)}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > max(own):
            tensor_parallel.refuse_sharded(name)
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise UnsupportedModelError(
                f"parameter {name!r} is on no mesh, so its gradient would not be reduced; "
                "accepted: every trainable parameter under fully_shard"
            )


def check_group(model: torch.nn.Module, size: int) -> None:
    """Checks that the process group has the ranks the weights are sharded over.

    Raises :class:`UnsupportedModelError`.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() != size:
            raise UnsupportedModelError(
                f"parameter {name!r} is on a mesh of {parameter.device_mesh.size()} ranks and the "
                f"step's process group has {size}; accepted: the same ranks"
            )
