"""CUDA bytes in ``torch.profiler`` (``profile_memory=True``), for mode ``"allocator"``.

The library reports allocations and frees to torch's profiler, as torch's own allocator does, but
only while one runs. Torch calls two functions of ``torch.autograd.profiler`` when a profiler starts
and stops; their replacements tell the library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .. import _native as native

# Torch's functions, and whether a profiler runs after each.
_HOOKS = {"_run_on_profiler_start": True, "_run_on_profiler_stop": False}


def notice() -> list[str]:
    """Returns a sentence if this torch lacks what the reports need, else nothing."""
    missing = [name for name in _HOOKS if not hasattr(torch.autograd.profiler, name)]
    if not tell(False):
        missing.append("exported functions of its profiler")
    if not missing:
        return []
    names = ", ".join(missing)
    return [f"torch {torch.__version__} has no {names}: torch.profiler has no CUDA bytes"]


def tell(is_running: bool) -> bool:
    """Tells the library whether a profiler runs. Returns whether it can report to one."""
    return bool(native.library().dormouse_torch_set_profiled(is_running))


def is_running() -> bool:
    """Returns whether a profiler runs."""
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", False)


def replacements() -> dict[str, Callable[[], None]]:
    """Returns replacements for those of torch's functions that exist."""
    profiler = torch.autograd.profiler
    return {
        name: _telling(getattr(profiler, name), is_running)
        for name, is_running in _HOOKS.items()
        if hasattr(profiler, name)
    }


def _telling(own: Callable[[], None], is_running: bool) -> Callable[[], None]:
    @functools.wraps(own)
    def run() -> None:
        tell(is_running)
        own()

    return run
