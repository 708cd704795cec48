"""Whether a layer that torch.compile has compiled may sleep.

The probe runs layers without their compiled code: torch skips it under a dispatch mode. So the
graph of a compiled layer is not the probed one, and its slots are not known. But whatever it saved,
the layer has read or computed. If the probe has seen no late read of any of that
(:mod:`.late_reads`), all that the graph saved may sleep.
"""

from __future__ import annotations

import sys
import threading

import torch

# Name of the node of a compiled region: AOTAutograd's class of it is CompiledFunction.
NODE = "CompiledFunctionBackward"

NOT_PROBED = "its graph is not the probed one"


class _Eager:
    """Context in which compiled layers run without their compiled code, and nothing is compiled, on
    any thread: torch has one stance. The last of several threads puts it back.

    torch cannot trace it, so what enters it has ``torch.compiler.disable``: a step may be part of a
    compiled function.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._entered = 0
        self._stance: torch.compiler.set_stance | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._entered == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._entered += 1

    def __exit__(self, *exc) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                self._stance.__exit__(*exc)


EAGER = _Eager()


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
