"""Windows and chunks that a model puts into its masks alone.

Most models also pass a window to the attention function, and no mask is built in a pass. For others
the call that would build the mask returns the limit, which reaches the attention function in the
mask's place.
"""

from __future__ import annotations

from typing import NamedTuple

from . import calls

_CHUNKED = "create_chunked_causal_mask"
BUILDERS = frozenset({"create_sliding_window_causal_mask", _CHUNKED})

# Arguments with which the mask says more than the window.
_OTHERS = ("or_mask_function", "and_mask_function", "block_sequence_ids")


class WindowMask(NamedTuple):
    """Stands for the mask of a causal window."""

    tokens: int
    """A query at position p reads keys at positions above ``p - tokens``."""


class ChunkMask(NamedTuple):
    """Stands for the mask of causal attention inside chunks."""

    tokens: int
    """A query reads keys whose position divided by ``tokens`` is the same."""


def build(call: calls.FunctionCall) -> WindowMask | ChunkMask | None:
    """Returns what stands for the mask that ``call`` would build; None for a plain causal one."""
    config = call.kwargs["config"] if "config" in call.kwargs else call.args[0]
    is_more = any(call.kwargs.get(name) is not None for name in _OTHERS)
    is_chunked = call.name == _CHUNKED
    tokens = getattr(config, "attention_chunk_size" if is_chunked else "sliding_window", None)
    if tokens is None or is_more:
        # As in every pass: no mask function is registered, so this builds none.
        return call.function(*call.args, **call.kwargs)
    return ChunkMask(tokens) if is_chunked else WindowMask(tokens)
