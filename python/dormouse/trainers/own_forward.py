"""The model as its class defines it: without wrappers of its forward and gradient checkpointing.

transformers renews what it attaches for checkpointing whenever it is switched on again, after each
generation. Without it the model is in the same state each time, and is checked once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch

from ..hf import substitutes

# Attributes of modules that transformers sets for checkpointing.
_ATTRIBUTES = ("_gradient_checkpointing_func", "_require_grads_hooks", "_require_grads_hook")
# Name of its hooks that make the embedding's output require gradients, without which the reentrant
# kind has none. It loses the handles of some.
_HOOK = "make_inputs_require_grads"


@contextlib.contextmanager
def own_forward(
    model: torch.nn.Module, instead: Mapping[torch.nn.Module, Callable] = MappingProxyType({})
) -> Iterator[None]:
    """Context in which a model, and the one that peft adapts in it, run the forward of their class
    where one that wraps it was put in its place, and checkpoint nothing.

    TRL adds a head that is chosen by an argument, Accelerate a precision context. Whether their
    effect is the caller's own is found by comparing (:mod:`.probe`).

    ``instead``: in place of forwards that the trainer has put into modules.
    """
    with contextlib.ExitStack() as stack:
        for module, forward in instead.items():
            stack.enter_context(_without(module, "forward", instead=forward))
        for module in _roots(model):
            if _wraps_own(module):
                stack.enter_context(_without(module, "forward"))
        hooks = [
            (module._forward_hooks, number)
            for module in model.modules()
            for number, hook in module._forward_hooks.items()
            if _is_for_checkpointing(hook)
        ]
        stack.enter_context(substitutes.without_hooks(hooks))
        for module in model.modules():
            if vars(module).get("gradient_checkpointing"):
                stack.enter_context(_without(module, "gradient_checkpointing", instead=False))
            for name in _ATTRIBUTES:
                if name in vars(module):
                    stack.enter_context(_without(module, name))
        yield


def outside_autocast(own: Callable) -> Callable:
    """Returns a module's forward that computes in the dtypes of its input and weights."""

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return own(hidden_states)

    return forward


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


def _is_for_checkpointing(hook) -> bool:
    is_transformers = getattr(hook, "__module__", "").startswith("transformers.")
    return is_transformers and hook.__qualname__.endswith(_HOOK)
