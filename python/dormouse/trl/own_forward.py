"""The model as its class defines it: without wrappers of its forward and gradient checkpointing.

transformers renews what it attaches for checkpointing whenever it is switched on again, after each
generation. Without it the model is in the same state each time, and is checked once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch

# Attributes of modules that transformers sets for checkpointing. Hooks of the embedding make its
# output require gradients, without which the reentrant kind has none.
_FUNCTION = "_gradient_checkpointing_func"
_HOOKS = ("_require_grads_hooks", "_require_grads_hook")


@contextlib.contextmanager
def own_forward(model: torch.nn.Module) -> Iterator[None]:
    """Context in which a model, and the one that peft adapts in it, run the forward of their class
    where one that wraps it was put in its place, and checkpoint nothing.

    TRL adds a head that is chosen by an argument, Accelerate a precision context. Whether their
    effect is the caller's own is found by comparing (:mod:`.probe`).
    """
    with contextlib.ExitStack() as stack:
        for module in _roots(model):
            if _wraps_own(module):
                stack.enter_context(_without(module, "forward"))
        for module in model.modules():
            if vars(module).get("gradient_checkpointing"):
                stack.enter_context(_without(module, "gradient_checkpointing", instead=False))
            for hook in vars(module).get(_HOOKS[0]) or ():
                stack.enter_context(_unhooked(hook))
            for name in (_FUNCTION, *_HOOKS):
                if name in vars(module):
                    stack.enter_context(_without(module, name))
        yield


def _roots(model: torch.nn.Module) -> list[torch.nn.Module]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [model] if base is model else [model, base]


def _wraps_own(module: torch.nn.Module) -> bool:
    patch = vars(module).get("forward")
    return patch is not None and inspect.unwrap(patch) is inspect.unwrap(type(module).forward)


@contextlib.contextmanager
def _without(module: torch.nn.Module, name: str, **replacement) -> Iterator[None]:
    """Context in which a module lacks an attribute, or has the one given as ``instead``."""
    attributes = vars(module)
    own = attributes.pop(name)
    if replacement:
        attributes[name] = replacement["instead"]
    try:
        yield
    finally:
        attributes[name] = own


@contextlib.contextmanager
def _unhooked(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    """Context in which a hook is not called; it keeps its place among the others."""
    hooks = handle.hooks_dict_ref()
    if hooks is None or handle.id not in hooks:
        yield
        return
    all_hooks = dict(hooks)
    del hooks[handle.id]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(all_hooks)
