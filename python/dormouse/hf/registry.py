"""The entry in transformers' attention registry through which a model's layers reach a step.

While a thread is inside :class:`use`, every configuration reports this entry as its attention
implementation to that thread. Other threads, and this thread outside, see the model's own: the
model is not modified, and may be evaluated meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedConfig

from .attention import Rules
from .masks import ChunkMask, WindowMask
from .ring_attention import Ring
from .support import UnsupportedModelError

NAME = "dormouse"

# Arguments that transformers passes through to attention functions and that change no score.
IGNORED = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class AttentionCall(NamedTuple):
    """One layer's attention: what the model passed, with shapes as in :mod:`.attention`."""

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rules: Rules
    sinks: torch.Tensor | None
    """One logit per head, ``[heads]``."""
    ranges: tuple[range, ...] | None = None
    """In phase A: of the queries, among the rows of the keys; None: all."""
    ring: Ring | None = None
    """By which K and V of the prompt pass; those of the call are a block of it in phase A. None:
    they are whole."""


Attend = Callable[[AttentionCall], torch.Tensor]

_active = threading.local()
_lock = threading.Lock()
_users = 0
_own = PreTrainedConfig.__dict__["_attn_implementation"]


def _implementation(config) -> str | None:
    name = getattr(_active, "name", None)
    return _own.fget(config) if name is None else name


_of_thread = property(_implementation, _own.fset)


class use:
    """Context: this thread's registry attention calls go to ``attend``."""

    def __init__(self, attend: Attend | None, name: str = NAME):
        """``name``: of the implementation that configurations report. ``attend``: None: that
        implementation is transformers'."""
        self._attend, self._name = attend, name

    def __enter__(self):
        global _users
        self._before = getattr(_active, "attend", None), getattr(_active, "name", None)
        _active.attend, _active.name = self._attend, self._name
        with _lock:
            _users += 1
            PreTrainedConfig._attn_implementation = _of_thread

    def __exit__(self, *exc):
        global _users
        _active.attend, _active.name = self._before
        with _lock:
            _users -= 1
            if _users == 0:
                PreTrainedConfig._attn_implementation = _own


# Compiled layers call it between their graphs: it is not traced, so a pass compiles nothing anew.
@torch.compiler.disable
def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    **others,
):
    """The attention function that transformers calls; see ``transformers.AttentionInterface``."""
    attend = getattr(_active, "attend", None)
    if attend is None:
        raise RuntimeError(
            "attention implementation 'dormouse' runs only inside dormouse.hf.SharedPrefix"
        )
    if isinstance(attention_mask, WindowMask):
        if sliding_window not in (None, attention_mask.tokens):
            raise UnsupportedModelError(
                f"{type(module).__name__} passes a window of {sliding_window} tokens and a mask of "
                f"{attention_mask.tokens}; accepted: the same"
            )
        sliding_window, attention_mask = attention_mask.tokens, None
    chunk = None
    if isinstance(attention_mask, ChunkMask):
        if sliding_window is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes a window of {sliding_window} tokens and a mask of "
                f"chunks of {attention_mask.tokens}; accepted: one of them"
            )
        chunk, attention_mask = attention_mask.tokens, None
    for kind, tokens in (("a window", sliding_window), ("chunks", chunk)):
        if tokens is not None and tokens < 1:
            raise UnsupportedModelError(
                f"{type(module).__name__} has {kind} of {tokens} tokens; accepted: at least 1"
            )
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes an attention mask of its own; accepted: masks that "
            "transformers builds for the attention implementation"
        )
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{type(module).__name__} is not causal; accepted: causal")
    if dropout:
        raise UnsupportedModelError(f"attention dropout {dropout}; accepted: 0")
    for name, argument in others.items():
        if name not in IGNORED and argument is not None and argument is not False:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to its attention; accepted: scaling, "
                "sliding_window, softcap, s_aux"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = autocast(query, key, value)
    rules = Rules(float(scale), sliding_window, softcap, chunk)
    out = attend(AttentionCall(module, query, key, value, rules, s_aux)).transpose(1, 2)
    # As torch's attention: some models view it with other dimensions. Flash stores tokens first,
    # and copies nothing here.
    return out.contiguous(), None


def autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns ``tensors`` as autocast passes them to torch's attention: rotary embedding returns
    FP32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


# No mask function is registered: the schedule defines which row attends to which key, and building
# a mask would synchronise with the GPU in every microbatch.
AttentionInterface.register(NAME, attention)
