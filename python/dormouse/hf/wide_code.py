"""Code that computes in FP32 in the place of kernels that do not.

Weights below FP32 are widened for a check (:mod:`.check`). Flash attention and the kernels of delta
rules accept FP16 and BF16 alone. Meanwhile the layers of this thread take transformers' own code
instead. The second comparison of a check, in the model's own dtype, runs the kernels themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedModel

from . import calls, registry
from .support import ModelView

# Part of the names of transformers' implementations.
FLASH = "flash"


@contextlib.contextmanager
def use(view: ModelView) -> Iterator[None]:
    """Context of passes with widened weights, on this thread."""
    with contextlib.ExitStack() as stack:
        if FLASH in (getattr(view.config, "_attn_implementation", None) or ""):
            stack.enter_context(registry.use(None, _attention_of(view)))
        callers = calls.callers(view.layers, frozenset(calls.DELTA_RULES))
        if callers:
            stack.enter_context(calls.in_torch(callers))
        yield


def _attention_of(view: ModelView) -> str:
    inner = (each for each in view.model.modules() if isinstance(each, PreTrainedModel))
    return "sdpa" if all(each._supports_sdpa for each in inner) else "eager"
