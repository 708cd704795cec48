"""DeepSpeed's engine: what it does around a forward, done once around the passes of a call.

A call runs inside the engine's forward, so the backward prepares the reduction as for any forward
of the engine, and its parameters receive one gradient. Inside, the passes run the model without the
hooks of the engine: those of ZeRO's stage 3 gather and free the weights of every module as it runs,
and a pass ends inside the last layer. Instead all weights are gathered around the passes, once for
the forward and once for the backward.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import substitutes
from .support import UnsupportedModelError

# Attributes in which the hooks of stage 3 count. Some grow with each forward of the engine, which
# is no change of the model.
_COUNTS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


def is_engine(model: torch.nn.Module) -> bool:
    """Returns whether ``model`` is an engine of DeepSpeed, of any kind."""
    engines = sys.modules.get("deepspeed.runtime.engine")
    return engines is not None and isinstance(model, engines.DeepSpeedEngine)


def check(engine) -> None:
    """Raises :class:`UnsupportedModelError` for what is known not to be exact."""
    if type(engine).__name__ != "DeepSpeedEngine":
        raise UnsupportedModelError(
            f"{type(engine).__name__} has a forward of its own; accepted: DeepSpeedEngine"
        )
    for applies, seen, accepted in _refusals(engine):
        if applies:
            raise UnsupportedModelError(f"{seen}; accepted of DeepSpeed's engine: {accepted}")


def _refusals(engine) -> Iterator[tuple[object, str, str]]:
    """Yields whether a refusal applies, what is seen, and what is accepted."""
    yield (
        engine.mp_world_size > 1 or engine.autotp_size() > 1,
        "tensor parallelism runs collectives in each pass",
        "data parallelism",
    )
    yield (
        engine.sequence_parallel_size > 1,
        f"sequence_parallel_size is {engine.sequence_parallel_size}, so passes run collectives",
        "1",
    )
    yield engine.has_moe_layers, "experts are spread over ranks", "transformers' own experts"
    yield engine.is_compiled, "engine.compile() was called", "an engine that is not compiled"
    yield (
        engine.random_ltd_enabled(),
        "random_ltd drops other tokens in each pass",
        "no data_routing",
    )
    # Autotuning switches the profiler on.
    yield engine.autotuning_enabled(), "autotuning ends the process", "autotuning off"
    yield (
        engine.flops_profiler_enabled(),
        "flops_profiler puts hooks on every module for one step",
        "flops_profiler off",
    )
    yield engine.zenflow, "zenflow updates weights beside the backward", "zenflow off"
    if not engine.zero_optimization_partition_weights():
        return
    yield (
        engine.zero_hpz_partition_size() > 1,
        f"zero_hpz_partition_size is {engine.zero_hpz_partition_size()}",
        "1",
    )
    yield (
        engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights(),
        "zero_quantized_weights rounds weights in the engine's own forward alone",
        "weights that are gathered as they are",
    )
    yield (
        getattr(engine.optimizer, "leaf_parameters", None),
        "a leaf module of ZeRO's stage 3 reduces in each backward of the module",
        "no leaf modules",
    )


def refuse_own_backward(what: str) -> None:
    """Raises :class:`UnsupportedModelError`: ``what`` would add to ``.grad`` beside the engine."""
    raise UnsupportedModelError(
        f"{what} runs backwards of its own, and DeepSpeed's engine owns the backward; accepted: "
        "score(), and engine.backward() of a loss of its values"
    )


def refuse_windows() -> None:
    """Raises :class:`UnsupportedModelError`: the engine reduces after each backward, and those of
    a window's parts but the last give it no gradient."""
    raise UnsupportedModelError(
        "window() with DeepSpeed's engine, which reduces after every backward; accepted: score() "
        "of all rows, and one engine.backward() of the losses of all microbatches"
    )


def gathers(engine) -> bool:
    """Returns whether ranks hold parts of each weight: stage 3."""
    return engine.zero_optimization_partition_weights()


def sums_wide(engine) -> bool:
    """Returns whether the engine adds up gradients of microbatches in FP32, which are narrower."""
    model_dtype, sum_dtype = engine.get_data_types()
    return sum_dtype == torch.float32 and model_dtype != sum_dtype


@contextlib.contextmanager
def around_passes(engine, *, in_backward: bool) -> Iterator[None]:
    """Context of the passes of a forward, or of those in a node of the engine's backward.

    Stage 3: entering it is a collective of the ranks. Raises :class:`UnsupportedModelError` before.
    """
    check(engine)
    from deepspeed.runtime.torch_autocast import autocast_if_enabled

    weights = _gathered_until_end(engine) if in_backward else _gathered(engine)
    with (
        weights,
        substitutes.without_hooks(_hooks(engine)),
        _without_counts(engine.module),
        autocast_if_enabled(engine),
    ):
        yield


def inside(engine, work: torch.nn.Module):
    """Returns ``work()``, run as the forward of the engine."""
    own = engine.module
    # The hooks of the model, which are off in its passes: timers.
    work.register_forward_pre_hook(lambda *call: engine._forward_prologue((), {}))
    work.register_forward_hook(lambda *call: engine._forward_epilogue())
    _set_module(engine, work)
    try:
        return engine()
    finally:
        _set_module(engine, own)


def _set_module(engine, module: torch.nn.Module) -> None:
    # Where the engine keeps it: DeepSpeedEngine._set_client_model.
    engine._modules["module"] = engine.__dict__["module"] = module


def _gathered(engine) -> contextlib.AbstractContextManager:
    """Returns the context in which this rank has all weights whole."""
    if not gathers(engine):
        return contextlib.nullcontext()
    # After a backward that failed.
    _free(engine)
    return _all_weights(engine)


def _all_weights(engine) -> contextlib.AbstractContextManager:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters(list(engine.module.parameters()))


@contextlib.contextmanager
def _gathered_until_end(engine) -> Iterator[None]:
    """As :func:`_gathered`, until the backward that is running ends: gradients are accumulated
    after the node, in the layout of whole weights, and the backward may have nodes of other calls.
    """
    if not gathers(engine):
        yield
        return
    backward = torch._C._current_graph_task_id()
    if engine not in _held or _held[engine].backward != backward:
        _free(engine)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_all_weights(engine))
            _held[engine] = _Held(backward, stack.pop_all())
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_free, engine))
    try:
        yield
    except BaseException:
        _free(engine)
        raise


class _Held(NamedTuple):
    """Weights that are whole until a backward ends."""

    backward: int
    """torch's number of it."""
    stack: contextlib.ExitStack


_held: weakref.WeakKeyDictionary[torch.nn.Module, _Held] = weakref.WeakKeyDictionary()


def _free(engine) -> None:
    held = _held.pop(engine, None)
    if held is not None:
        # Of the engine's own forwards in the same backward; else it would do so next.
        _stage_3_hooks(engine).release_backward_leftovers()
        held.stack.close()


def _stage_3_hooks(engine):
    # An engine without an optimizer has them in its place.
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


def _hooks(engine) -> Iterator[tuple[dict, int]]:
    """Yields the engine's hooks on modules, each a table and its number in it."""
    handles = [engine.module_forward_pre_hook, engine.module_forward_post_hook]
    if gathers(engine):
        own = _stage_3_hooks(engine)
        handles += [own.fwd_pre_hook, *own.forward_hooks, *own.backward_hooks]
    for handle in handles:
        table = handle.hooks_dict_ref()
        if table is not None:
            yield table, handle.id


@contextlib.contextmanager
def _without_counts(model: torch.nn.Module) -> Iterator[None]:
    taken = [
        (module.__dict__, name, module.__dict__.pop(name))
        for module in model.modules()
        for name in _COUNTS
        if name in module.__dict__
    ]
    try:
        yield
    finally:
        for attributes, name, count in taken:
            attributes[name] = count
