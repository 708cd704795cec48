"""peft adapters whose effect depends on what a prefix and its responses have apart.

Other adapters change modules, and the check compares them as it compares every module. Those below
read the whole sequence, so that random tokens cannot stand for the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .support import UnsupportedModelError


def check(model: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` for active adapters that are known to be inexact."""
    for name, config in _active(model):
        kind = getattr(config.peft_type, "value", config.peft_type)
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {name!r} ({kind}) puts virtual tokens before every forward; accepted: "
                "adapters of modules, such as LoRA"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"adapter {name!r} is an activated LoRA: the last invocation tokens of each whole "
                "sequence decide where it acts; accepted: LoRA without alora_invocation_tokens"
            )


def reregistered(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yields parameters that an adapter takes out of their module and puts back in each forward,
    which counts as a write: those of LoRA's ``target_parameters``."""
    for module in model.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "get_param"):
            yield module.get_param()


def _active(model: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yields names and configurations of the active adapters."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if not isinstance(configs, dict):
            continue
        active = getattr(module, "active_adapters", configs)
        if callable(active):
            # Of transformers, whose models peft also marks with configurations.
            active = active() if getattr(module, "_hf_peft_config_loaded", False) else ()
        yield from ((name, configs[name]) for name in active if name in configs)
