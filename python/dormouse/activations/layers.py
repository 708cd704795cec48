"""The repeated layers of a model, and the modules around them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.nn import Module, ModuleList, Sequential

from ..errors import ArgumentError

# Fewer layers have none below the last two, which backward needs first.
LAYERS_MIN = 3


def find_layers(model: Module) -> list[Module]:
    """Returns the modules of the longest ModuleList or Sequential that repeats its classes: it has
    at most half as many classes as modules. One inside another is not considered: experts, say.

    Raises :class:`ArgumentError` if there is none of at least :data:`LAYERS_MIN` modules.
    """
    longest = max(_outermost(model), key=len, default=())
    if len(longest) < LAYERS_MIN:
        raise ArgumentError(
            f"{type(model).__name__} has no ModuleList or Sequential of at least {LAYERS_MIN} "
            "modules of repeated classes; accepted: layers=[...], its layers in order"
        )
    return list(longest)


def check_layers(model: Module, layers: Sequence[Module]) -> list[Module]:
    """Returns the layers that a caller names. Raises :class:`ArgumentError` unless they are
    different modules inside ``model``, none inside another."""
    inside = set(model.modules()) - {model}
    for layer in layers:
        if layer not in inside:
            raise ArgumentError(f"{_named(layer)} is not inside the model; accepted: its modules")
    if len(set(layers)) < max(len(layers), 1):
        raise ArgumentError(
            f"layers has {len(layers)} entries and {len(set(layers))} modules; accepted: each "
            "module once, and at least one"
        )
    for layer in layers:
        nested = set(layers).intersection(layer.modules()) - {layer}
        if nested:
            raise ArgumentError(
                f"{_named(nested.pop())} is inside {_named(layer)}; accepted: layers side by side"
            )
    return list(layers)


def modules_around(model: Module, layers: Sequence[Module]) -> list[Module]:
    """Returns ``model`` and its modules that contain a layer. A forward is a call of any."""
    wanted = set(layers)
    return [
        module for module in model.modules() if wanted.intersection(module.modules()) - {module}
    ]


def check_not_compiled(model: Module) -> None:
    """Raises :class:`ArgumentError` for a model that torch.compile has compiled, wholly or in part:
    compiled code runs no hooks at the borders of its layers."""
    name = _compiled_in(model)
    if name is not None:
        raise ArgumentError(
            f"{name or 'the model'} is compiled by torch.compile; accepted: a model that is not"
        )


def is_compiled(model: Module) -> bool:
    """Returns whether torch.compile has compiled the model, wholly or in part."""
    return _compiled_in(model) is not None


def _compiled_in(model: Module) -> str | None:
    """Returns the name of the first compiled module, ``""`` for the model; None without one."""
    for name, module in model.named_modules():
        if is_compiled_by_itself(module):
            return name
    return None


def is_compiled_by_itself(module: Module) -> bool:
    """Returns whether torch.compile has compiled a module's forward, with what it calls."""
    # Not loaded: nothing is compiled. Loading it takes a second.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return False
    is_wrapped = isinstance(module, compiler.OptimizedModule)
    is_patched = hasattr(module.forward, "_torchdynamo_orig_callable")
    return is_wrapped or is_patched or module._compiled_call_impl is not None


def _outermost(module: Module) -> list[Module]:
    """Returns lists of layers, none inside another."""
    if isinstance(module, (ModuleList, Sequential)) and len(module) >= LAYERS_MIN:
        classes = {type(each) for each in module}
        if 2 * len(classes) <= len(module):
            return [module]
    return [found for child in module.children() for found in _outermost(child)]


def _named(module: Module) -> str:
    return f"a {type(module).__name__}"
