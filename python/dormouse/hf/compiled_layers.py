"""Whether a layer that torch.compile has compiled may sleep.

The probe runs layers without their compiled code: torch skips it under a dispatch mode. So the
graph of a compiled layer is not the probed one, and its slots are not known. But whatever it saved,
the layer has read or computed. If the probe has seen no late read of any of that
(:mod:`.late_reads`), all that the graph saved may sleep.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable

import torch

# Name of the node of a compiled region: AOTAutograd's class of it is CompiledFunction.
NODE = "CompiledFunctionBackward"

NOT_PROBED = "its graph is not the probed one"


class _Stance:
    """torch's stance, which is one of the process: the last of several threads puts it back."""

    def __init__(self):
        self._lock = threading.Lock()
        self._threads = 0
        self._eager: torch.compiler.set_stance | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._threads == 0:
                self._eager = torch.compiler.set_stance("force_eager")
            self._threads += 1

    def __exit__(self, *exc) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                self._eager.__exit__(*exc)


_stance = _Stance()


def run_eager(function: Callable) -> Callable:
    """Makes ``function`` run compiled layers without their compiled code, and compile nothing.

    Compiled code of other threads does not run meanwhile either.
    """

    # A step may be part of a compiled function, and torch cannot trace the change of stance.
    @torch.compiler.disable
    @functools.wraps(function)
    def run(*arguments, **options):
        with _stance:
            return function(*arguments, **options)

    return run


def why_awake(signature: tuple[str, ...], late: str | None) -> str | None:
    """Returns why a layer whose graph is not the probed one stays awake; None if it may sleep.

    ``late``: the late read that the probe has seen.
    """
    if NODE not in signature:
        return NOT_PROBED
    reason = late or _of_graphs() or _of_autograd()
    return None if reason is None else f"it is compiled, and {reason}"


def _of_graphs() -> str | None:
    """Returns why CUDA graphs keep compiled layers awake, or None. A replay writes to fixed addresses,
    even if their memory has been given to other tensors since."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        if not config.triton.cudagraph_trees:
            return "torch._inductor.config.triton.cudagraph_trees is False"
        if getattr(config, "cudagraph_policy", None) is not None:
            return "torch._inductor.config.cudagraph_policy is set"
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None and any(map(_has_manager, range(torch.cuda.device_count()))):
        return "compiled code replays CUDA graphs (mode='reduce-overhead', say)"
    return None


def _has_manager(device: int) -> bool:
    trees = sys.modules["torch._inductor.cudagraph_trees"]
    try:
        return trees.get_manager(device, create_if_none_exists=False) is not None
    except (AssertionError, RuntimeError):
        # A thread without torch's own state: nothing can be known.
        return True


def _of_autograd() -> str | None:
    """Compiled autograd reads what layers saved in an order of its own."""
    config = sys.modules.get("torch._dynamo.config")
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    is_on = config is not None and config.compiled_autograd
    if is_on or (compiled is not None and compiled.compiled_autograd_enabled):
        return "compiled autograd is enabled"
    return None
